"""When each request runs: admission, chunking, preemption, finishing. No torch, no tensors."""

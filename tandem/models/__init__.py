"""Model families: which layers they are made of and how their checkpoints name the tensors."""

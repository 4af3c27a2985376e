"""Layers of one rank: the tensors they hold, how tensor parallelism cuts them, and their forward.

A layer is built from loaded tensors and called with the hidden state of packed tokens and the
`ForwardBatch`; it knows no request, no scheduler and no file.
"""

"""Pure functions on tensors, one folder per op; they know no model, no request and no scheduler.

A folder holds `reference.py` (plain torch, the test oracle), at times faster paths with the same
signatures, and an `__init__.py` that chooses between them by the tensors it is given. State
arguments are strided views of one arena (axis 0 is the slot or page): they are indexed in place,
never made contiguous.
"""

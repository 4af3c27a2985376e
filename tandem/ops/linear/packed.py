"""One linear layer over weights that no longer change."""

import ctypes

import torch
import torch.nn.functional as F

from tandem.errors import ShapeError
from tandem.ops.activation import activate
from tandem.ops.dispatch import is_native_enabled
from tandem.ops.linear.memory import weight_memory
from tandem.ops.native import load


class PackedLinear:
    """x @ weight^T + bias, built once after the weights are loaded.

    On a CPU that multiplies bf16 in hardware, a bf16 weight is copied into the order in which the
    native kernel streams it, and the original is not kept: the caller that drops it holds the
    weights once. Everywhere else the original is kept, and `F.linear` runs. A row of the result of
    the native kernel does not depend on the other rows, not even by rounding. On a GPU, few rows
    have kernels of their own; a layer then runs on one stream at a time.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: [N, K], read now.    bias: [N] or None.    Raises: ShapeError."""
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise ShapeError(
                f"weight is {tuple(weight.shape)} and bias is "
                f"{None if bias is None else tuple(bias.shape)}; expected [N, K] and [N]"
            )
        self.num_outputs, self.num_inputs = weight.shape
        self.dtype = weight.dtype
        self._weight: torch.Tensor | None = weight
        self._bias = bias
        self._packed: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        if weight.is_cuda and is_native_enabled():
            from tandem.ops.linear import triton

            self._triton = triton
            self._counts = triton.counters(weight)
        library = load() if _takes(weight) else None
        if library is not None and library.tandem_has_bf16_dot():
            self._pack(weight, library)

    @property
    def is_native(self) -> bool:
        """Whether the native kernel runs, on a copy of the weights of its own."""
        return self._packed is not None

    @property
    def matrix(self) -> torch.Tensor | None:
        """The weight alone: None where there is a bias, too, or the weight was packed."""
        return self._weight if self._bias is None else None

    def __call__(self, x: torch.Tensor, activation: str | None = None) -> torch.Tensor:
        """[..., K] → [..., N] in x.dtype, which is the dtype of the weight.

        activation: None or "relu2".
        """
        if self._counts is not None:
            out = self._run_few(x, activation, None)
            if out is not None:
                return out
        if activation is not None:
            return activate(self(x), activation)
        if self._packed is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self._bias)
        if x.dtype is not torch.bfloat16 or x.shape[-1] != self.num_inputs:
            raise ShapeError(
                f"x is {tuple(x.shape)} {x.dtype}; expected [..., {self.num_inputs}] torch.bfloat16"
            )
        rows = x if x.dim() == 2 else x.reshape(-1, self.num_inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = rows.new_empty(rows.shape[0], self.num_outputs)
        self._run(
            rows.data_ptr(),
            rows.stride(0),
            self._packed_address,
            self._bias_address,
            out.data_ptr(),
            self.num_outputs,
            rows.shape[0],
            self.num_outputs,
            self.num_inputs,
        )
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.num_outputs)

    def wide(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[R, K] → fp32 [R, N], in `out` where it is given; a GPU does not round in between."""
        if x.is_cuda and x.dtype is not torch.float32 and self._bias is None:
            assert self._weight is not None
            if out is None:
                out = x.new_empty(x.shape[0], self.num_outputs, dtype=torch.float32)
            if self._counts is not None and self._run_few(x, None, out) is not None:
                return out
            return torch.mm(x, self._weight.t(), out_dtype=torch.float32, out=out)
        values = self(x)
        return values.float() if out is None else out.copy_(values)

    def _run_few(
        self, x: torch.Tensor, activation: str | None, out: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The GPU kernels for few rows; None where they do not take x, or are not the best."""
        assert self._weight is not None
        assert self._counts is not None
        if not self._triton.takes(x, self._weight, activation):
            return None
        return self._triton.linear(x, self._weight, self._bias, self._counts, activation, out)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, for an embedding tied to this layer: int64 [...] → [..., K]."""
        if self._packed is None:
            assert self._weight is not None
            return F.embedding(ids, self._weight)
        rows = ids.reshape(-1).to(torch.int64)
        # An id outside would read memory of somebody else.
        if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= self.num_outputs):
            raise ShapeError(
                f"ids run from {int(rows.min())} to {int(rows.max())}; "
                f"expected 0 to {self.num_outputs - 1}"
            )
        out = torch.empty(len(rows), self.num_inputs, dtype=torch.bfloat16)
        self._library.tandem_linear_rows(
            self._packed_address, rows.data_ptr(), out.data_ptr(), len(rows), self.num_inputs
        )
        return out.view(*ids.shape, self.num_inputs)

    def _pack(self, weight: torch.Tensor, library: ctypes.CDLL) -> None:
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        numel = library.tandem_linear_packed_numel(self.num_outputs, self.num_inputs)
        self._packed = weight_memory.take(numel)
        self._packed_address = self._packed.data_ptr()
        library.tandem_linear_pack(
            weight.data_ptr(),
            weight.stride(0),
            self._packed_address,
            self.num_outputs,
            self.num_inputs,
        )
        self._bias = None if self._bias is None else self._bias.float().contiguous()
        self._bias_address = None if self._bias is None else self._bias.data_ptr()
        self._library = library
        self._run = library.tandem_linear_bf16
        self._weight = None


def _takes(weight: torch.Tensor) -> bool:
    return (
        is_native_enabled()
        and weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and not weight.requires_grad
        and weight.numel() > 0
    )

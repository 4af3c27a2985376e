"""Moves the inputs of a step to the device: many small arrays, one copy.

The arrays are laid end to end in page-locked memory, from where a copy runs beside the host. It
knows no meaning of any array.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

# Each array starts here: kernels load whole lines, and are compiled for aligned addresses.
_ALIGNMENT = 128
# Buffers that copies may be running from while the host fills the next.
_NUM_BUFFERS = 3
_MIN_NBYTES = 1 << 16

_DTYPES: dict[np.dtype, torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def place(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, int], int]:
    """(byte offset of each array, bytes in all), in the order of the mapping.

    The place of an array depends on the sizes of those before it alone.
    """
    offsets, end = {}, 0
    for name, array in arrays.items():
        offsets[name] = end
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def view(buffer: torch.Tensor, offset: int, like: np.ndarray) -> torch.Tensor:
    """The tensor of `like`'s shape and dtype at a byte offset of a uint8 buffer."""
    typed = buffer[offset : offset + like.nbytes].view(_DTYPES[like.dtype])
    return typed.view(like.shape)


@dataclass
class _HostBuffer:
    tensor: torch.Tensor
    array: np.ndarray
    copied: torch.cuda.Event


class Staging:
    """Host buffers of one device, used in turn. On a CPU there is nothing to move.

    `send` returns at once; what it returns is ready in the order of the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_HostBuffer] = []
        self._turn = 0

    def send(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """The arrays as tensors on the device. On a CPU they share the arrays' memory."""
        if self._device.type == "cpu":
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        offsets, nbytes = place(arrays)
        target = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self.send_to(target, arrays)
        return {name: view(target, offsets[name], array) for name, array in arrays.items()}

    def send_to(self, target: torch.Tensor, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the arrays into a uint8 tensor of the device, where `place` puts them."""
        offsets, nbytes = place(arrays)
        assert nbytes <= len(target), (nbytes, len(target))
        if self._device.type == "cpu":
            _pack(target.numpy(), offsets, arrays)
            return
        buffer = self._next(nbytes)
        _pack(buffer.array, offsets, arrays)
        target[:nbytes].copy_(buffer.tensor[:nbytes], non_blocking=True)
        buffer.copied.record()

    def _next(self, nbytes: int) -> _HostBuffer:
        """A buffer of at least `nbytes` that no copy reads any more."""
        index = self._turn
        self._turn = (index + 1) % _NUM_BUFFERS
        if index < len(self._buffers):
            buffer = self._buffers[index]
            buffer.copied.synchronize()
            if len(buffer.array) >= nbytes:
                return buffer
        size = max(_MIN_NBYTES, 1 << (nbytes - 1).bit_length())
        tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        buffer = _HostBuffer(tensor, tensor.numpy(), torch.cuda.Event())
        self._buffers[index : index + 1] = [buffer]
        return buffer


def _pack(buffer: np.ndarray, offsets: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        start = offsets[name]
        buffer[start : start + array.nbytes] = (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )


class Mark:
    """A point in the order of the current stream; `wait` returns when the device has passed it.

    On a CPU it has been passed already.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None


class Fetch:
    """A copy from device to host that runs beside the host; `wait` gives its values.

    On a CPU the values are there already.
    """

    def __init__(self, values: torch.Tensor) -> None:
        """values: int64 [n]; may change once the current stream has passed this point."""
        if values.is_cuda:
            # From the caching allocator of page-locked memory: cheap after the first few.
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
        else:
            self._host = values.clone()
        self._mark = Mark(values.device)

    def wait(self) -> np.ndarray:
        self._mark.wait()
        return self._host.numpy()

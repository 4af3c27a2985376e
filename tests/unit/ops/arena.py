"""Strided views of a small arena, as the ops get them: axis 0 far apart, garbage at first."""

import torch


class GarbageArena:
    """`num_rows` rows of NaN, one part of `shape` inside each; knows which rows have changed."""

    def __init__(self, num_rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        numel = torch.Size(shape).numel()
        self._buffer = torch.full((num_rows, 24 + numel + 40), torch.nan, dtype=dtype)
        self._before = self._buffer.clone()
        self._part = slice(24, 24 + numel)
        self.view = self._buffer[:, self._part].unflatten(1, shape)

    def fill(self, row: int, values: torch.Tensor) -> None:
        """Give a row live content; it counts as unchanged afterwards."""
        self.view[row] = values.to(self.view.dtype)
        self._before[row] = self._buffer[row]

    def assert_only_changed(self, rows: list[int]) -> None:
        """Outside the part, and in the other rows, each byte is what it was."""
        expected = self._before.clone()
        expected[rows, self._part] = self._buffer[rows, self._part]
        assert torch.equal(expected.view(torch.uint8), self._buffer.view(torch.uint8))
        assert not self.view[rows].isnan().any()

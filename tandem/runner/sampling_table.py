"""How each request chooses its tokens, as columns of numbers: one step's rows are one gather.

It holds parameters and counts of tokens; the arithmetic on logits is in sampler.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tandem.runner.philox import uniforms
from tandem.scheduler.request import SamplingParams

# What a row needs besides its best token.
_RANDOM, _SHORT_CUT, _LONG_CUT, _PENALTY, _BIAS, _LOGPROBS, _MIN_TOKENS = (
    1 << bit for bit in range(7)
)
# Up to here the best few tokens are selected; beyond, the vocabulary is sorted.
MAX_SHORT_CUT = 1024
# A top_p that keeps everything, whatever rounding makes of the sum.
_KEEP_ALL = 2.0
_NO_TOP_K = 1 << 31
# Differences of logits over this are finite in fp32.
_MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class SamplingPlan:
    """What one step's rows need, in numbers that a device takes.

    arrays, by name; `index` arrays are int64 places among the R rows, absent where nobody needs
    them:
        random.index; with it temperature fp32, uniform fp64, top_k int64, top_p fp64, min_p fp32,
            for each of these rows.    short.index, long.index: places among the random rows.
        penalty.index; with it penalty.slot int64 (row of the counts), repetition, presence,
            frequency fp32.
        bias.row, bias.token int64, bias.value fp32: one entry a bias.
        banned.row, banned.token int64: tokens that may not come yet.
        logprobs.index.
    max_top_k: of the short cuts.    max_logprobs: the most alternatives that a row reports.
    """

    num_rows: int
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    max_top_k: int = 0
    max_logprobs: int = 0
    num_logprobs: tuple[int, ...] = ()  # of each row in logprobs.index


@dataclass(frozen=True)
class _Extra:
    """Of one request, what has no column."""

    bias_tokens: np.ndarray
    bias_values: np.ndarray
    end_tokens: np.ndarray


class PenaltyCounts:
    """On the device: how often each request has generated each token, and what its prompt holds.

    Rows exist for requests with penalties alone.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._free: list[int] = []
        self.generated = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.is_in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def add(self, prompt: Sequence[int], generated: Sequence[int]) -> int:
        """The row of a new request."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        counts = self.generated[slot].zero_()
        tokens = self._send(generated)
        counts.index_add_(0, tokens, torch.ones_like(tokens, dtype=counts.dtype))
        self.is_in_prompt[slot].zero_().index_fill_(0, self._send(prompt), True)
        return slot

    def _send(self, tokens: Sequence[int]) -> torch.Tensor:
        """int64 [n] on the device, without waiting for what runs there."""
        values = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
        if self._device.type == "cuda":
            values = values.pin_memory().to(self._device, non_blocking=True)
        return values

    def remove(self, slot: int) -> None:
        self._free.append(slot)

    def count(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Each of these requests (int64 [n], distinct) has generated its token (int64 [n])."""
        flat = self.generated.view(-1)
        ones = torch.ones_like(slots, dtype=torch.int32)
        flat.scatter_add_(0, slots * self._vocab_size + tokens, ones)

    def _grow(self) -> None:
        old = len(self.generated)
        more = max(8, old)
        self._free.extend(range(old, old + more))
        for name in ("generated", "is_in_prompt"):
            table = getattr(self, name)
            setattr(self, name, torch.cat([table, table.new_zeros(more, self._vocab_size)]))


_COLUMNS: dict[str, type] = {
    "flags": np.uint8,
    "temperature": np.float32,
    "top_k": np.int64,
    "top_p": np.float64,
    "min_p": np.float32,
    "seed": np.uint64,
    "repetition": np.float32,
    "presence": np.float32,
    "frequency": np.float32,
    "num_generated": np.int64,
    "min_tokens": np.int64,
    "num_logprobs": np.int64,
    "penalty_slot": np.int64,
}


class SamplingTable:
    """Sampling parameters by row of the request tables.

    Args:
        vocab_size: tokens that logits have.
        eos_token_ids: what ends a sequence, for min_tokens.
        device: where counts for penalties live.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._columns: dict[str, np.ndarray] = {
            name: np.zeros(0, dtype=dtype) for name, dtype in _COLUMNS.items()
        }
        self._extras: dict[int, _Extra] = {}
        self.counts = PenaltyCounts(vocab_size, device)

    def set(
        self, row: int, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]
    ) -> None:
        """A request takes `row`. `generated`: tokens that an earlier engine produced for it."""
        assert params.seed is not None, "the engine draws a seed before planning"
        self._reserve(row + 1)
        flags = _flags(params, self._vocab_size)
        top_k = min(params.top_k, self._vocab_size)
        values = {
            "flags": flags,
            "temperature": max(params.temperature, _MIN_TEMPERATURE),
            "top_k": top_k if top_k > 0 else _NO_TOP_K,
            "top_p": params.top_p if params.top_p < 1.0 else _KEEP_ALL,
            "min_p": params.min_p,
            "seed": params.seed & (2**64 - 1),
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "num_generated": len(generated),
            "min_tokens": params.min_tokens,
            "num_logprobs": params.logprobs or 0,
            "penalty_slot": self.counts.add(prompt, generated) if flags & _PENALTY else 0,
        }
        for name, value in values.items():
            self._columns[name][row] = value
        if flags & (_BIAS | _MIN_TOKENS):
            ends = set(params.stop_token_ids)
            if not params.ignore_eos:
                ends |= set(self._eos_token_ids)
            self._extras[row] = _Extra(
                np.array(list(params.logit_bias), dtype=np.int64),
                np.array(list(params.logit_bias.values()), dtype=np.float32),
                np.array(sorted(ends), dtype=np.int64),
            )

    def _reserve(self, num_rows: int) -> None:
        have = len(self._columns["flags"])
        if num_rows <= have:
            return
        size = max(num_rows, 2 * have, 16)
        for name, column in self._columns.items():
            grown = np.zeros(size, dtype=column.dtype)
            grown[:have] = column
            self._columns[name] = grown

    def clear(self, row: int) -> None:
        """The request of `row` has gone."""
        self._extras.pop(row, None)
        if self._columns["flags"][row] & _PENALTY:
            self.counts.remove(int(self._columns["penalty_slot"][row]))

    def plan(self, rows: np.ndarray) -> SamplingPlan:
        """One token is sampled for each of `rows` (int64 [R], distinct), and counted from now on.

        A draw's position is the number of tokens generated before.
        """
        columns = self._columns
        flags = columns["flags"][rows]
        positions = columns["num_generated"][rows]
        columns["num_generated"][rows] = positions + 1
        wanted = int(np.bitwise_or.reduce(flags)) if len(flags) else 0
        if not wanted:
            return SamplingPlan(len(rows))
        arrays: dict[str, np.ndarray] = {}
        max_top_k = max_logprobs = 0
        num_logprobs: tuple[int, ...] = ()
        if wanted & _RANDOM:
            index = (flags & _RANDOM).nonzero()[0]
            own = rows[index]
            arrays["random.index"] = index
            arrays["uniform"] = uniforms(columns["seed"][own], positions[index])
            for name in ("temperature", "top_k", "top_p", "min_p"):
                arrays[name] = columns[name][own]
            for name, flag in (("short.index", _SHORT_CUT), ("long.index", _LONG_CUT)):
                if wanted & flag:
                    arrays[name] = (flags[index] & flag).nonzero()[0]
            if wanted & _SHORT_CUT:
                max_top_k = int(arrays["top_k"][arrays["short.index"]].max())
        if wanted & _PENALTY:
            index = (flags & _PENALTY).nonzero()[0]
            arrays["penalty.index"] = index
            arrays["penalty.slot"] = columns["penalty_slot"][rows[index]]
            for name in ("repetition", "presence", "frequency"):
                arrays[name] = columns[name][rows[index]]
        if wanted & _BIAS:
            self._plan_bias(rows, flags, arrays)
        if wanted & _MIN_TOKENS:
            self._plan_banned(rows, flags, positions, arrays)
        if wanted & _LOGPROBS:
            index = (flags & _LOGPROBS).nonzero()[0]
            arrays["logprobs.index"] = index
            num_logprobs = tuple(columns["num_logprobs"][rows[index]].tolist())
            max_logprobs = min(max(num_logprobs), self._vocab_size)
        return SamplingPlan(len(rows), arrays, max_top_k, max_logprobs, num_logprobs)

    def _plan_bias(
        self, rows: np.ndarray, flags: np.ndarray, arrays: dict[str, np.ndarray]
    ) -> None:
        index = (flags & _BIAS).nonzero()[0]
        extras = [self._extras[row] for row in rows[index].tolist()]
        arrays["bias.row"] = np.repeat(index, [len(item.bias_tokens) for item in extras])
        arrays["bias.token"] = np.concatenate([item.bias_tokens for item in extras])
        arrays["bias.value"] = np.concatenate([item.bias_values for item in extras])

    def _plan_banned(
        self,
        rows: np.ndarray,
        flags: np.ndarray,
        positions: np.ndarray,
        arrays: dict[str, np.ndarray],
    ) -> None:
        is_early = positions < self._columns["min_tokens"][rows]
        index = (((flags & _MIN_TOKENS) != 0) & is_early).nonzero()[0]
        if not len(index):
            return
        ends = [self._extras[row].end_tokens for row in rows[index].tolist()]
        arrays["banned.row"] = np.repeat(index, [len(tokens) for tokens in ends])
        arrays["banned.token"] = np.concatenate(ends)


def _flags(params: SamplingParams, vocab_size: int) -> int:
    flags = 0
    if params.temperature > 0:
        flags |= _RANDOM
        if 0 < params.top_k <= min(MAX_SHORT_CUT, vocab_size - 1):
            flags |= _SHORT_CUT
        elif 0 < params.top_k < vocab_size or params.top_p < 1.0:
            flags |= _LONG_CUT
    if (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    ):
        flags |= _PENALTY
    if params.logit_bias:
        flags |= _BIAS
    if params.logprobs is not None:
        flags |= _LOGPROBS
    if params.min_tokens > 0:
        flags |= _MIN_TOKENS
    return flags

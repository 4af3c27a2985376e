"""Random problems of the selective scan and of rounding; see cases.py."""

from types import ModuleType

import torch

from tandem.ops.rounding import Rounding, round_state
from tandem.ops.selective_scan import reference
from tests.gpu.cases import Random, arena, poison
from tests.tolerances import assert_close


def check_rounding(device: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """The same bits as the reference, for values of every size."""
    # Only here: Triton is not installed everywhere.
    from tests.gpu.rounding_kernel import round_on

    rng = Random(device)
    values = rng.normal(*shape) * 2.0 ** torch.randint(-30, 18, shape, device=device)
    values[0, 0, :3] = torch.tensor([torch.inf, torch.nan, -torch.inf], device=device)
    rounding = Rounding(1 << 20, rng.index([7 + 5 * row for row in range(shape[0])]))
    found, expected = round_on(values, dtype, rounding), round_state(values, dtype, rounding)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def check_selective_scan(
    module: ModuleType,
    device: str,
    lengths: list[int],
    has_state: list[bool] | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    channels: int = 96,
    groups: int = 1,
    state_size: int = 16,
    has_skip: bool = True,
    has_gate: bool = True,
    is_random: bool = False,
) -> None:
    """has_state None: rows of one token through `selective_scan_update`."""
    rng = Random(device)
    rows, num_tokens = len(lengths), sum(lengths)
    x, z = rng.normal(num_tokens, 2 * channels + 6, dtype=dtype)[:, 3:-3].chunk(2, dim=1)
    dt = (rng.normal(num_tokens, channels + 5) - 2).to(dtype)[:, 5:]
    low = rng.normal(num_tokens, groups, 2 * state_size + 3, dtype=dtype)[..., 3:]
    B, C = low.chunk(2, dim=-1)
    A, bias = -torch.exp(rng.normal(channels, state_size)), rng.normal(channels)
    D, z = rng.normal(channels) if has_skip else None, z if has_gate else None
    slots = [2 * row + 1 for row in range(rows)][::-1]
    states = arena(rng, 2 * rows + 1, (channels, state_size), state_dtype)
    for slot, is_live in zip(slots, has_state or [True] * rows, strict=True):
        if is_live:
            states.fill(slot, rng.normal(channels, state_size))
    rest: tuple = (rng.index(slots),)
    name = "selective_scan_update"
    if has_state is not None:
        name = "selective_scan_prefill"
        rest += (rng.starts(lengths), torch.tensor(has_state, device=device))
    rounding = Rounding(7, rng.index([100 + 3 * row for row in range(rows)])) if is_random else None
    expected_state = states.view.float().clone()
    wide = (x.float(), dt, A, B.float(), C.float(), D, None if z is None else z.float())
    expected = getattr(reference, name)(*wide, expected_state, *rest, bias)
    poison(x.numel(), device)
    y = getattr(module, name)(x, dt, A, B, C, D, z, states.view, *rest, bias, rounding)

    assert y.dtype == dtype
    assert_close(y, expected)
    touched = [slot for slot, length in zip(slots, lengths, strict=True) if length]
    states.assert_only_changed(touched)
    # Not the tolerance of x: products take fp32 operands.
    assert_close(states.view[touched], expected_state[touched], state_dtype)

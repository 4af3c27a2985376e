"""Pairs of engines whose reads test_identity.py checks element by element."""

from dataclasses import dataclass, field

from tests.nixl.identity_memory import Side, one_of_each, several_kinds


@dataclass(frozen=True)
class Case:
    src: Side
    dst: Side
    lengths: list[int] = field(default_factory=lambda: [49, 7, 24])


def pair(src_tp, dst_tp, src_page, dst_page, kv_heads=2, groups=2) -> Case:
    kept = several_kinds(kv_heads, groups)
    return Case(
        Side(kept, src_tp, src_page, num_slabs=40, seed=src_tp),
        Side(kept, dst_tp, dst_page, num_slabs=44, seed=100 + dst_tp),
    )


# The ids of 8-token pages read into 64-token pages: k and v of 8 source pages each, and a slot's.
_PAGE_ROWS = 16
_NUM_SLABS = (2**31 - 1) // (4 * _PAGE_ROWS + 1)  # of 4 pages of 64 bytes, or a slot of 256

CASES = {
    "1 to 1": pair(1, 1, 16, 24),
    "1 to 2": pair(1, 2, 16, 24),
    "2 to 1": pair(2, 1, 24, 16),
    "2 to 4": pair(2, 4, 8, 64),
    "4 to 2": pair(4, 2, 64, 8),
    "8 to 1": pair(8, 1, 16, 8, groups=8),
    "1 to 8": pair(1, 8, 24, 64, groups=1),
    "3 to 6": pair(3, 6, 24, 16, kv_heads=3, groups=3),
    "equal": pair(2, 2, 16, 16),
    # More than 4 GiB on both sides, and the last ids that 32 bits hold.
    "far": Case(
        Side(one_of_each(1), 1, 8, _NUM_SLABS, seed=1, is_at_end=True),
        Side(one_of_each(1), 1, 64, 9 << 20, seed=2, is_at_end=True),
    ),
}

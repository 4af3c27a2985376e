"""Free and taken pages and slots of one arena.

Two levels: `SlabPool` hands out slabs, `PartPool` cuts the slabs of one type into pages or slots,
`ArenaPool` is the front that both share. They know ids only: no requests, no tokens, no tensors.
Ids are plain immutable integers. Giving back what is not taken is a bug of ours and asserts.

A taken page may be *offered*: its owner (the prefix tree) keeps it only while nobody needs it. The
pool counts what offers could free; the owner gives the pages back when it is asked.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.state.arena import ArenaGeometry
from tandem.units import ceil_div


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _highest(mask: int) -> int:
    return mask.bit_length() - 1


def _lowest_run(mask: int, length: int) -> int | None:
    """Lowest bit that starts `length` set bits in a row, or None."""
    # After each round, bit i says that bits [i, i + reach) are all set; reach doubles.
    reach = 1
    while reach < length and mask:
        shift = min(reach, length - reach)
        mask &= mask >> shift
        reach += shift
    return _lowest(mask) if mask else None


@dataclass(frozen=True)
class PoolCounts:
    """`free_*`: takeable now, those inside untyped slabs included (so pages and slots compete for
    the same free slabs). `held_*`: taken."""

    free_pages: int
    free_slots: int
    free_slabs: int
    held_pages: int
    held_slots: int
    num_pages: int
    num_slots: int
    num_slabs: int

    @property
    def is_full(self) -> bool:
        """Whether every slab is back: what an idle engine must show."""
        return self.free_slabs == self.num_slabs


class SlabPool:
    """Slabs that are neither typed as pages nor as slots."""

    def __init__(self, num_slabs: int) -> None:
        self.num_slabs = num_slabs
        self.num_free = num_slabs
        self._free = (1 << num_slabs) - 1

    def take(self, *, from_top: bool) -> int:
        """Pages grow from the bottom and slots from the top, so that runs of pages stay long."""
        assert self._free, "take() from an empty slab pool"
        slab = _highest(self._free) if from_top else _lowest(self._free)
        self._free ^= 1 << slab
        self.num_free -= 1
        return slab

    def give(self, slab: int) -> None:
        assert 0 <= slab < self.num_slabs, f"slab {slab} is outside 0..{self.num_slabs - 1}"
        assert not self._free >> slab & 1, f"slab {slab} is free already"
        self._free |= 1 << slab
        self.num_free += 1


class PartPool:
    """The pages, or the slots, of the slabs that are typed so.

    One part is taken from the fullest slab that has any; several from the fullest slab that has
    them all, as one run where it exists: neighbouring pages move in one descriptor. A slab goes
    back to the slab pool with its last part.
    """

    def __init__(self, slabs: SlabPool, parts_per_slab: int, *, from_top: bool) -> None:
        self._slabs = slabs
        self._per_slab = parts_per_slab
        self._from_top = from_top
        self._all_free = (1 << parts_per_slab) - 1
        self._free: dict[int, int] = {}  # typed slab -> mask of its free parts
        # Typed slabs by their number of free parts, and the mask of the numbers above 0 that occur.
        self._by_count: list[dict[int, None]] = [{} for _ in range(parts_per_slab + 1)]
        self._counts = 0
        self._num_loose = 0  # free parts of typed slabs
        self.num_taken = 0
        # Typed slab -> mask of its offered parts; the slab that was offered to last comes last.
        self._offered: dict[int, int] = {}
        self._num_offered = 0
        self._freeable: set[int] = set()  # slabs of which every part is free or offered

    @property
    def num_takeable(self) -> int:
        return self._num_loose + self._slabs.num_free * self._per_slab

    @property
    def num_freeable_slabs(self) -> int:
        """Slabs that become free when all that is offered is given back."""
        return len(self._freeable)

    def slabs_needed(self, num_parts: int, *, with_offered: bool = False) -> int:
        """Free slabs that taking `num_parts` would type; `with_offered`: after all that is
        offered has been given back."""
        missing = num_parts - self._num_loose
        if with_offered:
            missing -= self._num_offered - len(self._freeable) * self._per_slab
        return ceil_div(missing, self._per_slab) if missing > 0 else 0

    def offer(self, ids: Iterable[int]) -> None:
        """Taken parts that can be had back."""
        for part in ids:
            slab, index = divmod(part, self._per_slab)
            assert slab in self._free, f"slab {slab} has no taken id of this kind"
            assert not self._free[slab] >> index & 1, f"id {part} is free"
            mask = self._offered.pop(slab, 0)
            assert not mask >> index & 1, f"id {part} is offered already"
            self._num_offered += 1
            self._offered[slab] = mask | 1 << index
            self._note_freeable(slab)

    def retract(self, ids: Iterable[int]) -> None:
        """Parts that cannot be had back any more; those that were not offered are ignored."""
        for part in ids:
            slab, index = divmod(part, self._per_slab)
            self._retract(slab, 1 << index)

    def offered_for_slab(self) -> list[int]:
        """The offered parts that keep one slab from being free: the freeable slab to which nothing
        was offered for longest. Empty if there is none."""
        slab = next((slab for slab in self._offered if slab in self._freeable), None)
        if slab is None:
            return []
        mask, base = self._offered[slab], slab * self._per_slab
        return [base + index for index in range(self._per_slab) if mask >> index & 1]

    def _retract(self, slab: int, parts: int) -> None:
        mask = self._offered.get(slab, 0)
        if mask & parts:
            self._num_offered -= (mask & parts).bit_count()
            mask &= ~parts
            if mask:
                self._offered[slab] = mask
            else:
                del self._offered[slab]
            self._note_freeable(slab)

    def _note_freeable(self, slab: int) -> None:
        mask = self._offered.get(slab, 0)
        if mask and mask | self._free[slab] == self._all_free:
            self._freeable.add(slab)
        else:
            self._freeable.discard(slab)

    def take(self, num_parts: int) -> list[int]:
        """The caller has checked that `slabs_needed` slabs are free."""
        taken: list[int] = []
        while len(taken) < num_parts:
            taken += self._take_from(self._choose(num_parts - len(taken)), num_parts - len(taken))
        return taken

    def give(self, ids: Iterable[int]) -> None:
        returned: dict[int, int] = {}  # slab -> mask
        for part in ids:
            slab, index = divmod(part, self._per_slab)
            mask = returned.get(slab, 0)
            assert not mask >> index & 1, f"id {part} is given back twice"
            returned[slab] = mask | 1 << index
        for slab, mask in returned.items():
            assert slab in self._free, f"slab {slab} has no taken id of this kind"
            self._retract(slab, mask)
            free = self._unfile(slab)
            assert not free & mask, f"ids of slab {slab} are free already"
            self.num_taken -= mask.bit_count()
            self._num_loose += mask.bit_count()
            free |= mask
            if free == self._all_free:
                self._num_loose -= self._per_slab
                self._slabs.give(slab)
            else:
                self._file(slab, free)

    def _choose(self, num_parts: int) -> int:
        enough = self._counts >> num_parts << num_parts
        if enough:
            return next(iter(self._by_count[_lowest(enough)]))
        if self._counts:
            return next(iter(self._by_count[_highest(self._counts)]))
        slab = self._slabs.take(from_top=self._from_top)
        self._num_loose += self._per_slab
        self._file(slab, self._all_free)
        return slab

    def _take_from(self, slab: int, num_parts: int) -> list[int]:
        free = self._unfile(slab)
        num_parts = min(num_parts, free.bit_count())
        base = slab * self._per_slab
        start = _lowest_run(free, num_parts)
        if start is not None:
            taken = list(range(base + start, base + start + num_parts))
            free ^= ((1 << num_parts) - 1) << start
        else:
            taken = []
            for _ in range(num_parts):
                index = _lowest(free)
                taken.append(base + index)
                free ^= 1 << index
        self.num_taken += num_parts
        self._num_loose -= num_parts
        self._file(slab, free)
        return taken

    def _file(self, slab: int, free: int) -> None:
        self._free[slab] = free
        count = free.bit_count()
        self._by_count[count][slab] = None
        if count:
            self._counts |= 1 << count
        if slab in self._offered:
            self._note_freeable(slab)

    def _unfile(self, slab: int) -> int:
        free = self._free.pop(slab)
        same_count = self._by_count[free.bit_count()]
        del same_count[slab]
        if not same_count:
            self._counts &= ~(1 << free.bit_count())
        return free


class ArenaPool:
    """Pages and slots of one arena. All or nothing: a take that does not fit changes nothing."""

    def __init__(self, geometry: ArenaGeometry) -> None:
        self.geometry = geometry
        self._slabs = SlabPool(geometry.num_slabs)
        self._pages = PartPool(self._slabs, geometry.pages_per_slab, from_top=False)
        self._slots = PartPool(self._slabs, geometry.slots_per_slab, from_top=True)

    def has_room(self, num_pages: int, num_slots: int, *, with_offered: bool = False) -> bool:
        """Whether this many pages and slots can be taken together; `with_offered`: or could, if
        all offered pages were given back."""
        if num_pages > 0 and not self.geometry.pages_per_slab:
            return False
        if num_slots > 0 and not self.geometry.slots_per_slab:
            return False
        slabs = self._pages.slabs_needed(num_pages, with_offered=with_offered)
        slabs += self._slots.slabs_needed(num_slots)
        free = self._slabs.num_free
        return slabs <= free + (self._pages.num_freeable_slabs if with_offered else 0)

    def lacks_slabs(self, num_slots: int) -> bool:
        """Whether so many slots cannot be taken, however many pages are free."""
        return self._slots.slabs_needed(num_slots) > self._slabs.num_free

    def offer_pages(self, page_ids: Iterable[int]) -> None:
        """Taken pages that their owner would give back if asked."""
        self._pages.offer(page_ids)

    def retract_pages(self, page_ids: Iterable[int]) -> None:
        """The owner will not give them back; no effect on pages that are not offered."""
        self._pages.retract(page_ids)

    def pages_for_slab(self) -> list[int]:
        """Offered pages that would make a slab free if they were given back: of the slab that was
        left alone for longest; empty if no offers free one."""
        return self._pages.offered_for_slab()

    def try_take_pages(self, num_pages: int) -> list[int] | None:
        """Distinct page ids, runs of neighbours where possible; None if there are too few."""
        return self._pages.take(num_pages) if self.has_room(num_pages, 0) else None

    def give_pages(self, page_ids: Iterable[int]) -> None:
        self._pages.give(page_ids)

    def try_take_slot(self) -> int | None:
        return self._slots.take(1)[0] if self.has_room(0, 1) else None

    def give_slot(self, slot_id: int) -> None:
        self._slots.give((slot_id,))

    def counts(self) -> PoolCounts:
        geometry = self.geometry
        return PoolCounts(
            free_pages=self._pages.num_takeable,
            free_slots=self._slots.num_takeable,
            free_slabs=self._slabs.num_free,
            held_pages=self._pages.num_taken,
            held_slots=self._slots.num_taken,
            num_pages=geometry.num_pages,
            num_slots=geometry.num_slots,
            num_slabs=geometry.num_slabs,
        )

"""The tree against a plain set of prefixes, and its rules of eviction one by one."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.cache.prefix import PrefixNode, PrefixTree

PAGE_TOKENS = 2


def pages_of(path: list[PrefixNode]) -> list[int]:
    return [node.page for node in path]


def grow(tree: PrefixTree, tokens: list[int], pages: list[int]) -> list[PrefixNode]:
    """A new path, unpinned."""
    path = tree.extend([], tokens, pages)
    tree.pin(path)
    tree.unpin(path)
    return path


def test_match_stops_at_the_first_page_that_differs():
    tree = PrefixTree(PAGE_TOKENS)
    grow(tree, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert pages_of(tree.match([1, 2, 3, 4, 9, 6], 3)) == [10, 11]
    assert pages_of(tree.match([1, 2, 3, 4, 5, 6, 7], 9)) == [10, 11, 12]
    assert pages_of(tree.match([1, 2, 3, 4, 5, 6], 2)) == [10, 11]
    # The last page is not full.
    assert pages_of(tree.match([1, 2, 3, 4, 5], 3)) == [10, 11]
    assert tree.match([3, 4, 5, 6], 2) == []
    assert tree.match([1], 1) == []


def test_equal_tokens_after_other_ones_are_another_page():
    tree = PrefixTree(PAGE_TOKENS)
    grow(tree, [1, 2, 7, 7], [10, 11])
    grow(tree, [3, 4, 7, 7], [12, 13])
    assert pages_of(tree.match([3, 4, 7, 7], 2)) == [12, 13]
    assert tree.match([7, 7], 1) == []


def test_tokens_are_compared_whole():
    """256 and 1 share their low byte's place; neighbours must not blend."""
    tree = PrefixTree(PAGE_TOKENS)
    grow(tree, [256, 1], [10])
    assert tree.match([1, 256], 1) == []
    assert tree.match([0, 257], 1) == []
    assert pages_of(tree.match([256, 1], 1)) == [10]


def test_the_page_that_came_first_stays():
    tree = PrefixTree(PAGE_TOKENS)
    grow(tree, [1, 2, 3, 4], [10, 11])
    path = tree.extend([], [1, 2, 3, 4, 5, 6], [20, 21, 22])
    assert pages_of(path) == [10, 11, 22]
    assert 20 not in tree
    assert tree.num_pages == 3


def test_leaves_go_first_and_the_longest_unused_before_others():
    tree = PrefixTree(PAGE_TOKENS)
    grow(tree, [1, 2, 3, 4], [10, 11])
    grow(tree, [1, 2, 5, 6], [10, 12])
    grow(tree, [7, 8], [13])
    tree.pin(old := tree.match([1, 2, 3, 4], 2))
    tree.unpin(old)
    assert [tree.evict_oldest() for _ in range(5)] == [12, 13, 11, 10, None]
    assert tree.num_pages == 0
    assert tree.match([1, 2], 1) == []


def test_a_pinned_page_keeps_its_prefix_and_not_what_follows_it():
    tree = PrefixTree(PAGE_TOKENS)
    path = grow(tree, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert tree.pin(path[:2]) == [10, 11]
    assert tree.pin(path[:2]) == []
    assert (tree.evict_oldest(), tree.evict_oldest()) == (12, None)
    with pytest.raises(AssertionError, match="pinned"):
        tree.evict_below(10)
    assert tree.unpin(path[:2]) == []
    assert tree.num_used == 2
    assert tree.unpin(path[:2]) == [10, 11]
    with pytest.raises(AssertionError, match="not pinned"):
        tree.unpin(path[:1])


def test_what_continues_an_evicted_page_goes_with_it():
    tree = PrefixTree(PAGE_TOKENS)
    grow(tree, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    grow(tree, [1, 2, 3, 4, 7, 8], [10, 11, 13])
    assert set(tree.evict_below(11)) == {11, 12, 13}
    assert pages_of(tree.match([1, 2, 3, 4, 5, 6], 3)) == [10]
    assert (tree.evict_oldest(), tree.evict_oldest()) == (10, None)


def test_entries_of_the_past_do_not_pile_up():
    tree = PrefixTree(PAGE_TOKENS)
    path = grow(tree, list(range(20)), list(range(10)))
    for _ in range(2000):
        tree.pin(path)
        tree.unpin(path)
    assert len(tree._leaves) < 200
    assert sorted(tree.evict_oldest() for _ in range(10)) == list(range(10))


class TreeAgainstDict(RuleBasedStateMachine):
    """`known`: page by prefix, as a dict that has no structure."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(PAGE_TOKENS)
        self.known: dict[tuple[int, ...], int] = {}
        self.paths: list[tuple[tuple[int, ...], list[PrefixNode]]] = []
        self.next_page = 0

    tokens = st.lists(st.integers(0, 1), max_size=9)

    def prefixes(self, tokens: list[int], num_pages: int) -> list[tuple[int, ...]]:
        return [tuple(tokens[: (i + 1) * PAGE_TOKENS]) for i in range(num_pages)]

    @rule(tokens=tokens, limit=st.integers(0, 5))
    def pin(self, tokens: list[int], limit: int) -> None:
        path = self.tree.match(tokens, limit)
        expected = []
        for prefix in self.prefixes(tokens, min(limit, len(tokens) // PAGE_TOKENS)):
            if prefix not in self.known:
                break
            expected.append(self.known[prefix])
        assert pages_of(path) == expected
        unused = [page for page in expected if page not in self.pinned()]
        assert self.tree.pin(path) == unused
        self.paths.append((tuple(tokens[: len(path) * PAGE_TOKENS]), path))

    @precondition(lambda self: self.paths)
    @rule(data=st.data(), more=tokens)
    def extend(self, data: st.DataObject, more: list[int]) -> None:
        index = data.draw(st.integers(0, len(self.paths) - 1))
        start, path = self.paths[index]
        tokens = [*start, *more]
        num_pages = len(tokens) // PAGE_TOKENS
        fresh = list(range(self.next_page, self.next_page + num_pages))
        self.next_page += num_pages
        pages = pages_of(path) + fresh[len(path) :]
        full = self.tree.extend(path, tokens, pages)
        for page, prefix in zip(pages, self.prefixes(tokens, num_pages), strict=True):
            self.known.setdefault(prefix, page)
        assert pages_of(full) == [self.known[p] for p in self.prefixes(tokens, num_pages)]
        self.tree.pin(full[len(path) :])
        self.paths[index] = (tuple(tokens[: num_pages * PAGE_TOKENS]), full)

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.paths) - 1))
        _, path = self.paths.pop(index)
        left = self.tree.unpin(path)
        assert left == [page for page in pages_of(path) if page not in self.pinned()]

    @rule()
    def evict_oldest(self) -> None:
        page = self.tree.evict_oldest()
        evictable = set(self.known.values()) - self.pinned()
        assert (page is None) == (not evictable)
        if page is not None:
            assert page in evictable
            (gone,) = [prefix for prefix, value in self.known.items() if value == page]
            assert not any(p[: len(gone)] == gone and p != gone for p in self.known)
            del self.known[gone]

    @rule(data=st.data())
    def evict_below(self, data: st.DataObject) -> None:
        evictable = sorted(set(self.known.values()) - self.pinned())
        if evictable:
            page = data.draw(st.sampled_from(evictable))
            (top,) = [prefix for prefix, value in self.known.items() if value == page]
            below = {p: v for p, v in self.known.items() if p[: len(top)] == top}
            assert sorted(self.tree.evict_below(page)) == sorted(below.values())
            for prefix in below:
                del self.known[prefix]

    def pinned(self) -> set[int]:
        return {node.page for _, path in self.paths for node in path}

    @invariant()
    def counts_agree(self) -> None:
        assert self.tree.num_pages == len(self.known)
        assert self.tree.num_used == len(self.pinned())
        assert all(page in self.tree for page in self.known.values())

    def teardown(self) -> None:
        for _, path in self.paths:
            self.tree.unpin(path)
        while self.tree.evict_oldest() is not None:
            pass
        assert self.tree.num_pages == self.tree.num_used == 0


TestTreeAgainstDict = TreeAgainstDict.TestCase
TestTreeAgainstDict.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

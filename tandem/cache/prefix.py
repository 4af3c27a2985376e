"""Full pages that outlive their requests: which page holds the K/V of which prefix.

PrefixTree knows tokens and page ids: no requests, no pool, no tensors. One node is one full page;
its path from the root spells the whole prefix, because K/V of a token depends on every token before
it. Nodes compare tokens, not hashes of them: two prefixes are never taken for one another.

A node stands for the state after a whole number of pages, so a snapshot of a slot at that token
count, which an engine needs to continue without a peer, belongs to a node too.

Source of the idea: RadixAttention (Zheng et al. 2024, arXiv:2312.07104), without its compressed
edges: pages are the unit of sharing, and of eviction.
"""

import heapq
from array import array
from collections.abc import Iterable, Sequence
from itertools import count

# Stale entries of the heap are dropped when they outnumber the pages by this much.
_HEAP_SLACK = 64


class PrefixNode:
    """One full page: the K/V of the tokens `key`, which follow those of its parents.

    `num_users`: paths that are pinned through it. The tree alone changes it.
    """

    __slots__ = ("children", "key", "last_used", "num_users", "page", "parent")

    def __init__(self, key: bytes, page: int, parent: "PrefixNode | None") -> None:
        self.key = key
        self.page = page
        self.parent = parent  # None: the root, or a node that has left the tree
        self.children: dict[bytes, PrefixNode] = {}
        self.num_users = 0
        self.last_used = 0


class PrefixTree:
    """Pages by their tokens. A path is a list of nodes, `path[i]` for the i-th page of a prefix.

    What is pinned stays. Whoever pins a node pins all nodes above it, so everything below an
    unpinned node is unpinned, and any unpinned page can be evicted, leaves first.
    """

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._root = PrefixNode(b"", -1, None)
        self._by_page: dict[int, PrefixNode] = {}
        self._num_used = 0
        self._clock = 0
        # (last use, tie-break, node) of every unpinned leaf, and entries that time has made false.
        self._leaves: list[tuple[int, int, PrefixNode]] = []
        self._serial = count()

    @property
    def num_pages(self) -> int:
        return len(self._by_page)

    @property
    def num_used(self) -> int:
        """Pages that somebody has pinned."""
        return self._num_used

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def match(self, token_ids: Sequence[int], max_pages: int) -> list[PrefixNode]:
        """The longest known path of full pages at the start of `token_ids`."""
        path: list[PrefixNode] = []
        node = self._root
        for key in self._keys(token_ids, 0, max_pages):
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def extend(
        self, path: Sequence[PrefixNode], token_ids: Sequence[int], pages: Sequence[int]
    ) -> list[PrefixNode]:
        """The path of all `pages` of `token_ids`, of which `path` (pinned) is the start.

        Where the tree lacks the tokens of a page, `pages[i]` becomes a node, unpinned: pin it
        before anything is evicted. Where it has them, the page in the path is another one.
        """
        full = list(path)
        node = full[-1] if full else self._root
        for index, key in enumerate(self._keys(token_ids, len(full), len(pages)), len(full)):
            child = node.children.get(key)
            if child is None:
                page = pages[index]
                assert page not in self._by_page, f"page {page} is in the tree already"
                child = node.children[key] = self._by_page[page] = PrefixNode(key, page, node)
            full.append(child)
            node = child
        return full

    def pin(self, nodes: Iterable[PrefixNode]) -> list[int]:
        """Keep these nodes; their parents must be pinned, too. Returns the pages that nobody had
        pinned."""
        self._clock += 1
        taken = []
        for node in nodes:
            assert node.parent is not None, f"page {node.page} has left the tree"
            if node.num_users == 0:
                taken.append(node.page)
            node.num_users += 1
            node.last_used = self._clock
        self._num_used += len(taken)
        return taken

    def unpin(self, nodes: Iterable[PrefixNode]) -> list[int]:
        """One pin less for each node. Returns the pages that nobody has pinned any more."""
        self._clock += 1
        left = []
        for node in nodes:
            assert node.num_users > 0, f"page {node.page} is not pinned"
            node.num_users -= 1
            node.last_used = self._clock
            if node.num_users == 0:
                left.append(node.page)
                self._note_leaf(node)
        self._num_used -= len(left)
        return left

    def evict_oldest(self) -> int | None:
        """Drop the leaf that was used longest ago; returns its page, None if all are pinned."""
        while self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            if node.last_used == last_used and self._is_evictable_leaf(node):
                self._detach(node)
                del self._by_page[node.page]
                return node.page
        return None

    def evict_below(self, page: int) -> list[int]:
        """Drop a page that nobody has pinned, and with it all that continues its prefix."""
        pages = []
        stack = [self._by_page[page]]
        self._detach(stack[0])
        while stack:
            node = stack.pop()
            assert node.num_users == 0, f"page {node.page} is pinned"
            stack.extend(node.children.values())
            del self._by_page[node.page]
            node.parent = None
            pages.append(node.page)
        return pages

    def _keys(self, token_ids: Sequence[int], start: int, stop: int) -> Iterable[bytes]:
        """The tokens of the full pages `[start, stop)`, as far as there are any."""
        stop = min(stop, len(token_ids) // self.page_tokens)
        first = start * self.page_tokens
        data = array("i", token_ids[first : stop * self.page_tokens]).tobytes()
        width = 4 * self.page_tokens
        for offset in range(0, len(data), width):
            yield data[offset : offset + width]

    def _is_evictable_leaf(self, node: PrefixNode) -> bool:
        return node.parent is not None and node.num_users == 0 and not node.children

    def _note_leaf(self, node: PrefixNode) -> None:
        if not self._is_evictable_leaf(node):
            return
        heapq.heappush(self._leaves, (node.last_used, next(self._serial), node))
        if len(self._leaves) > 2 * len(self._by_page) + _HEAP_SLACK:
            self._leaves = [
                (leaf.last_used, next(self._serial), leaf)
                for leaf in self._by_page.values()
                if self._is_evictable_leaf(leaf)
            ]
            heapq.heapify(self._leaves)

    def _detach(self, node: PrefixNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.parent = None
        self._note_leaf(parent)  # the root has no parent and is no leaf

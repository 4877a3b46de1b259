"""Pages of one rank that outlive their request, found again by the tokens in them.

A radix tree over token ids, a page of them at each edge: a node is a full page of the cache, and
the path from the root to it spells the whole sequence that the page's latents belong to. A request
uses the pages of a path from the root, so a page in use has only pages in use above it. Pages that
nobody uses stay until others need them; the least recently used leaf goes first.

Knows page numbers and tokens, never the pages' contents. Only full pages are in the tree: nothing
is written to one again.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from serving.pages import PagePool


@dataclasses.dataclass(eq=False)
class _Node:
    """A page of the tree, after its parent's; `num_users` requests use it. The root is none."""

    page: int
    key: bytes
    parent: "_Node | None"
    children: "dict[bytes, _Node]" = dataclasses.field(default_factory=dict)
    num_users: int = 0


class PrefixCache:
    """The pages of `pool`: free ones, those that requests own, and those of the tree.

    Attributes:
      page_size: tokens of a page.
      num_evicted: pages taken from the tree for others so far.
    """

    def __init__(self, pool: PagePool):
        self.page_size = pool.page_size
        self.num_evicted = 0
        self._pool = pool
        self._root = _Node(0, b"", None)
        self._nodes: dict[int, _Node] = {}
        # In the order they will be evicted: a page enters after all below it.
        self._unused: collections.OrderedDict[int, _Node] = collections.OrderedDict()

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free ones and those of the tree that nobody uses."""
        return self._pool.num_free + len(self._unused)

    @property
    def num_unused(self) -> int:
        """Pages of the tree that nobody uses."""
        return len(self._unused)

    @property
    def num_usable(self) -> int:
        return self._pool.num_usable

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold this many tokens."""
        return self._pool.pages_for(num_tokens)

    def is_unused(self, page: int) -> bool:
        """Whether the page is in the tree and nobody uses it."""
        return page in self._unused

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The pages in the tree of the longest start of a sequence, by `page_keys` of its tokens.

        They may be evicted until somebody uses them.
        """
        pages: list[int] = []
        node = self._root
        for key in keys:
            if (node := node.children.get(key)) is None:
                break
            pages.append(node.page)
        return pages

    def use(self, pages: Sequence[int]) -> None:
        """Count one more user of each of these pages, a path of the tree from the root on."""
        for page in pages:
            node = self._nodes[page]
            node.num_users += 1
            self._unused.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Take back one `use` of a path."""
        for page in reversed(pages):
            node = self._nodes[page]
            assert node.num_users > 0, f"page {page} is not in use"
            node.num_users -= 1
            if node.num_users == 0:
                self._unused[page] = node

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, evicting where too few are free; the caller has checked
        `num_available`. They belong to the caller until `insert` or `free`."""
        assert count <= self.num_available, f"{count} pages asked for, {self.num_available} there"
        while self._pool.num_free < count:
            self._evict()
        return self._pool.allocate(count)

    def free(self, pages: list[int]) -> None:
        """Give back pages that `allocate` gave."""
        self._pool.free(pages)

    def insert(self, path: Sequence[int], keys: Sequence[bytes], pages: Sequence[int]) -> list[int]:
        """Put full pages of the caller's own into the tree, after the path it uses.

        Returns the pages of the tree with these tokens, which the caller uses from now on: where
        there was one already the caller's own is freed.
        """
        parent = self._nodes[path[-1]] if path else self._root
        used = []
        for key, page in zip(keys, pages, strict=True):
            if (node := parent.children.get(key)) is None:
                node = parent.children[key] = self._nodes[page] = _Node(page, key, parent)
            else:
                self._pool.free([page])
            self.use([node.page])
            used.append(node.page)
            parent = node
        return used

    def clear(self) -> None:
        """Forget everything; no page of the tree may be in use."""
        assert len(self._unused) == len(self._nodes), "pages of the tree are in use"
        self._pool.free(list(self._nodes))
        self._root.children.clear()
        self._nodes.clear()
        self._unused.clear()

    def check(self, paths: Sequence[Sequence[int]], owned: Sequence[int]) -> str | None:
        """What is wrong, if anything, when requests use these paths and own these pages."""
        users = collections.Counter(page for path in paths for page in path)
        counted = {page: node.num_users for page, node in self._nodes.items() if node.num_users}
        if users != counted:
            return f"requests use pages {dict(users)}, counted are {counted}"
        if self._unused.keys() != self._nodes.keys() - counted.keys():
            return f"{len(self._unused)} of {len(self._nodes)} shared pages are listed as unused"
        distinct = len(self._nodes.keys() | set(owned))
        total = len(owned) + len(self._nodes)
        if distinct != total or total + self._pool.num_free != self._pool.num_usable:
            return (
                f"{len(owned)} pages are owned and {len(self._nodes)} shared ({distinct} distinct) "
                f"and {self._pool.num_free} free, but there are {self._pool.num_usable}"
            )
        return None

    def _evict(self) -> None:
        page, node = self._unused.popitem(last=False)
        assert node.parent is not None and not node.children, f"page {page} is no leaf"
        del node.parent.children[node.key], self._nodes[page]
        self._pool.free([page])
        self.num_evicted += 1


def page_keys(token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """What each full page of these tokens is known by: exactly its tokens."""
    size = page_size * np.dtype(np.int32).itemsize
    text = np.asarray(token_ids, np.int32).tobytes()
    return [text[start : start + size] for start in range(0, len(text) - size + 1, size)]

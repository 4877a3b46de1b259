"""The radix tree against a dict of all its prefixes."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.pages import PagePool
from serving.prefix_cache import PrefixCache, page_keys


PAGE = 2


class Naive:
    """What the tree must be: every cached prefix with its page, its users, and when it lost the
    last of them."""

    def __init__(self) -> None:
        self.pages: dict[tuple[int, ...], int] = {}
        self.users: dict[tuple[int, ...], int] = {}
        self.released: dict[tuple[int, ...], int] = {}
        self.num_evicted = 0
        self._now = 0

    def match(self, tokens: list[int]) -> list[int]:
        pages = []
        for prefix in prefixes(tokens):
            if prefix not in self.pages:
                break
            pages.append(self.pages[prefix])
        return pages

    def use(self, prefix: tuple[int, ...]) -> None:
        self.users[prefix] = self.users.get(prefix, 0) + 1

    def release(self, prefix: tuple[int, ...]) -> None:
        self._now += 1
        self.users[prefix] -= 1
        self.released[prefix] = self._now

    @property
    def unused(self) -> list[tuple[int, ...]]:
        return [prefix for prefix in self.pages if not self.users[prefix]]

    def evict(self) -> None:
        """The least recently used of the unused prefixes that no other goes on from."""
        leaves = [
            prefix
            for prefix in self.unused
            if not any(
                len(other) > len(prefix) and other[: len(prefix)] == prefix for other in self.pages
            )
        ]
        del self.pages[min(leaves, key=lambda prefix: self.released[prefix])]
        self.num_evicted += 1


def prefixes(tokens: list[int]) -> list[tuple[int, ...]]:
    """The starts of a sequence that end with a page."""
    return [tuple(tokens[:stop]) for stop in range(PAGE, len(tokens) + 1, PAGE)]


@dataclasses.dataclass
class Sequence:
    """A request: its tokens, its pages, and how many of those are of the tree."""

    tokens: list[int]
    pages: list[int]
    num_shared: int


class Both:
    """The tree and its model, put through the same."""

    def __init__(self, num_pages: int):
        self.pool = PagePool(num_pages, PAGE)
        self.cache = PrefixCache(self.pool)
        self.naive = Naive()
        self.running: list[Sequence] = []

    def start(self, tokens: list[int]) -> None:
        keys = page_keys(tokens, PAGE)
        prefix = self.cache.match(keys)
        assert prefix == self.naive.match(tokens)
        claimed = sum(map(self.cache.is_unused, prefix))
        num_own = self.pool.pages_for(len(tokens)) - len(prefix)
        if num_own + claimed > self.cache.num_available:
            return
        self.cache.use(prefix)
        for used in prefixes(tokens)[: len(prefix)]:
            self.naive.use(used)
        sequence = Sequence(tokens, prefix + self.allocate(num_own), len(prefix))
        self.running.append(sequence)
        self.share(sequence)

    def grow(self, sequence: Sequence, tokens: list[int]) -> None:
        missing = self.pool.pages_for(len(sequence.tokens) + len(tokens)) - len(sequence.pages)
        if missing > self.cache.num_available:
            return
        sequence.tokens += tokens
        sequence.pages += self.allocate(missing)
        self.share(sequence)

    def share(self, sequence: Sequence) -> None:
        shared, full = sequence.num_shared, len(sequence.tokens) // PAGE
        keys = page_keys(sequence.tokens, PAGE)[shared:]
        own = sequence.pages[shared:full]
        given = self.cache.insert(sequence.pages[:shared], keys, own)
        for prefix, page in zip(prefixes(sequence.tokens)[shared:], own, strict=True):
            self.naive.pages.setdefault(prefix, page)
            self.naive.users.setdefault(prefix, 0)
            self.naive.use(prefix)
        assert given == self.naive.match(sequence.tokens)[shared:]
        sequence.pages[shared:full], sequence.num_shared = given, full

    def end(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.cache.release(sequence.pages[: sequence.num_shared])
        self.cache.free(sequence.pages[sequence.num_shared :])
        for prefix in reversed(prefixes(sequence.tokens)):
            self.naive.release(prefix)

    def allocate(self, count: int) -> list[int]:
        for _ in range(count - self.pool.num_free):
            self.naive.evict()
        pages = self.cache.allocate(count)
        used = {page for sequence in self.running for page in sequence.pages}
        assert used.isdisjoint(pages), "a page in use was given away"
        return pages

    def check(self) -> None:
        paths = [sequence.pages[: sequence.num_shared] for sequence in self.running]
        owned = [page for s in self.running for page in s.pages[s.num_shared :]]
        assert self.cache.check(paths, owned) is None
        assert self.cache.num_unused == len(self.naive.unused)
        assert self.cache.num_available == self.pool.num_free + len(self.naive.unused)
        assert self.cache.num_evicted == self.naive.num_evicted
        for prefix in self.naive.pages:
            tokens = list(prefix)
            assert self.cache.match(page_keys(tokens, PAGE)) == self.naive.match(tokens)


token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=9)
operations = st.one_of(
    st.tuples(st.just("start"), token_lists),
    st.tuples(st.just("grow"), st.tuples(st.integers(0, 9), token_lists)),
    st.tuples(st.just("end"), st.integers(0, 9)),
)


@settings(max_examples=400, deadline=None)
@given(st.integers(2, 14), st.lists(operations, max_size=40))
def test_the_tree_is_a_dict_of_prefixes(num_pages, steps):
    both = Both(num_pages)
    for name, argument in steps:
        if name == "start":
            both.start(list(argument))
        elif both.running:
            index, tokens = argument if name == "grow" else (argument, [])
            sequence = both.running[index % len(both.running)]
            both.grow(sequence, list(tokens)) if name == "grow" else both.end(sequence)
        both.check()
    while both.running:
        both.end(both.running[-1])
        both.check()
    assert both.cache.num_available == both.pool.num_usable
    both.cache.clear()
    assert both.pool.num_free == both.pool.num_usable
    assert both.cache.match(page_keys([0] * 9, PAGE)) == []


def test_the_least_recently_used_leaf_goes_first():
    both = Both(num_pages=6)
    for tokens in ([1, 1, 2, 2], [1, 1, 3, 3], [4, 4]):
        both.start(tokens)
        both.end(both.running[0])
    both.start([1, 1, 2, 2])  # used again
    both.end(both.running[0])
    cached = [[1, 1, 2, 2], [1, 1, 3, 3], [4, 4]]
    lost = []
    for count in range(2, 6):
        pages = both.allocate(count)
        lost.append([len(both.naive.match(tokens)) for tokens in cached])
        both.cache.free(pages)
        both.check()
    # One page was free. 3, 3 goes, then 4, 4, then 2, 2, and 1, 1 when nothing hangs on it.
    assert lost == [[2, 1, 1], [2, 1, 0], [1, 1, 0], [0, 0, 0]]


def test_clearing_refuses_pages_in_use_and_a_miscount_is_found():
    both = Both(num_pages=6)
    both.start([1, 1, 2])
    with pytest.raises(AssertionError, match="in use"):
        both.cache.clear()
    path, owned = both.running[0].pages[:1], both.running[0].pages[1:]
    assert both.cache.check([path], owned) is None
    assert "requests use pages" in (both.cache.check([], owned) or "")
    assert "but there are 5" in (both.cache.check([path], []) or "")
    assert "(2 distinct)" in (both.cache.check([path], owned * 2) or "")
    both.cache.release(path)
    with pytest.raises(AssertionError, match="not in use"):
        both.cache.release(path)


@pytest.mark.parametrize(("count", "keys"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)])
def test_only_full_pages_have_keys(count, keys):
    assert len(page_keys([300_000] * count, PAGE)) == keys
    assert len(set(page_keys([1, 2, 3, 4, 1, 2], PAGE))) == 2

"""Which pages of a rank's cache are free. Knows page numbers, never their contents."""


class PagePool:
    """The pages 1 to num_pages - 1 of one rank; page 0 is where padding writes.

    A page has one owner from `allocate` to `free`.
    """

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 2:
            raise ValueError(f"a pool needs page 0 and at least one more, got {num_pages}")
        self.page_size = page_size
        self.num_usable = num_pages - 1
        self._free = list(range(num_pages - 1, 0, -1))  # popped from the end, lowest first
        self._is_free = [False] + [True] * self.num_usable

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} pages asked for, {self.num_free} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: list[int]) -> None:
        for page in reversed(pages):
            assert page > 0 and not self._is_free[page], f"page {page} is not in use"
            self._is_free[page] = True
            self._free.append(page)

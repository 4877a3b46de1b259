import pytest

from serving.pages import PagePool


def test_a_page_has_one_owner_and_page_0_none():
    pool = PagePool(num_pages=6, page_size=4)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    pool.free(first)
    assert sorted(pool.allocate(2)) == sorted(first)


def test_freeing_twice_is_caught():
    pool = PagePool(num_pages=3, page_size=4)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="is not in use"):
        pool.free(pages)
    with pytest.raises(AssertionError):
        pool.free([0])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_pages_for(tokens, pages):
    assert PagePool(num_pages=3, page_size=4).pages_for(tokens) == pages


def test_a_pool_without_pages_is_refused():
    with pytest.raises(ValueError, match="at least one more, got 1"):
        PagePool(num_pages=1, page_size=4)

import pytest

from jaxmoe.evaluation.statistics import McNemar, mcnemar, wilson_interval


# Newcombe, "Two-sided confidence intervals for the single proportion", Statistics in Medicine 17
# (1998), table I, method 3: his four examples, to four digits.
@pytest.mark.parametrize(
    ("num_correct", "num_items", "expected"),
    [
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_wilson_interval_is_newcombes(num_correct, num_items, expected):
    assert wilson_interval(num_correct, num_items) == pytest.approx(expected, abs=5e-5)
    mirrored = wilson_interval(num_items - num_correct, num_items)
    assert mirrored == pytest.approx((1 - expected[1], 1 - expected[0]), abs=5e-5)


def test_wilson_interval_at_its_edges():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(0, 1319)[0] == 0.0
    assert wilson_interval(1319, 1319)[1] == 1.0
    with pytest.raises(ValueError, match=r"num_correct must be in \[0, 3\], got 4"):
        wilson_interval(4, 3)


# Twice the binomial tail by hand: (1 + 10) * 2 / 1024, and so on; the last is what R 4's
# binom.test(5, 20) and scipy.stats.binomtest(5, 20) give.
@pytest.mark.parametrize(
    ("b", "c", "expected"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (3, 3, 1.0),
        (0, 5, 0.0625),
        (9, 1, 22 / 1024),
        (5, 15, 0.04138946533203125),
    ],
)
def test_mcnemar_is_the_exact_binomial_test(b, c, expected):
    assert McNemar(b, c).p_value == pytest.approx(expected, rel=1e-12)
    assert McNemar(c, b).p_value == McNemar(b, c).p_value


def test_mcnemar_of_large_counts_neither_overflows_nor_vanishes():
    assert 0 < McNemar(1500, 2457).p_value < 1e-40
    assert McNemar(1978, 1979).p_value == 1.0


def test_mcnemar_counts_which_run_was_right_alone():
    first = [True, True, True, False, False, True]
    second = [True, False, False, True, False, True]
    assert mcnemar(first, second) == McNemar(b=2, c=1)
    with pytest.raises(ValueError):
        mcnemar(first, second[1:])

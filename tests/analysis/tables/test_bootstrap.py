"""Intervals against slow references and known ones."""

import numpy as np
import pytest
from scipy import stats

from analysis.tables import bootstrap as chunked
from analysis.tables.bootstrap import Bootstrap, resampled_totals, resampling_weights
from toolkit.errors import InputError

VALUES = np.random.default_rng(5).gamma(2.0, size=(23, 3))


def quotient(totals):
    return totals[..., 0] / totals[..., 1]


def test_totals_are_those_of_rows_drawn_with_replacement():
    totals = resampled_totals(VALUES, 40, seed=1)
    weights = np.concatenate(list(resampling_weights(23, 40, seed=1)))
    assert (weights.sum(1) == 23).all()
    for total, weight in zip(totals, weights, strict=True):
        rows = [row for row, times in zip(VALUES, weight.astype(int), strict=True) for _ in range(times)]
        np.testing.assert_allclose(total, np.sum(rows, axis=0))


def test_rows_are_drawn_uniformly_and_independently():
    weights = np.concatenate(list(resampling_weights(7, 20_000, seed=2)))
    np.testing.assert_allclose(weights.mean(0), 1, atol=0.03)
    np.testing.assert_allclose(np.cov(weights.T), np.eye(7) - 1 / 7, atol=0.05)


def test_chunks_do_not_change_the_result(monkeypatch):
    whole = resampled_totals(VALUES, 100, seed=3)
    monkeypatch.setattr(chunked, "CHUNK", 23 * 7)
    np.testing.assert_allclose(resampled_totals(VALUES, 100, seed=3), whole, rtol=1e-14)


@pytest.mark.parametrize(("confidence", "size"), [(0.8, 3), (0.95, 4)])
def test_the_interval_of_a_mean_is_students(confidence, size):
    values = np.stack([VALUES[:size, 0], np.ones(size)], 1)
    estimate, low, high = Bootstrap(40_000, confidence).interval(values, quotient)
    expected = stats.ttest_1samp(VALUES[:size, 0], 0).confidence_interval(confidence)
    assert estimate == pytest.approx(VALUES[:size, 0].mean())
    assert (low, high) == (pytest.approx(expected.low, rel=0.03), pytest.approx(expected.high, rel=0.03))


def test_the_error_of_a_ratio_agrees_with_the_jackknife():
    _, low, high = Bootstrap(20_000).interval(VALUES, quotient)
    left_out = quotient(VALUES.sum(0) - VALUES)
    error = np.sqrt(22 / 23 * ((left_out - left_out.mean()) ** 2).sum())
    assert 2 * stats.t.ppf(0.975, 22) * error * 0.95 < high - low < 2 * stats.t.ppf(0.975, 8) * error


def test_figures_that_are_positive_or_probabilities_stay_so():
    wild = np.stack([[0.01, 9.0, 0.02, 0.1], np.ones(4)], 1)
    estimate, low, high = Bootstrap().interval(wild, quotient, "log")
    assert 0 < low < estimate < high and high / estimate == pytest.approx(estimate / low)
    for hits in (0, 1, 12, 23, 24):
        answers = np.stack([np.arange(24) < hits, np.ones(24)], 1).astype(float)
        estimate, low, high = Bootstrap().interval(answers, quotient, "probability")
        exact = stats.binomtest(hits, 24).proportion_ci(0.95, "exact")
        assert 0 <= low <= estimate <= high <= 1
        assert (low, high) == (pytest.approx(exact.low, abs=0.025), pytest.approx(exact.high, abs=0.025))


def test_few_prompts_that_weigh_most_widen_an_interval():
    """As many prompts and the same standard error, once from all of them and once from one."""
    alike, apart = np.tile([1.0, -1.0], 10), np.array([np.sqrt(19), *[-1 / np.sqrt(19)] * 19])
    widths = []
    for values in (alike, apart):
        _, low, high = Bootstrap(4000).interval(np.stack([values, np.ones(20)], 1), quotient)
        widths.append(high - low)
    assert widths[1] > 1.5 * widths[0]


def test_pairing_removes_what_prompts_have_in_common():
    common = VALUES[:, :1] * [1.0, 2.0]
    assert Bootstrap(500).interval(common, lambda totals: totals[..., 1] / totals[..., 0]) == pytest.approx((2, 2, 2))


def test_prompts_without_counts_are_no_observations():
    padded = np.concatenate([VALUES, np.zeros((40, 3))])
    assert Bootstrap(300).interval(padded, quotient) == Bootstrap(300).interval(VALUES, quotient)
    seldom = np.zeros((30, 2))
    seldom[:2] = [[1, 2], [2, 2]]  # two prompts got that far: no word on how much prompts differ
    assert np.isnan(Bootstrap(300).interval(seldom, quotient)[1:]).all()


def test_no_interval_where_many_resamples_have_no_figure():
    apart = np.array([[1.0, 0.0, 1.0]] * 5 + [[0.0, 1.0, 1.0]])
    estimates, low, high = Bootstrap(300).interval(apart, lambda totals: totals[..., [0, 0]] / totals[..., [1, 2]])
    assert estimates.tolist() == [5, 5 / 6]
    assert np.isnan([low[0], high[0]]).all() and np.isfinite([low[1], high[1]]).all()


@pytest.mark.parametrize("scale", ["linear", "log", "probability"])
@pytest.mark.parametrize("number", [3, 15, 16])
def test_of_few_groups_the_range_is_shown(number, scale):
    """Of 16 and more the interval; groups without counts are none."""
    values = np.concatenate([VALUES[:number, :2] + [0, 8], np.zeros((30, 2))])
    estimate, low, high = Bootstrap(300).spread(values, quotient, scale)
    assert estimate == quotient(values.sum(0))
    if number < 16:
        each = quotient(values[:number])
        assert (low, high) == (each.min(), each.max())
    else:
        assert (low, high) == Bootstrap(300).interval(values, quotient, scale)[1:]


def test_a_range_leaves_out_groups_that_have_no_figure():
    values = np.array([[1.0, 2.0], [3.0, 0.0], [1.0, 1.0], [2.0, 1.0]])
    assert Bootstrap(300).spread(values, quotient) == (7 / 4, 0.5, 2)
    assert np.isnan(Bootstrap(300).spread(values[:2], quotient)[1:]).all(), "two say nothing"


def test_figures_have_their_intervals_under_their_names():
    settings = Bootstrap(200, 0.8, seed=3)
    figures = settings.figures(VALUES, lambda totals: {"sum": totals[..., 0], "rate": quotient(totals)})
    assert list(figures) == ["sum", "sum_low", "sum_high", "rate", "rate_low", "rate_high"]
    assert [figures[f"rate{end}"] for end in ("", "_low", "_high")] == list(settings.interval(VALUES, quotient))
    for wrong in ({"resamples": 0}, {"confidence": 1.0}):
        with pytest.raises(InputError, match="resamples of at least 1 and confidence in"):
            Bootstrap(**wrong)

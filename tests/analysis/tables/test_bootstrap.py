"""The bootstrap against slow references."""

import numpy as np
import pytest
from scipy.stats import bootstrap

from analysis.tables import bootstrap as chunked
from analysis.tables.bootstrap import (
    Bootstrap,
    percentile_interval,
    resampled_totals,
    resampling_weights,
)
from toolkit.errors import InputError

VALUES = np.random.default_rng(5).gamma(2.0, size=(23, 3))


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


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_intervals_of_a_paired_ratio_agree_with_scipy(confidence):
    totals = resampled_totals(VALUES, 20_000, seed=4)
    ours = percentile_interval(totals[:, 0] / totals[:, 1], confidence)
    theirs = bootstrap(
        (VALUES[:, 0], VALUES[:, 1]), lambda x, y, axis: x.sum(axis) / y.sum(axis), paired=True, method="percentile",
        n_resamples=20_000, confidence_level=confidence, rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    np.testing.assert_allclose(ours, tuple(theirs), rtol=0.02)


def test_pairing_removes_what_prompts_have_in_common():
    common = VALUES[:, :1] * [1.0, 2.0]
    totals = resampled_totals(common, 500, seed=6)
    assert percentile_interval(totals[:, 1] / totals[:, 0]) == pytest.approx((2.0, 2.0))


def test_a_figure_has_its_interval_under_its_name():
    settings = Bootstrap(200, 0.8, seed=3)
    totals = settings.totals(VALUES)
    np.testing.assert_array_equal(totals, resampled_totals(VALUES, 200, seed=3))
    low, high = percentile_interval(totals[:, 0], 0.8)
    assert settings.figure("sum", 3.0, totals[:, 0]) == {"sum": 3.0, "sum_low": low, "sum_high": high}
    assert settings.group_interval(totals[:, 0], 3) == (low, high)
    assert np.isnan(settings.group_interval(totals[:, 0], 2)).all()
    for wrong in ({"resamples": 0}, {"confidence": 1.0}):
        with pytest.raises(InputError, match="resamples of at least 1 and confidence in"):
            Bootstrap(**wrong)

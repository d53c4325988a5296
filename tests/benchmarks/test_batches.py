"""The page on batch sizes: what a ratio says, which gaps count, what falls short, and when a request has joined its batch."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_rel

from benchmarks.batches import held_out, order, predicted_ahead, shortfalls, summary
from benchmarks.side_by_side import latency, ratio


def line(name, method, speeds, predicted, batch=4):
    return {"batch": batch, "name": name, "method": method, "speeds": speeds, "predicted": predicted}


PART = [
    line("autoregressive", "autoregressive", [100.0, 110.0, 104.0, 108.0], 90.0),
    line("K=2", "speculative", [150.0, 140.0, 146.0, 144.0], 80.0),
    line("batch_rate", "batch_rate", [160.0, 130.0, 150.0, 140.0], 160.0),
    line("batch_rate_confidence", "batch_rate_confidence", [120.0, 121.0, 119.0, 120.0], 120.0),
]


def test_a_ratio_has_the_interval_of_a_paired_t_test():
    a, b = PART[0]["speeds"], PART[1]["speeds"]
    middle, low, high = ratio(a, b)
    known = ttest_rel(np.log(a), np.log(b)).confidence_interval(0.95)
    assert np.log([low, high]) == pytest.approx([known.low, known.high])
    assert middle == pytest.approx(np.prod([x / y for x, y in zip(a, b, strict=True)]) ** 0.25)
    assert ratio([2.0], [1.0]) == (2.0, 0.0, np.inf), "one turn says nothing"


def test_gaps_count_where_their_interval_leaves_out_one():
    clear, alike = order(PART)
    # plain < all others, K=2 and batch_rate > batch_rate_confidence; K=2 and batch_rate are equal
    assert clear == 5
    assert alike == 3  # the simulator has K=2 below plain decoding and below batch_rate_confidence


def test_a_shortfall_has_its_whole_interval_below():
    assert shortfalls(PART) == ["batch_rate_confidence at batch 4 (0.828)"]
    assert "| 4 | K=2 | 0.997 [0.905, 1.099] | 0.828 [0.785, 0.873] | 0.828 [0.785, 0.873] | 5 | 3 |" in summary(PART)


def test_a_lead_that_the_simulator_expects_is_shown_as_decoded():
    """Over the best other by prediction, plain decoding with 90: batch_rate has 160, batch_rate_confidence 94."""
    part = [*PART[:3], {**PART[3], "predicted": 94.0}]
    middle, low, high = ratio(PART[2]["speeds"], PART[0]["speeds"])
    assert predicted_ahead(part) == [f"batch_rate at batch 4 ({middle:.3f} [{low:.3f}, {high:.3f}])"]
    assert predicted_ahead([{**line, "predicted": 1.0} for line in PART]) == []


def test_the_best_of_other_turns_is_not_chosen_in_its_own():
    """Two others that lead by turns: each is the best of the turns in which it is not compared."""
    part = [
        line("K=2", "speculative", [90.0, 100.0, 90.0], 0.0),
        line("K=3", "speculative", [100.0, 80.0, 95.0], 0.0),
        line("batch_rate", "batch_rate", [50.0] * 3, 0.0),
    ]
    # without the first turn K=2 (95 to 87.5), without the second K=3 (97.5 to 90), without the third K=2 (95 to 90)
    middle, _, _ = held_out(part, "batch_rate")
    assert middle == pytest.approx(50 / np.prod([90.0, 80.0, 90.0]) ** (1 / 3))
    assert held_out([line("a", "speculative", [4.0], 0.0), line("b", "batch_rate", [2.0], 0.0)], "batch_rate")[0] == 0.5


def test_a_request_joins_when_a_slot_is_free_and_ends_in_an_order_of_its_own():
    middle, most = latency([(0, 1.0), (1, 2.0), (2, 4.0)], size=2)  # 1 s, 2 s, and 4 - 1 = 3 s
    assert middle == 2.0 and most == pytest.approx(2.9)
    # the first request takes 9 s; the others take 1, 2 and 3 s, one behind the other in the second slot
    middle, most = latency([(1, 1.0), (2, 3.0), (3, 6.0), (0, 9.0)], size=2)
    assert middle == 2.5 and most == pytest.approx(9 - 0.15 * 6)

"""The page on batch sizes: which gaps count, what falls short, and when a request has joined its batch."""

from __future__ import annotations

import pytest

from benchmarks.batches import _latency, order, shortfalls, summary


def line(name, method, speeds, predicted, batch=4):
    return {"batch": batch, "name": name, "method": method, "speeds": speeds, "predicted": predicted}


PART = [
    line("autoregressive", "autoregressive", [100.0, 110.0], 90.0),
    line("K=2", "speculative", [150.0, 140.0], 80.0),
    line("batch_rate", "batch_rate", [160.0, 130.0], 160.0),
    line("batch_rate_confidence", "batch_rate_confidence", [120.0, 120.0], 120.0),
]


def test_only_gaps_of_one_sign_in_every_turn_count():
    clear, alike = order(PART)
    # plain < K=2, plain < both batch rules, K=2 > batch_rate_confidence, batch_rate > batch_rate_confidence
    assert clear == 5
    assert alike == 3  # the simulator has K=2 below plain decoding and below batch_rate_confidence


def test_a_shortfall_is_below_in_every_turn():
    assert shortfalls(PART) == ["batch_rate_confidence at batch 4 (0.83)"]
    assert "| 4 | K=2 | 0.998 [0.929, 1.067] | 0.829 [0.800, 0.857] | 5 | 3 |" in summary(PART)


def test_a_request_joins_when_the_one_before_it_in_line_has_ended():
    middle, most = _latency(10.0, [11.0, 12.0, 14.0], size=2)  # 1 s, 2 s, and 14 - 11 = 3 s
    assert middle == 2.0 and most == pytest.approx(2.9)

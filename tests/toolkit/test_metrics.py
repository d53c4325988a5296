"""The cost formula: numbers and arrays alike."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit import metrics
from toolkit.types import Counts, Generation, Round


def test_numbers_and_arrays_have_the_same_cost_and_throughput():
    tokens, draft_calls, target_calls = np.array([[12.0, 0.0, 7.0], [8.0, 0.0, 5.0], [4.0, 0.0, 6.0]])
    costs = metrics.cost(draft_calls, target_calls, 0.2)
    assert costs.tolist() == pytest.approx([5.6, 0.0, 7.0])
    found = metrics.tokens_per_cost(tokens, draft_calls, target_calls, 0.2)
    assert found.tolist() == pytest.approx([12 / 5.6, 0.0, 1.0])
    for values, expected in zip(zip(draft_calls, target_calls, tokens, strict=True), found, strict=True):
        named = dict(zip(("num_draft_calls", "num_target_calls", "num_generated"), map(int, values), strict=True))
        assert metrics.throughput(Counts(**named), 0.2) == expected


def test_shares_of_sources_are_of_all_rounds():
    rounds = [Round(0, 0, 0, 1, True), Round(3, 0, 1, 2, False), Round(2, 2, 2, 3, True), Round(0, 1, 0, 1, True)]
    assert [r.source for r in rounds] == ["nothing", "copy", "draft", "draft"]
    generations = [Generation(0, [1], [], rounds=rounds[:3]), Generation(1, [1], [], rounds=rounds[3:])]
    assert metrics.source_shares(generations) == {"copy_share": 0.25, "draft_share": 0.5}
    assert metrics.source_shares([]) == {"copy_share": 0.0, "draft_share": 0.0}

"""The cost formula: numbers and arrays alike."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit import metrics
from toolkit.types import Counts


def test_numbers_and_arrays_have_the_same_cost_and_throughput():
    tokens, draft_calls, target_calls = np.array([[12.0, 0.0, 7.0], [8.0, 0.0, 5.0], [4.0, 0.0, 6.0]])
    costs = metrics.cost(draft_calls, target_calls, 0.2)
    assert costs.tolist() == pytest.approx([5.6, 0.0, 7.0])
    found = metrics.tokens_per_cost(tokens, draft_calls, target_calls, 0.2)
    assert found.tolist() == pytest.approx([12 / 5.6, 0.0, 1.0])
    for values, expected in zip(zip(draft_calls, target_calls, tokens, strict=True), found, strict=True):
        named = dict(zip(("num_draft_calls", "num_target_calls", "num_generated"), map(int, values), strict=True))
        assert metrics.throughput(Counts(**named), 0.2) == expected

"""Where cost tables come from: a measurement is kept, and made again for whatever would change it."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from analysis.loads import costs
from analysis.loads.costs import costs_of
from toolkit import ModelPair
from toolkit.decoding import Sampling
from toolkit.load_cost import LoadCost


@pytest.fixture
def asked(monkeypatch):
    """What was asked of `measured_costs`, which takes no time."""
    found: list[tuple] = []

    def instead(pair, prompts, sampling, batch_sizes, drafted, rounds, about):
        found.append((tuple(batch_sizes), tuple(drafted), rounds))
        return LoadCost.ratio(0.2), pd.DataFrame({"model": ["draft"]})

    monkeypatch.setattr(costs, "measured_costs", instead)
    return found


def test_a_measurement_is_kept_until_something_it_depends_on_changes(asked, tmp_path, monkeypatch):
    pair = ModelPair.toy()

    def get(sizes=(1, 4), rounds=8, max_drafted=20, tokens=32):
        cfg = SimpleNamespace(costs=None, hardware=None, rounds=rounds, max_drafted=max_drafted)
        return costs_of(cfg, pair, 0, ["a prompt"], Sampling(max_new_tokens=tokens), sizes, tmp_path, {})

    first = get()
    assert get().save(tmp_path / "a").read_text() == first.save(tmp_path / "b").read_text()
    assert asked == [((1, 4), costs.DRAFTED, 8)]
    for number, change in enumerate(({"sizes": (1,)}, {"rounds": 9}, {"max_drafted": 3}, {"tokens": 64}), start=2):
        get(**change)
        get(**change)
        assert len(asked) == number, change
    assert asked[3] == ((1, 4), (1, 3), 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    get()
    assert len(asked) == 6
    assert len(list(tmp_path.glob("measured-*.json"))) == len(list(tmp_path.glob("measured-*.csv"))) == 6

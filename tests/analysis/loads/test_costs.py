"""Where cost tables come from: a measurement is kept, and made again for whatever would change it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.loads import costs
from analysis.loads.costs import costs_of
from toolkit import ModelPair
from toolkit.decoding import Sampling
from toolkit.errors import InputError
from toolkit.load_cost import LoadCost


@pytest.fixture
def asked(monkeypatch):
    """What was asked of `measured_costs`, which takes no time."""
    found: list[tuple] = []

    def instead(pair, prompts, sampling, batch_sizes, drafted, rounds, about):
        found.append((tuple(batch_sizes), tuple(drafted), rounds))
        ratios = 0.2 + 0.1 * np.arange(len(pair.drafts))
        return [(LoadCost.ratio(ratio), pd.DataFrame({"model": ["draft"]})) for ratio in ratios]

    monkeypatch.setattr(costs, "measured_costs", instead)
    return found


def test_a_measurement_is_kept_until_something_it_depends_on_changes(asked, tmp_path, monkeypatch):
    pair = ModelPair.toy()

    def get(sizes=(1, 4), rounds=8, max_drafted=20, tokens=32):
        cfg = SimpleNamespace(costs=None, hardware=None, rounds=rounds, max_drafted=max_drafted)
        (found,) = costs_of(cfg, [pair], ["a prompt"], Sampling(max_new_tokens=tokens), sizes, tmp_path, [{}])
        return found

    first = get()
    assert get().save(tmp_path / "a").read_text() == first.save(tmp_path / "b").read_text()
    assert asked == [((1, 4), costs.DRAFTED, 8)]
    for number, change in enumerate(({"sizes": (1,)}, {"rounds": 9}, {"max_drafted": 3}, {"tokens": 64}), start=2):
        get(**change)
        get(**change)
        assert len(asked) == number, change
    assert asked[3] == ((1, 4), (1, 2, 3), 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    get()
    assert len(asked) == 6
    assert len(list(tmp_path.glob("measured-*.json"))) == len(list(tmp_path.glob("measured-*.csv"))) == 6


def test_drafts_are_measured_together_and_each_has_its_table(asked, tmp_path):
    cfg = SimpleNamespace(costs=None, hardware=None, rounds=8, max_drafted=20)
    pairs = [ModelPair.toy(), ModelPair.toy()]
    pairs[1].target = pairs[0].target

    def get(some):
        return costs_of(cfg, some, ["a prompt"], Sampling(), (1, 4), tmp_path, [{}] * len(some))

    assert [costs.draft(1, 1, 1) / costs.target(1, 1, 1) for costs in get(pairs)] == pytest.approx([0.2, 0.3])
    assert [costs.draft(1, 1, 1) for costs in get(pairs)] == [costs.draft(1, 1, 1) for costs in get(pairs)]
    assert len(asked) == 1
    get(pairs[:1])
    assert len(asked) == 2, "one draft alone is another measurement"


def test_files_are_one_for_all_drafts_or_one_for_each(tmp_path):
    pairs = [ModelPair.toy()] * 3
    names = [str(LoadCost.ratio(ratio).save(tmp_path / f"{ratio}.json")) for ratio in (0.1, 0.2, 0.3)]

    def ratios(files):
        cfg = SimpleNamespace(costs=files, hardware=None)
        found = costs_of(cfg, pairs, [], Sampling(), (1,), tmp_path, [{}] * 3)
        return [costs.draft(1, 1, 1) / costs.target(1, 1, 1) for costs in found]

    assert ratios(names) == pytest.approx([0.1, 0.2, 0.3])
    assert ratios(names[1]) == ratios([names[1]]) == pytest.approx([0.2] * 3)
    with pytest.raises(InputError, match="expected one cost table, or one for each of 3 drafts, got 2"):
        ratios(names[:2])

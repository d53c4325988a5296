"""A recorded pair: what can be served, and what rules for a whole batch are told."""

from __future__ import annotations

import pytest

from analysis.loads.recorded import RecordedPair
from analysis.loads.simulator import Load
from analysis.tables.grid import Setting
from analysis.tables.workbench import Workbench
from data_gen.held_out import load_frozen
from toolkit import ModelPair
from toolkit.costs.load import LoadCost
from toolkit.decoding import Sampling
from toolkit.errors import InputError
from toolkit.models.prompts import Prompt


@pytest.fixture(scope="module")
def bench():
    prompts = [Prompt(str(n), e.prompt) for n, e in enumerate(load_frozen("math", "dev")[:6])]
    return Workbench(ModelPair.toy(), prompts, Sampling(temperature=1.0, max_new_tokens=20, seed=3), 6)


@pytest.fixture(scope="module")
def recorded(bench, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    own = LoadCost.ratio(0.9).save(folder / "own.json")
    settings = [Setting("autoregressive"), Setting("speculative"), Setting("batch_rate_confidence")]
    settings += [Setting("batch_rate_confidence", {"policy.costs": str(own)}), Setting("oracle"), Setting("mcsd")]
    found = RecordedPair(bench, settings, folder, 20)
    found.costs = LoadCost.ratio(0.05), LoadCost.ratio(0.05).save(folder / "costs.json")
    return found


def test_chains_judged_token_by_token_are_simulated(recorded):
    assert [setting.method for setting in recorded.settings] == [
        "autoregressive", "speculative", "batch_rate_confidence", "batch_rate_confidence",
    ]  # fmt: skip
    assert recorded.left_out == {
        "oracle": "a bound, not a method",
        "mcsd": "only chains judged token by token are simulated",
    }
    plain, fixed = (recorded.serve(setting, Load(2)) for setting in recorded.settings[:2])
    assert plain.tokens.tolist() == fixed.tokens.tolist() and plain.forwards[0] == 0 < fixed.forwards[0]
    assert plain.forwards[1] > fixed.forwards[1]


def test_a_batch_rule_reads_the_table_unless_its_setting_names_one(recorded):
    free, given = recorded.settings[-2:]
    assert recorded.serve(free, Load(2)).num_drafted.sum() > recorded.serve(given, Load(2)).num_drafted.sum()
    assert recorded.overrides(free)["method.policy.costs"].endswith("costs.json")
    assert recorded.overrides(given)["method.policy.costs"].endswith("own.json")
    assert recorded.overrides(recorded.settings[1])["method"] == "speculative"


def test_nothing_to_simulate_is_refused(bench, tmp_path):
    with pytest.raises(InputError, match="no setting can be simulated: oracle: a bound, not a method"):
        RecordedPair(bench, [Setting("oracle")], tmp_path, 20)
    with pytest.raises(InputError, match="may draft 20 tokens: expected at most max_drafted=4"):
        RecordedPair(bench, [Setting("batch_rate_confidence")], tmp_path, 4)


def test_roll_outs_are_as_deep_as_pays_and_deeper_settings_are_left_out(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("analysis.loads.recorded.depth_that_pays", lambda *_: 3)
    settings = [Setting("speculative", {"policy.num_drafted": length}) for length in (2, 3, 4)]
    found = RecordedPair(bench, [Setting("autoregressive"), *settings, Setting("confidence")], tmp_path, "auto")
    assert found.max_drafted == 3 and list(found.left_out) == ["speculative"]
    assert [setting.label for setting in found.settings[:-1]] == ["", "K=2", "K=3"]
    found.costs = LoadCost.ratio(0.05), LoadCost.ratio(0.05).save(tmp_path / "costs.json")
    assert found.recording.trace_for(found.settings[1]).max_drafted == 3
    assert found.overrides(found.settings[-1])["method.max_drafted"] == 3, "decoded as it was simulated"
    monkeypatch.setattr("analysis.loads.recorded.depth_that_pays", lambda *_: 7)
    assert RecordedPair(bench, settings, tmp_path, "auto").max_drafted == 3, "measured once per draft and texts"

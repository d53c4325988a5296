"""What the batch's rate rule starts from: acceptance and contexts of a recording, counted text by text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analysis.loads.recorded import RecordedPair
from analysis.loads.simulator import Load
from analysis.tables.grid import Setting
from analysis.tables.workbench import Workbench
from data_gen.frozen import load_frozen
from toolkit import ModelPair
from toolkit.decoding import Sampling
from toolkit.load_cost import LoadCost
from toolkit.prompts import Prompt


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    prompts = [Prompt(str(n), e.prompt) for n, e in enumerate(load_frozen("math", "dev")[:6])]
    bench = Workbench(ModelPair.toy(), prompts, Sampling(temperature=1.0, max_new_tokens=20, seed=3), 6)
    given = {"policy.acceptance": 0.2}
    settings = [Setting("speculative"), Setting("batch_rate_confidence"), Setting("batch_rate_confidence", given)]
    return RecordedPair(bench, settings, tmp_path_factory.mktemp("recorded"), 20)


def test_the_rule_starts_from_the_share_of_positions_that_are_accepted(recorded):
    free, given = recorded.settings[-2:]
    accepted = recorded.recording.trace_for(free).accepted
    assert recorded.acceptance == pytest.approx(float(accepted.double().mean()), abs=0.02)
    for setting, expected in ((free, recorded.acceptance), (given, 0.2)):
        assert recorded._policy(setting, LoadCost.ratio(0.2)).policy.acceptance == expected
    assert recorded.serve(free, LoadCost.ratio(0.01), Load(2)).forwards[0] > 0
    assert recorded.serve(free, LoadCost.ratio(20.0), Load(2)).forwards[0] == 0
    assert recorded.told(recorded.settings[0]) == {}


def test_another_recording_can_be_what_the_rule_knows(recorded):
    bench = replace(recorded.bench, prompts=recorded.bench.prompts[:2])
    other = RecordedPair(bench, recorded.settings, recorded.recording.folder, 20, known_by=recorded)
    setting, costs = recorded.settings[-2], LoadCost.ratio(0.2)
    inner = other._policy(setting, costs).policy
    for name, value in recorded.told(setting).items():
        assert getattr(inner, name) == value
    assert other.acceptance != recorded.acceptance

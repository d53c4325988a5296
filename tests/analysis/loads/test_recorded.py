"""What the batch's rate rule starts from: acceptance and contexts of a recording, counted text by text."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from analysis.loads.recorded import RecordedPair
from analysis.loads.simulator import Load
from analysis.tables.grid import Setting
from analysis.tables.workbench import Workbench
from data_gen.frozen import load_frozen
from toolkit import ModelPair
from toolkit.decoding import Sampling
from toolkit.load_cost import LoadCost, RuleSeconds
from toolkit.prompts import Prompt


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    prompts = [Prompt(str(n), e.prompt) for n, e in enumerate(load_frozen("math", "dev")[:6])]
    bench = Workbench(ModelPair.toy(), prompts, Sampling(temperature=1.0, max_new_tokens=20, seed=3), 6)
    given = {"policy.first": 0.2, "policy.later": 0.3, "policy.context": 7}
    settings = [Setting("speculative"), Setting("batch_rate_confidence"), Setting("batch_rate_confidence", given)]
    return RecordedPair(bench, settings, tmp_path_factory.mktemp("recorded"), 20)


def test_acceptance_of_first_and_later_tokens(recorded):
    trace = recorded.recording.trace_for(recorded.settings[0])
    firsts, seconds, positions = 0, 0, 0
    for start, end in zip(trace.text_first[:-1].tolist(), trace.text_first[1:].tolist(), strict=True):
        accepted = trace.accepted[start:end].tolist()
        positions += len(accepted)
        firsts += sum(accepted)
        seconds += sum(a and b for a, b in pairwise(accepted))
    assert recorded.usual["first"] == pytest.approx((firsts + 1) / (positions + 2), abs=1e-3)
    assert recorded.usual["later"] == pytest.approx((seconds + 1) / (firsts + 2), abs=1e-3)
    lengths = [len(ids) for ids in recorded.responses.token_ids]
    assert recorded.usual["prompt"] == round(np.mean(recorded.prompt_tokens))
    assert recorded.usual["response"] == round(np.mean(lengths))
    assert recorded.usual["context"] == round(np.mean(recorded.prompt_tokens) + np.mean(lengths) / 2)


def test_the_rule_starts_from_it_unless_its_setting_says_otherwise(recorded):
    free, given = recorded.settings[-2:]
    for setting, expected in ((free, recorded.usual), (given, {"first": 0.2, "later": 0.3, "context": 7})):
        inner = recorded._policy(setting, LoadCost.ratio(0.2)).policy
        assert {name: getattr(inner, name) for name in expected} == expected
    assert recorded.serve(free, LoadCost.ratio(0.01), Load(2)).forwards[0] > 0


def test_the_rule_counts_its_own_seconds_where_the_table_has_them(recorded):
    free = recorded.settings[-2]
    (name,) = (name for name in recorded.methods if name.startswith("batch_rate"))
    known = replace(LoadCost.ratio(0.2), rules={name: RuleSeconds((1.0,), (0.1,), (0.7,))})
    assert recorded._policy(free, LoadCost.ratio(0.2)).policy.own is None
    assert recorded._policy(free, known).policy.own == name
    drafting, resting = (recorded.serve(free, costs, Load(2)).forwards[0] for costs in (LoadCost.ratio(0.2), known))
    assert drafting > resting == 0, "a policy that takes .7 of a target forward per token never pays"

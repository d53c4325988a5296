"""What the batch's rate rule starts from: acceptance and contexts of a recording, counted text by text."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from analysis.loads.recorded import RecordedPair
from analysis.loads.simulator import Load, serve
from analysis.tables.grid import Setting
from analysis.tables.workbench import Workbench
from data_gen.frozen import load_frozen
from toolkit import ModelPair
from toolkit.decoding import Sampling
from toolkit.load_cost import LoadCost, RuleSeconds
from toolkit.prompts import Prompt
from toolkit.stopping import BatchRate, Bounded, Fixed


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    prompts = [Prompt(str(n), e.prompt) for n, e in enumerate(load_frozen("math", "dev")[:6])]
    bench = Workbench(ModelPair.toy(), prompts, Sampling(temperature=1.0, max_new_tokens=20, seed=3), 6)
    given = {"policy.first": 0.2, "policy.later": 0.3, "policy.context": 7}
    settings = [Setting("speculative"), Setting("batch_rate_confidence"), Setting("batch_rate_confidence", given)]
    return RecordedPair(bench, settings, tmp_path_factory.mktemp("recorded"), 20)


def test_tokens_of_fixed_lengths_and_acceptance_of_first_and_later_tokens(recorded):
    """Round by round, token by token; and a fixed length is served in as many rounds."""
    trace = recorded.recording.trace_for(recorded.settings[0])
    firsts, laters, made = [], [], []
    for length in range(1, 21):
        rounds = 0
        for start, end in pairwise(trace.text_first.tolist()):
            at = start
            while at < end:
                rounds += 1
                room = 20 - (at - start) - 1  # the target adds a token of its own
                for depth in range(1, min(length, room) + 1):
                    accepted = at < end and bool(trace.accepted[at])
                    (firsts if depth == 1 else laters).append(accepted)
                    if not accepted:
                        break
                    at += 1
                at += 1
        made.append(trace.num_positions / rounds)
    assert recorded.usual["made"] == pytest.approx(made, abs=1e-3)
    assert recorded.usual["first"] == pytest.approx(np.mean(firsts), abs=2e-3)
    assert recorded.usual["later"] == pytest.approx(np.mean(laters), abs=2e-3)
    served = serve(
        trace, recorded.prompt_tokens, Bounded(Fixed(4), 1, 20), LoadCost.ratio(0.1), Load(2), range(recorded.num_texts)
    )
    assert served.tokens.sum() / served.rounds.sum() == pytest.approx(made[3])
    lengths = [len(ids) for ids in recorded.responses.token_ids]
    assert recorded.usual["prompt"] == round(np.mean(recorded.prompt_tokens))
    assert recorded.usual["response"] == round(np.mean(lengths))
    contexts = [n + k for n, count in zip(recorded.prompt_tokens, lengths, strict=True) for k in range(count)]
    assert recorded.usual["context"] == round(np.mean(contexts))
    assert recorded.usual["longest"] == round(np.quantile(contexts, 0.95)) > recorded.usual["context"]


def test_the_rule_starts_from_it_unless_its_setting_says_otherwise(recorded):
    free, given = recorded.settings[-2:]
    for setting, expected in ((free, recorded.usual), (given, {"first": 0.2, "later": 0.3, "context": 7})):
        inner = recorded._policy(setting, LoadCost.ratio(0.2)).policy
        assert {name: getattr(inner, name) for name in expected} == expected
    assert recorded.serve(free, LoadCost.ratio(0.01), Load(2)).forwards[0] > 0


def test_the_rule_counts_its_own_seconds_where_the_table_has_them(recorded):
    free = recorded.settings[-2]
    (name,) = (name for name in recorded.methods if name.startswith("batch_rate"))
    known, dearer = (
        replace(LoadCost.ratio(0.2), rules={name: RuleSeconds((1.0,), (per_round,), (0.7,))})
        for per_round in (0.1, 20.0)
    )
    assert recorded._policy(free, LoadCost.ratio(0.2)).policy.own is None
    assert recorded._policy(free, known).policy.own == name
    drafting, settled, resting = (
        recorded.serve(free, costs, Load(2)) for costs in (LoadCost.ratio(0.2), known, dearer)
    )
    assert drafting.forwards[0] > 0 < settled.forwards[0]
    assert resting.forwards[0] == 0, "a policy that takes twenty target forwards per round never pays"
    times = settled.joined[2:].tolist()
    joined = sum(times.count(time) == 1 for time in times)  # prompts that both models read while the other row waits
    spent = 0.2 * settled.forwards[0] + 1.1 * settled.forwards[1] + 1.2 * joined
    assert settled.answered.max() == pytest.approx(spent, rel=0.05), (
        "one that takes seven per token settles on a depth instead"
    )


@pytest.mark.parametrize("ratio", [0.05, 0.6])
def test_what_is_gained_and_kept_one_text_at_a_time(recorded, ratio):
    """Against rounds counted one by one: texts of their own, each from its first token."""
    free, given = recorded.settings[-2:]
    costs = LoadCost.ratio(ratio)
    told = recorded.told(free, costs)
    policy = recorded._policy(free, costs)
    assert policy.policy.gain == told["gain"]
    trace = recorded.recording.trace_for(free)

    def tokens_per_cost(one: Bounded) -> float:
        spent = 0.0
        for text in range(recorded.num_texts):
            served = serve(trace, [1] * recorded.num_texts, one, costs, Load(1), [text])
            assert served.num_calls[0] >= served.rounds[0] - 1, "every round drafts, but one without room"
            spent += served.rounds[0] + ratio * served.num_calls[0]
        return trace.num_positions / spent

    expected = [tokens / (1 + ratio * depth) for depth, tokens in enumerate(told["made"], start=1)]
    best = 1 + expected.index(max(expected))
    near = [depth for depth in (best - 1, best, best + 1) if 1 <= depth <= 20]
    kept = np.mean([tokens_per_cost(Bounded(Fixed(depth), 1, 20)) / expected[depth - 1] for depth in near])
    assert told["kept"] == pytest.approx(kept, abs=2e-3)
    unknown = {"gain": BatchRate.gain, "gain_many": BatchRate.gain_many}
    always = replace(policy, policy=replace(policy.policy, **unknown, rests=False, settles=False, known={}))
    assert told["gain"] == pytest.approx(tokens_per_cost(always) / max(expected) / kept, abs=2e-3)
    assert recorded.told(free, costs) is told, "simulated once per table"
    assert "longest" in told and "longest" not in recorded.told(free, costs, "always")
    assert not {"first", "made"} & set(recorded.told(given, costs)) and recorded.told(recorded.settings[0], costs) == {}


def test_another_recording_can_be_what_the_rule_knows(recorded):
    bench = replace(recorded.bench, prompts=recorded.bench.prompts[:2])
    other = RecordedPair(bench, recorded.settings, recorded.recording.folder, 20, known_by=recorded)
    setting, costs = recorded.settings[-2], LoadCost.ratio(0.2)
    inner = other._policy(setting, costs).policy
    for name, value in recorded.told(setting, costs).items():
        assert getattr(inner, name) == value
    assert other.usual != recorded.usual

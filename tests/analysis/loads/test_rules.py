"""Seconds of the policies themselves: every call is timed, none is obeyed, and the simulator adds them to its rounds."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.loads.recorded import RecordedPair
from analysis.loads.rules import DRAFTED, Watch, Watched, per_round, with_rules
from analysis.loads.simulator import Load, serve
from analysis.tables.grid import Setting
from analysis.tables.workbench import Workbench
from data_gen.frozen import load_frozen
from data_gen.recording import Recorder
from toolkit import ModelPair, config
from toolkit.acceptance import PrereadHead
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.load_cost import LoadCost, RuleSeconds
from toolkit.prompts import Prompt
from toolkit.stopping import Bounded, Fixed

SAMPLING = Sampling(temperature=0.0, max_new_tokens=16)
PROMPTS = [example.prompt for example in load_frozen("math", "dev")[:3]]


@pytest.fixture(scope="module")
def pair():
    return ModelPair.toy()


@pytest.mark.parametrize(
    ("name", "overrides", "asked"),
    [
        ("confidence", ["policy.threshold=1.0"], 1),
        ("specdec_pp", ["policy.threshold=0.0", "policy.lag=0"], 2),
        ("batch_rate", [], 1),
    ],
)
def test_a_watched_policy_is_asked_at_every_token_and_not_obeyed(pair, name, overrides, asked):
    method = config.method(name, overrides)
    assert method.policy.reads == (asked == 2)
    watch = Watch(pair.device)
    watched = replace(method, policy=Watched(method.policy, 0, DRAFTED, watch), min_drafted=0, max_drafted=DRAFTED)
    found = decode(replace(pair, draft=None, end_ids=()), PROMPTS[:1], watched, SAMPLING)[0]
    drafted = [drafted_round.num_drafted for drafted_round in found.rounds]
    assert drafted[:-1] == [DRAFTED] * (len(drafted) - 1)
    assert len(watch.begins) == len(watch.observes) == len(watch.drafts) == len(drafted)
    calls = sum(drafted_round.num_draft_calls for drafted_round in found.rounds)
    assert len(watch.steps) in ((calls,) if asked == 1 else range(calls, 2 * calls + 1))
    assert all(seconds > 0 for seconds in watch.steps)


def test_seconds_per_round_are_means_over_rounds_that_would_draft():
    assert per_round([1.0, 9.0, 1.0, 4.0], [True, False, True, True], [0.5] * 4) == pytest.approx(2.0 + 0.5)
    assert per_round([1.0, 3.0], [False, False], [0.5, 1.5]) == pytest.approx(2.0 + 1.0), (
        "of a policy that never drafts"
    )
    assert per_round([1.0, 1.0, 500.0], [True] * 3, [0.0] * 3) == pytest.approx((1 + 1 + 10) / 3)


def test_what_a_table_knows_is_not_measured_again(pair):
    methods = {"rate": config.method("rate"), "confidence": config.method("confidence", ["policy.threshold=0.4"])}
    costs = with_rules(LoadCost.ratio(0.2), pair, methods, PROMPTS, SAMPLING, [1, 2], num_rounds=2)
    assert set(costs.rules) == set(methods) and costs.rules["rate"].batch == (1.0, 2.0)
    assert min(*costs.rules["rate"].step) > 0  # a head's forward is never free
    assert with_rules(costs, pair, methods, PROMPTS, SAMPLING, [1, 2]) is costs


def test_prompts_that_leave_no_room_are_refused_in_one_line(pair):
    long = [PROMPTS[0] * 8]
    with pytest.raises(
        InputError, match=r"^the policies' own seconds are measured on \d+ tokens behind every prompt, and"
    ):
        with_rules(
            LoadCost.ratio(0.2), pair, {"tail": config.method("tail")}, long, SAMPLING, [1], num_rounds=pair.max_length
        )


def test_another_head_is_another_rule(pair, tmp_path):
    """Seconds are kept by method and by what the head holds: one head is never charged another's."""
    other = _copied_head(pair, tmp_path)
    settings = [Setting("rate"), Setting("rate", {"head": str(other)}), Setting("tail", {"policy.threshold": 0.2})]
    bench = Workbench(pair, [Prompt("a", PROMPTS[0])], SAMPLING, 4)
    recorded = RecordedPair(bench, settings, tmp_path / "kept", 20)
    names = list(recorded.methods)
    assert len(names) == 3 and names[0].startswith("rate-") and names[1].startswith("rate-") and names[2] == "tail"
    rules = {names[1]: RuleSeconds((1.0,), (1000.0,), (0.0,))}
    costs = replace(LoadCost.ratio(0.2), rules=rules)
    first, second = (recorded.serve(setting, costs, Load(1)).answered.max() for setting in settings[:2])
    assert first < 1000 <= second


def _copied_head(pair, folder):
    """The pair's pre-read head with its last layer negated: another head for the same draft."""
    head, about = PrereadHead.load(pair.head)
    with torch.no_grad():
        head.layers[-1].weight.neg_()
    return head.save(folder / "other", about)


def test_seconds_by_hand_kept_and_read_again(tmp_path):
    rule = RuleSeconds((1.0, 3.0), (0.1, 0.3), (0.01, 0.03))
    assert rule(2, 5) == pytest.approx(0.2 + 5 * 0.02) and rule(9, 0) == 0.3
    costs = replace(LoadCost.ratio(0.2), rules={"rate": rule})
    assert LoadCost.load(costs.save(tmp_path / "costs.json")).rules == {"rate": rule}


@pytest.mark.parametrize(
    "broken",
    [
        [],
        {"rate": 3},
        {"rate": {"batch": [1], "round": [1, 2], "step": [1]}},
        {"rate": {"batch": [1], "round": [-1], "step": [0]}},
    ],
)
def test_broken_seconds_are_refused_by_name(tmp_path, broken):
    path = LoadCost.ratio(0.2).save(tmp_path / "costs.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "rules": broken}))
    with pytest.raises(InputError, match="is not a cost table"):
        LoadCost.load(path)


def test_the_simulator_adds_them_to_every_round_that_drafts(pair):
    plain = decode(pair, PROMPTS, config.method("autoregressive"), SAMPLING)
    texts = [(g.prompt_ids, g.token_ids) for g in plain]
    trace = Recorder(pair, SAMPLING, 4, {}).record(texts, range(len(texts)))
    policy = Bounded(Fixed(3), 1, 4).bind(pair)
    lengths = [len(prompt) for prompt, _ in texts]
    args = (trace, lengths, policy, LoadCost.ratio(0.2), Load(1), range(len(texts)))
    free, paid = serve(*args), serve(*args, RuleSeconds((1.0,), (0.5,), (0.25,)))
    assert np.array_equal(free.num_calls, paid.num_calls)
    fixed = config.method("speculative", ["policy.num_drafted=3", "max_drafted=4"])
    rounds = [r for g in decode(pair, PROMPTS, fixed, SAMPLING, batch_size=1) for r in g.rounds]
    assert (len(rounds), sum(r.num_draft_calls for r in rounds)) == (free.forwards[1], free.forwards[0])
    expected = 0.5 * sum(r.num_draft_calls > 0 for r in rounds) + 0.25 * free.forwards[0]
    assert paid.answered.max() - free.answered.max() == pytest.approx(expected)
    assert torch.equal(torch.from_numpy(free.tokens), torch.from_numpy(paid.tokens))

"""Seconds of the policies themselves: every call is timed, none is obeyed, and the simulator adds them to its rounds."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.loads.rules import DRAFTED, Watch, Watched, with_rules
from analysis.loads.simulator import Load, serve
from data_gen.frozen import load_frozen
from data_gen.recording import Recorder
from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.load_cost import LoadCost, RuleSeconds
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
    assert len(watch.rounds) == 2 * len(drafted)
    calls = sum(drafted_round.num_draft_calls for drafted_round in found.rounds)
    assert len(watch.steps) in ((calls,) if asked == 1 else range(calls, 2 * calls + 1))
    assert all(seconds > 0 for seconds in watch.steps)


def test_what_a_table_knows_is_not_measured_again(pair):
    methods = {"rate": config.method("rate"), "confidence": config.method("confidence", ["policy.threshold=0.4"])}
    costs = with_rules(LoadCost.ratio(0.2), pair, methods, PROMPTS, SAMPLING, [1, 2], num_rounds=2)
    assert set(costs.rules) == set(methods) and costs.rules["rate"].batch == (1.0, 2.0)
    assert min(*costs.rules["rate"].step) > 0  # a head's forward is never free
    assert with_rules(costs, pair, methods, PROMPTS, SAMPLING, [1, 2]) is costs


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


def test_the_simulator_adds_them_to_every_round(pair):
    plain = decode(pair, PROMPTS, config.method("autoregressive"), SAMPLING)
    texts = [(g.prompt_ids, g.token_ids) for g in plain]
    trace = Recorder(pair, SAMPLING, 4, {}).record(texts, range(len(texts)))
    policy = Bounded(Fixed(3), 1, 4).bind(pair)
    lengths = [len(prompt) for prompt, _ in texts]
    args = (trace, lengths, policy, LoadCost.ratio(0.2), Load(1), range(len(texts)))
    free, paid = serve(*args), serve(*args, RuleSeconds((1.0,), (0.5,), (0.25,)))
    assert np.array_equal(free.num_calls, paid.num_calls)
    expected = 0.5 * free.forwards[1] + 0.25 * free.forwards[0]
    assert paid.answered.max() - free.answered.max() == pytest.approx(expected)
    assert torch.equal(torch.from_numpy(free.tokens), torch.from_numpy(paid.tokens))

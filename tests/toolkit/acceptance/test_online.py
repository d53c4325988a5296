"""The online logistic: its weights after some rounds, worked out token by token; live rounds are replayed rounds."""

import math

import pytest
import torch

from data_gen.toy import load_frozen
from tests.toolkit.acceptance.live_rounds import lengths_alike
from toolkit import ModelPair
from toolkit.acceptance import OnlineLogistic
from toolkit.config import method
from toolkit.decoding import Sampling, decode
from toolkit.stopping import Bounded, OnlineRate
from toolkit.trace.record import Recorder
from toolkit.types import DraftStep, RoundCounts

CPU = torch.device("cpu")
ROUNDS = [([2.0, 1.0, -0.5], 1), ([0.3, 3.0], 2), ([1.0], 0), ([4.0, 4.0, 4.0, 4.0], 3)]  # log odds, accepted


def step_of(odds, depth):
    logits = torch.tensor([[value, 0.0] for value in odds])
    tokens = torch.zeros(len(odds), dtype=torch.long)
    return DraftStep(depth, logits, logits.softmax(-1), torch.zeros(len(odds), 1), tokens)


def slow(rounds, deepest, evidence):
    """Slope and intercepts after the rounds."""
    slope, intercepts = 0.5, [-0.2] * deepest
    slope_curvature, curvatures = evidence, [evidence] * deepest
    for odds, accepted in rounds:
        moves = [0.0] * deepest
        push = 0.0
        for k in range(min(accepted + 1, len(odds))):
            x = abs(odds[k])  # the largest of two probabilities has log odds of at least 0
            prob = 1 / (1 + math.exp(-(slope * x + intercepts[k])))
            error, curvature = (k < accepted) - prob, prob * (1 - prob)
            curvatures[k] += curvature
            slope_curvature += curvature * x * x
            moves[k], push = error / curvatures[k], push + error * x
        slope += push / slope_curvature
        intercepts = [value + move for value, move in zip(intercepts, moves, strict=True)]
    return slope, intercepts


def test_the_weights_follow_the_verdicts_and_each_row_has_its_own():
    policy = OnlineRate(OnlineLogistic(evidence=1.5), rate=0.1).within(4)
    state = policy.init(2, CPU)
    for odds, accepted in ROUNDS:
        for depth, value in enumerate(odds, start=1):
            state, _ = policy.step(step_of([value, value], depth), state)
        drafted, length = torch.tensor([len(odds), 0]), torch.tensor([accepted, 0])
        counts = RoundCounts(drafted, drafted, length)
        state = policy.observe(counts, counts, state)
    slope, intercepts = slow(ROUNDS, 4, 1.5)
    assert float(state["slope"][0]) == pytest.approx(slope, abs=1e-5)
    assert state["intercepts"][0].tolist() == pytest.approx(intercepts, abs=1e-5)
    assert float(state["slope"][1]) == pytest.approx(0.5) and state["intercepts"][1].tolist() == pytest.approx(
        [-0.2] * 4
    )
    accepted, following = policy.estimator.at(state).drawn_probs(step_of([1.0, 1.0], 2))
    logits = [slope + intercepts[1], slope + intercepts[2]]
    assert [float(accepted[0].logit()), float(following[0].logit())] == pytest.approx(logits, abs=1e-4)


def test_live_rounds_are_replayed_rounds():
    asked = [load_frozen(domain, "dev")[i].prompt for domain in ("instruct", "code") for i in range(2)]
    greedy, pair = Sampling(temperature=0.0, max_new_tokens=24), ModelPair.toy()
    plain = decode(pair, asked, method("autoregressive"), greedy)
    trace = Recorder(pair, greedy, 6).record_all([(g.prompt_ids, g.token_ids) for g in plain], range(len(plain)))
    lengths = lengths_alike(
        pair, asked, plain, trace, Bounded(OnlineRate(OnlineLogistic()), 1, 6), greedy, batch_size=3
    )
    assert len(lengths) > 2

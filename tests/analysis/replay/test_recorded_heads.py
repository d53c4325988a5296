"""Heads on traces: whose logits are read, scored anew, judged and calibrated; and which are refused."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analysis.replay import head_folders
from analysis.replay.head_scores import drawn_samples, head_scores
from analysis.replay.recorded_heads import RecordedScorer, scorer_of, threshold_policy, with_logits, with_recorded_heads
from analysis.tables.bootstrap import Bootstrap
from tests.analysis.replay.plain import Text, small_trace
from toolkit import testing
from toolkit.acceptance import AcceptanceHead, HeadEstimator, PrereadEstimator, PrereadHead, from_states
from toolkit.acceptance.calibration.scores import CalibrationScores
from toolkit.acceptance.preread import PrereadScorer, embedding_table
from toolkit.errors import InputError
from toolkit.stopping import Bounded, Confidence, Fixed, Rate, Survival
from toolkit.trace.step import RecordedStep

SIZE = 9  # rows of the draft's table: its states


@pytest.fixture(scope="module")
def trace():
    return small_trace(hidden=True, upper_bound=True)


@pytest.fixture(scope="module")
def heads():
    torch.manual_seed(0)
    return AcceptanceHead(SIZE, log_w_rej=math.log(3.0)), PrereadHead(SIZE, 3, width=4, log_w_rej=math.log(2.0))


@pytest.fixture(scope="module")
def scored(trace):
    """Made-up logits: of an acceptance head [S], and of a pre-read one [S, 2]."""
    return torch.randn(trace.num_steps, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def every_start(trace):
    for number in range(trace.num_texts):
        text = Text(trace, number)
        for start in range(text.first, text.end):
            yield text, start


# -- logits -----------------------------------------------------------------------------------------------------------


def test_a_recorded_scorer_reads_its_own_name_from_steps_of_a_trace(trace, scored):
    told = replace(trace, estimates={"mine": scored[:, 0], "other": scored[:, 1]})
    index = torch.tensor([3, 1])
    assert torch.equal(RecordedScorer("other")(RecordedStep(told, 1, index)), scored[index, 1])
    with pytest.raises(InputError, match=r"^recorded logits \(mine\) belong to the steps of a trace, got a Simple"):
        RecordedScorer("mine")(SimpleNamespace())


@pytest.mark.parametrize("chunk", [7, 16384])
def test_logits_are_those_of_the_head_on_every_state(trace, heads, monkeypatch, chunk):
    monkeypatch.setattr(from_states, "CHUNK", chunk)
    draft = testing.table_pair().draft
    acceptance, preread = heads
    found = with_logits(trace, "x", scorer_of(acceptance, draft))
    assert list(found.estimates) == ["x"] and found.estimates["x"].dtype == torch.float32
    assert torch.allclose(found.estimates["x"], acceptance(trace.hidden.float()), atol=1e-6)
    found = with_logits(trace, "y", scorer_of(preread, draft)).estimates["y"]
    step = RecordedStep(trace, 1, torch.arange(trace.num_steps))
    known = PrereadScorer(preread, embedding_table(draft).cpu())(step)
    assert found.shape == (trace.num_steps, 2) and torch.allclose(found, known.float(), atol=1e-6)
    assert not found.requires_grad


@pytest.mark.parametrize("corrected", [True, False])
def test_the_policy_that_is_swept_is_that_of_the_kind_of_head(heads, corrected):
    acceptance, preread = heads
    policy = threshold_policy(acceptance, "x", corrected)
    assert isinstance(policy, Survival) and policy.estimator.corrected == corrected
    assert (policy.estimator.scorer, policy.estimator.log_w_rej) == (RecordedScorer("x"), pytest.approx(math.log(3)))
    policy = threshold_policy(preread, "x", corrected)
    assert isinstance(policy, Rate) and policy.rate == 1.0
    assert (policy.estimator.scorer, policy.estimator.log_w_rej) == (RecordedScorer("x"), pytest.approx(math.log(2)))


def test_policies_read_the_logits_of_their_own_head():
    survival = Survival(HeadEstimator("folder/a", log_w_rej=0.5), 0.3)
    found = with_recorded_heads(Bounded(survival, 2, 4), {"folder/a": "a", "folder/b": "b"})
    assert (found.min_drafted, found.max_drafted, found.policy.threshold) == (2, 4, 0.3)
    assert found.policy.estimator.scorer == RecordedScorer("a") and found.policy.estimator.log_w_rej == 0.5
    rate = with_recorded_heads(Rate(PrereadEstimator("folder/b"), rate=0.7), {"folder/b": "b"})
    assert rate.estimator.scorer == RecordedScorer("b.preread") and rate.rate == 0.7
    for plain in (Confidence(0.2), Fixed(3)):
        assert with_recorded_heads(plain, {}) is plain
    own = SimpleNamespace(estimator=SimpleNamespace())  # an estimator that has no head
    assert with_recorded_heads(own, {}) is own
    for names, held in (({}, "none"), ({"x": "1", "y": "2"}, "x, y")):
        words = rf"^the trace holds no estimates of the head in folder/a \(held: {held}\)$"
        with pytest.raises(InputError, match=words):
            with_recorded_heads(survival, names)


# -- samples and scores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preread", [True, False])
def test_samples_are_tokens_that_the_draft_has_read(trace, scored, preread):
    given, known = scored if preread else scored[:, 0], []
    found = drawn_samples(trace, given, preread)
    for text, start in every_start(trace):
        steps = text.visited(start)
        if len(steps) > 1:
            known.append((scored[start if preread else steps[1], 0], trace.accept_prob[start], text.number))
    for values, column in zip(found, zip(*known, strict=True), strict=True):
        assert values.tolist() == [float(value) for value in column]
    assert len(known) > 50


@pytest.mark.parametrize("preread", [False, True])
def test_scores_of_a_head_with_and_without_its_class_weight(trace, heads, scored, preread):
    head = heads[preread]
    told = replace(trace, estimates={"x": scored if preread else scored[:, 0]})
    chosen = np.arange(trace.num_texts) % 3 != 0
    bootstrap = Bootstrap(200, 0.9, seed=1)
    found = head_scores(told, chosen, head, "x", bootstrap)
    logits, labels, text = drawn_samples(trace, told.estimates["x"], preread)
    mine = torch.tensor([number % 3 != 0 for number in text.tolist()])
    z, p, texts = logits[mine].double(), labels[mine].double(), text[mine]
    q = torch.sigmoid(z)
    loss = -(p * q.log() + (1 - p) * (1 - q).log())
    kl = loss - (torch.special.entr(p) + torch.special.entr(1 - p))
    shifted = torch.sigmoid(z + math.log(2.0 if preread else 3.0))
    assert found["tokens"] == len(z)
    assert found["log_loss"] == pytest.approx(float(loss.mean())) and found["binary_kl"] == pytest.approx(
        float(kl.mean())
    )
    corrected = -(p * shifted.log() + (1 - p) * (1 - shifted).log()).mean()
    assert found["log_loss_corrected"] == pytest.approx(float(corrected))
    scores = CalibrationScores()
    scores.update(z, p)
    assert found["auroc"] == pytest.approx(float(scores.compute()["auroc"]))
    assert found["ece"] == pytest.approx(float(scores.compute()["ece"])) and found["ece_corrected"] != found["ece"]
    sums = np.array([
        [float(kl[texts == number].sum()), int((texts == number).sum())] for number in np.flatnonzero(chosen)
    ])  # fmt: skip
    _, low, high = bootstrap.interval(sums, lambda totals: totals[..., 0] / totals[..., 1])
    assert (found["binary_kl_low"], found["binary_kl_high"]) == (pytest.approx(low), pytest.approx(high))
    assert low < found["binary_kl"] < high
    names = {"tokens", "auroc", "binary_kl_low", "binary_kl_high"}
    names |= {f"{name}{suffix}" for name in ("log_loss", "binary_kl", "ece") for suffix in ("", "_corrected")}
    assert set(found) == names


def test_without_samples_there_are_no_scores(heads):
    trace = small_trace(count=4, most=1)
    logits = torch.zeros(trace.num_steps)
    alone = replace(trace, accepted=torch.zeros_like(trace.accepted), estimates={"x": logits})
    with pytest.raises(InputError, match="^no drafted token was read after its position: record .*max_drafted"):
        head_scores(alone, np.ones(4, dtype=bool), heads[0], "x", Bootstrap(10))


def test_a_head_is_scored_on_the_trace_or_read_from_it(trace, heads):
    draft = testing.table_pair().draft
    for head, name in zip(heads, (None, "mine"), strict=True):
        recorded = replace(trace, estimates={"mine": torch.zeros(trace.num_steps, 2)})
        contender = head_folders.Contender("n", "kind", Path(), head, {}, name)
        scored = contender.scored(recorded, draft)
        expected = recorded.estimates["mine"] if name else head(trace.hidden.float())
        assert torch.allclose(scored.estimates[contender.estimate], expected, atol=1e-6)
        assert torch.equal(scored.tokens, trace.tokens)

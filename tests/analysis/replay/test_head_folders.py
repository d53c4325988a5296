"""Heads on traces: whose logits are read, scored anew, judged and calibrated; and which are refused."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.replay import head_folders
from analysis.replay.head_folders import threshold_policy
from analysis.replay.head_scores import drawn_samples, head_scores
from analysis.tables.bootstrap import Bootstrap
from tests.toolkit.trace.plain import Text, small_trace
from toolkit import testing
from toolkit.acceptance.calibration.scores import CalibrationScores
from toolkit.acceptance.folder import scorer_with
from toolkit.acceptance.preread import PrereadScorer, embedding_table
from toolkit.errors import InputError
from toolkit.stopping import Rate, Survival
from toolkit.trace import score
from toolkit.trace.steps import RecordedStep


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


@pytest.mark.parametrize("chunk", [7, 16384])
def test_logits_are_those_of_the_head_on_every_state(trace, heads, monkeypatch, chunk):
    monkeypatch.setattr(score, "CHUNK", chunk)
    draft = testing.table_pair().draft
    acceptance, preread = heads
    estimated = score.with_logits(trace, {"x": scorer_with(acceptance, draft, "cpu")})
    assert list(estimated.estimates) == ["x"] and estimated.estimates["x"].dtype == torch.float32
    assert torch.allclose(estimated.estimates["x"], acceptance(trace.hidden.float()), atol=1e-6)
    estimated = score.with_logits(trace, {"y": scorer_with(preread, draft, "cpu")}).estimates["y"]
    step = RecordedStep(trace, 1, torch.arange(trace.num_steps))
    known = PrereadScorer(preread, embedding_table(draft).cpu())(step)
    assert estimated.shape == (trace.num_steps, 2) and torch.allclose(estimated, known.float(), atol=1e-6)
    assert not estimated.requires_grad


@pytest.mark.parametrize("corrected", [True, False])
def test_the_policy_that_is_swept_reads_the_logits_of_its_own_head(trace, heads, scored, corrected):
    acceptance, preread = heads
    acceptance.key, preread.key = "mine", "other"
    told = replace(trace, estimates={"mine": scored[:, 0], "theirs": scored}, names={"other": "theirs"})
    index = torch.tensor([3, 1])
    step, logits = RecordedStep(told, 2, index), scored[index]
    policy = threshold_policy(acceptance, corrected)
    assert isinstance(policy, Survival)
    shift = math.log(3) if corrected else 0.0
    assert policy.estimator.read_prob(step).tolist() == pytest.approx(torch.sigmoid(logits[:, 0] + shift).tolist())
    policy = threshold_policy(preread, corrected)
    assert isinstance(policy, Rate) and policy.rate == 1.0
    for column, probs in enumerate(policy.estimator.drawn_probs(step)):
        assert probs.tolist() == pytest.approx(torch.sigmoid(logits[:, column] + math.log(2)).tolist())
    with pytest.raises(InputError, match=r"^this trace holds no estimates of the head mine \(held: none\): record it"):
        threshold_policy(acceptance, corrected).estimator.read_prob(RecordedStep(trace, 2, index))


# -- samples and scores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preread", [True, False])
def test_samples_are_tokens_that_the_draft_has_read(trace, scored, preread):
    given, known = scored if preread else scored[:, 0], []
    samples = drawn_samples(trace, given, preread)
    for text, start in every_start(trace):
        steps = text.visited(start)
        if len(steps) > 1:
            known.append((scored[start if preread else steps[1], 0], trace.accept_prob[start], text.number))
    for values, column in zip(samples, zip(*known, strict=True), strict=True):
        assert values.tolist() == [float(value) for value in column]
    assert len(known) > 50


@pytest.mark.parametrize("preread", [False, True])
def test_scores_of_a_head_with_and_without_its_class_weight(trace, heads, scored, preread):
    head = heads[preread]
    told = replace(trace, estimates={head.key: scored if preread else scored[:, 0]})
    chosen = np.arange(trace.num_texts) % 3 != 0
    bootstrap = Bootstrap(200, 0.9, seed=1)
    scores = head_scores(told, chosen, head, bootstrap)
    logits, labels, text = drawn_samples(trace, told.estimates[head.key], preread)
    is_chosen = torch.tensor([number % 3 != 0 for number in text.tolist()])
    z, p, sequences = logits[is_chosen].double(), labels[is_chosen].double(), text[is_chosen]
    q = torch.sigmoid(z)
    loss = -(p * q.log() + (1 - p) * (1 - q).log())
    kl = loss - (torch.special.entr(p) + torch.special.entr(1 - p))
    shifted = torch.sigmoid(z + math.log(2.0 if preread else 3.0))
    assert scores["tokens"] == len(z)
    assert scores["log_loss"] == pytest.approx(float(loss.mean())) and scores["binary_kl"] == pytest.approx(
        float(kl.mean())
    )
    corrected = -(p * shifted.log() + (1 - p) * (1 - shifted).log()).mean()
    assert scores["log_loss_corrected"] == pytest.approx(float(corrected))
    metric = CalibrationScores()
    metric.update(z, p)
    assert scores["auroc"] == pytest.approx(float(metric.compute()["auroc"]))
    assert scores["ece"] == pytest.approx(float(metric.compute()["ece"])) and scores["ece_corrected"] != scores["ece"]
    sums = np.array([
        [float(kl[sequences == number].sum()), int((sequences == number).sum())] for number in np.flatnonzero(chosen)
    ])  # fmt: skip
    _, low, high = bootstrap.interval(sums, lambda totals: totals[..., 0] / totals[..., 1])
    assert (scores["binary_kl_low"], scores["binary_kl_high"]) == (pytest.approx(low), pytest.approx(high))
    assert low < scores["binary_kl"] < high
    names = {"tokens", "auroc", "binary_kl_low", "binary_kl_high"}
    names |= {f"{name}{suffix}" for name in ("log_loss", "binary_kl", "ece") for suffix in ("", "_corrected")}
    assert set(scores) == names


def test_without_samples_there_are_no_scores(heads):
    trace = small_trace(count=4, most=1)
    logits = torch.zeros(trace.num_steps)
    alone = replace(trace, accepted=torch.zeros_like(trace.accepted), estimates={heads[0].key: logits})
    with pytest.raises(InputError, match="^no drafted token was read after its position: record .*max_drafted"):
        head_scores(alone, np.ones(4, dtype=bool), heads[0], Bootstrap(10))


def test_a_head_is_scored_on_the_trace_or_read_from_it(trace, heads):
    draft = testing.table_pair().draft
    for head, is_there in zip(heads, (False, True), strict=True):
        recorded = replace(trace, estimates={head.key: torch.zeros(trace.num_steps, 2)})
        candidate = head_folders.CandidateHead("n", "kind", Path(), head, {}, is_there)
        scored = candidate.scored(recorded, draft)
        expected = recorded.estimates[head.key] if is_there else head(trace.hidden.float())
        assert torch.allclose(scored.head_logits(head.key), expected, atol=1e-6)
        assert torch.equal(scored.tokens, trace.tokens)

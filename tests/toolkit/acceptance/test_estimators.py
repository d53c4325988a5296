"""Estimators: what they give of a head's logits, with the class weight's shift undone, and from which folder."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from toolkit.acceptance import AcceptanceHead, HeadEstimator, PrereadHead
from toolkit.acceptance.estimators import ConfidenceEstimator, PrereadEstimator
from toolkit.acceptance.folder import SurvivalScorer
from toolkit.errors import InputError
from toolkit.types import DraftStep

STEP = DraftStep(
    2, torch.tensor([[1.0, 0.0]]), torch.tensor([[0.7, 0.3]]), torch.tensor([[0.5, -1.0, 2.0]]), torch.tensor([1])
)
W_REJ = 3.0


def logits(step: DraftStep) -> torch.Tensor:
    """A score of the state that has read a token."""
    return step.hidden[:, 0]


def two_logits(step: DraftStep) -> torch.Tensor:
    """Scores of the drawn token and of the one after it."""
    return step.hidden[:, :2]


def prob(logit: float, w_rej: float) -> float:
    """Of a model trained with rejections weighing w_rej: its odds are those of acceptance over w_rej."""
    odds = math.exp(logit) * w_rej
    return odds / (1 + odds)


def test_a_weight_of_rejections_shifts_the_odds_that_are_learned_and_the_correction_puts_them_back():
    """The minimum of the weighted loss over one logit, found by steps of Newton, for a token accepted 7 times in 10."""
    share, logit = 0.7, torch.zeros((), dtype=torch.float64)
    for _ in range(50):
        prob = torch.sigmoid(logit)
        slope = -share * (1 - prob) + W_REJ * (1 - share) * prob
        logit = logit - slope / ((share + W_REJ * (1 - share)) * prob * (1 - prob))
    head = AcceptanceHead(3, log_w_rej=math.log(W_REJ))
    assert float(torch.sigmoid(head.corrected(logit))) == pytest.approx(share, abs=1e-9)
    preread = PrereadEstimator("folder", scorer=lambda step: logit.expand(1, 2), log_w_rej=math.log(W_REJ))
    assert [float(value) for value in preread.drawn_probs(STEP)] == pytest.approx([share, share], abs=1e-6)
    acceptance = HeadEstimator("folder", corrected=True, scorer=lambda step: logit.expand(1), log_w_rej=math.log(W_REJ))
    assert float(acceptance.read_prob(STEP)) == pytest.approx(share, abs=1e-6)


def test_an_acceptance_head_is_corrected_only_when_asked():
    raw = HeadEstimator("folder", scorer=logits, log_w_rej=math.log(W_REJ))
    assert float(raw.read_prob(STEP)) == pytest.approx(prob(0.5, 1.0))
    corrected = HeadEstimator("folder", corrected=True, scorer=logits, log_w_rej=math.log(W_REJ))
    assert float(corrected.read_prob(STEP)) == pytest.approx(prob(0.5, W_REJ))


def test_a_preread_head_scores_the_drawn_token_and_the_next_one():
    probs = PrereadEstimator("folder", scorer=two_logits, log_w_rej=math.log(W_REJ)).drawn_probs(STEP)
    assert [float(value) for value in probs] == pytest.approx([prob(0.5, W_REJ), prob(-1.0, W_REJ)])


def test_without_a_preread_head_the_acceptance_head_scores_the_token_before():
    instead = HeadEstimator("folder", corrected=True, scorer=logits)
    estimator = PrereadEstimator("folder", instead=instead)
    accepted, following = estimator.drawn_probs(STEP)
    assert float(accepted) == pytest.approx(prob(0.5, 1.0))
    assert following.tolist() == [1.0]
    first = DraftStep(1, STEP.logits, STEP.probs, STEP.hidden, STEP.tokens)
    assert [value.tolist() for value in estimator.drawn_probs(first)] == [[1.0], [1.0]]  # nothing was drafted before it


def test_a_preread_heads_correction_is_its_estimators():
    head = PrereadHead(3, 4, width=2, depth=0, log_w_rej=math.log(W_REJ))
    corrected = torch.sigmoid(head.corrected(torch.tensor([0.5, -1.0])))
    assert corrected.tolist() == pytest.approx([prob(0.5, W_REJ), prob(-1.0, W_REJ)])


def test_a_head_reads_states_of_any_number_format():
    head = AcceptanceHead(3, depth=1)
    for kind in (torch.float64, torch.bfloat16):
        hidden = STEP.hidden.to(kind)
        step = DraftStep(2, STEP.logits, STEP.probs, hidden, STEP.tokens)
        assert torch.equal(SurvivalScorer(head)(step), head(hidden.float()))


def test_what_is_certain_is_said_where_the_step_is():
    estimator = PrereadEstimator("folder", instead=HeadEstimator("folder", corrected=True, scorer=logits))
    first = DraftStep(1, STEP.logits, STEP.probs, STEP.hidden, STEP.tokens)
    with torch.device("meta"):
        probs = estimator.drawn_probs(first)
    assert [value.tolist() for value in probs] == [[1.0], [1.0]]


def test_confidence_is_the_drafts_own_probability_of_the_drawn_token():
    unwarped = math.exp(0.0) / (math.exp(1.0) + math.exp(0.0))
    assert float(ConfidenceEstimator().bind(None).drawn_prob(STEP)) == pytest.approx(unwarped)
    assert [float(value) for value in ConfidenceEstimator().drawn_probs(STEP)] == pytest.approx([unwarped, unwarped])


def test_a_pair_without_heads_is_told_which_methods_need_none():
    with pytest.raises(InputError, match=r"expected head=FOLDER, got none; without one: rate"):
        HeadEstimator().bind(SimpleNamespace(head=None))


def test_a_bound_estimator_reads_the_folder_that_was_named_or_else_the_pairs(exact_pair):
    bound = HeadEstimator(corrected=True).bind(exact_pair)
    assert bound.head == exact_pair.head
    assert bound.corrected
    head, _ = AcceptanceHead.load(exact_pair.head)
    assert bound.log_w_rej == head.log_w_rej
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    step = DraftStep(1, torch.zeros(4, 2), torch.zeros(4, 2), hidden, torch.zeros(4, dtype=torch.long))
    assert torch.allclose(
        bound.read_prob(step).double(), torch.sigmoid(head.corrected(head(hidden))).double(), atol=1e-6
    )

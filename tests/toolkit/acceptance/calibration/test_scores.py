"""Scores of soft labels: against scikit-learn on the acceptance draw's two outcomes, against torchmetrics on hard labels."""

import math

import pytest
import torch
from matplotlib.axes import Axes
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score
from torch.nn.functional import logsigmoid
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

from toolkit.acceptance.calibration.scores import CalibrationScores, platt_scaled
from toolkit.training.export import draw_reliability

P = 1009


@pytest.fixture
def logits():
    return 2 * torch.randn(P, generator=torch.Generator().manual_seed(0))


def soft_labels(logits):
    noise = torch.randn(P, generator=torch.Generator().manual_seed(1))
    labels = torch.sigmoid(0.7 * logits + noise)
    labels[:50], labels[50:200] = 0.0, 1.0
    return labels


def scores_of(logits, labels, batches=1):
    scores = CalibrationScores()
    for part in zip(logits.chunk(batches), labels.chunk(batches), strict=True):
        scores.update(*part)
    return {name: float(value) for name, value in scores.compute().items()}


def test_soft_labels_are_weighted_outcomes(logits):
    labels = soft_labels(logits)
    scores = scores_of(logits, labels)
    outcomes = [1] * P + [0] * P
    probs = torch.sigmoid(logits.double()).repeat(2).numpy()
    weights = torch.cat([labels, 1 - labels]).double().numpy()
    assert scores["log_loss"] == pytest.approx(log_loss(outcomes, probs, sample_weight=weights), rel=1e-6)
    assert scores["brier"] == pytest.approx(brier_score_loss(outcomes, probs, sample_weight=weights), rel=1e-6)
    assert scores["auroc"] == pytest.approx(roc_auc_score(outcomes, probs, sample_weight=weights), abs=1e-4)


def test_hard_labels_give_the_usual_scores(logits):
    labels = (torch.sigmoid(logits) > torch.rand(P, generator=torch.Generator().manual_seed(2))).float()
    scores = scores_of(logits, labels)
    probs = torch.sigmoid(logits)
    assert scores["ece"] == pytest.approx(float(binary_calibration_error(probs, labels.long(), n_bins=15)), abs=1e-6)
    assert scores["auroc"] == pytest.approx(float(binary_auroc(probs, labels.long())), abs=1e-4)
    assert scores["binary_kl"] == pytest.approx(scores["log_loss"])  # no entropy in an outcome


def test_a_perfect_predictor_has_no_divergence_and_no_calibration_error(logits):
    scores = scores_of(logits, torch.sigmoid(logits))
    assert scores["binary_kl"] == pytest.approx(0, abs=1e-7)
    assert scores["ece"] == pytest.approx(0, abs=1e-7)
    assert scores["log_loss"] > 0.1 and scores["brier"] > 0.05


def test_batches_and_processes_add_up(logits):
    labels = soft_labels(logits)
    whole, pieces = scores_of(logits, labels), scores_of(logits, labels, batches=7)
    assert pieces == pytest.approx(whole, rel=1e-12)
    left, right = CalibrationScores(), CalibrationScores()
    left.update(logits[:100], labels[:100])
    right.update(logits[100:], labels[100:])
    for name in left._defaults:  # what torchmetrics' sum reduction does
        setattr(left, name, getattr(left, name) + getattr(right, name))
    assert {name: float(value) for name, value in left.compute().items()} == pytest.approx(whole, rel=1e-12)


def test_the_reliability_table_accounts_for_every_position(logits):
    labels = soft_labels(logits)
    scores = CalibrationScores()
    scores.update(logits, labels)
    rows = scores.reliability()
    assert sum(row["count"] for row in rows) == P
    assert all(row["from"] <= row["mean_prob"] <= row["to"] for row in rows)
    mean = sum(row["count"] * row["mean_label"] for row in rows) / P
    assert mean == pytest.approx(float(labels.mean()), rel=1e-5)


def test_platts_map_of_binned_logits_is_that_of_the_logits(logits):
    """Against scikit-learn on the positions themselves: scale, shift and the loss that is left."""
    labels = soft_labels(logits)
    scores = CalibrationScores()
    scores.update(logits, labels)
    scale, shift, loss = platt_scaled(scores.accepted, scores.rejected)
    outcomes, weights = [1] * P + [0] * P, torch.cat([labels, 1 - labels]).double().numpy()
    twice = logits.repeat(2).double().numpy()[:, None]  # each position is accepted and rejected, by its label
    model = LogisticRegression(C=math.inf, tol=1e-8, max_iter=1000).fit(twice, outcomes, sample_weight=weights)
    assert (scale, shift) == pytest.approx((model.coef_.item(), model.intercept_.item()), abs=1e-3)
    left = log_loss(outcomes, model.predict_proba(twice)[:, 1], sample_weight=weights)
    assert loss == pytest.approx(left, abs=1e-5) == scores_of(logits, labels)["log_loss_calibrated"]


@pytest.mark.parametrize(
    ("at", "probs"),
    [
        ([-1.0, -2.0, 1.0, 3.0], [0.0, 0.0, 1.0, 1.0]),  # no sample on the wrong side: a scale that is large and finite
        ([7.5], [1.0]),
        ([-11.5, -8.0], [0.0, 0.0]),
        ([-7.9, 4.0, 7.3, -1.7, 0.5], [0.6, 0.8, 1.0, 0.1, 0.3]),  # full steps lead ever further away
        ([-1.77, 1.87, 5.2, 1.72, -2.99], [0.3, 0.0, 0.6, 0.2, 0.1]),
    ],
)
def test_platts_map_is_where_the_loss_would_gain_what_the_pull_takes(at, probs):
    scores = CalibrationScores()
    scores.update(torch.tensor(at), torch.tensor(probs))
    scale, shift, loss = platt_scaled(scores.accepted, scores.rejected)
    width = 40 / len(scores.accepted)
    middle = (torch.arange(len(scores.accepted), dtype=torch.float64) + 0.5) * width - 20
    logits = scale * middle + shift
    falls = scores.accepted * torch.sigmoid(-logits) - scores.rejected * torch.sigmoid(logits)
    pull = 1e-6 * len(at)
    assert float((falls * middle).sum()) == pytest.approx(pull * scale, rel=1e-6, abs=1e-12)
    assert float(falls.sum()) == pytest.approx(pull * shift, rel=1e-6, abs=1e-12)
    own = -(scores.accepted * logsigmoid(logits) + scores.rejected * logsigmoid(-logits)).sum() / len(at)
    assert loss == pytest.approx(float(own), rel=1e-9)


@pytest.mark.parametrize("far", [3.0, 10.0, 19.0])
def test_platts_map_is_found_from_far_away(far):
    """Two scores with probabilities of .3 and .6 have one map; a full step of Newton's leads far beyond it."""
    scores = CalibrationScores()
    scores.update(torch.tensor([-far, far]), torch.tensor([0.3, 0.6]))
    scale, shift, _ = platt_scaled(scores.accepted, scores.rejected)
    low, high = math.log(0.3 / 0.7), math.log(0.6 / 0.4)
    assert (scale, shift) == pytest.approx(((high - low) / (2 * far), (high + low) / 2), rel=2e-3)


def test_bins_without_positions_are_no_lines_of_the_reliability_table():
    scores = CalibrationScores(num_bins=4)
    scores.update(torch.tensor([-3.0, -2.0, 3.0]), torch.tensor([0.0, 0.5, 1.0]))
    low = float(torch.sigmoid(torch.tensor([-3.0, -2.0])).mean())
    first, last = scores.reliability()
    assert first == pytest.approx({"from": 0, "to": 0.25, "count": 2, "mean_prob": low, "mean_label": 0.25})
    assert (last["from"], last["to"], last["count"], last["mean_label"]) == (0.75, 1.0, 1, 1.0)


def test_extreme_scores_are_counted():
    scores = scores_of(torch.tensor([-1e4, 1e4, 0.0]), torch.tensor([0.0, 1.0, 0.5]))
    assert scores["auroc"] == pytest.approx((1 + 0.5 + 0.5 + 0.125) / 2.25)  # ties count half
    assert scores["brier"] == pytest.approx(0.25 / 3)
    binned = CalibrationScores(num_roc_bins=4)
    binned.update(torch.tensor([-1e4, -19.0, -1.0, 1e4]), torch.tensor([0.25, 0.5, 0.5, 1.0]))
    assert binned.accepted.tolist() == [0.75, 0.5, 0, 1] and binned.rejected.tolist() == [1.25, 0.5, 0, 0]


def test_bins_without_positions_are_drawn_empty(tmp_path, monkeypatch):
    drawn, logits = [], torch.tensor([-9.0, -9.0, -9.0, 0.0, 9.0])
    monkeypatch.setattr(Axes, "stairs", lambda self, values, edges, **_: drawn.append((values, edges)))
    scores = CalibrationScores()
    scores.update(logits, torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0]))
    draw_reliability([{"scores": "raw", **row} for row in scores.reliability()], tmp_path / "diagram.png")
    ((values, edges),) = drawn
    for middle in (torch.arange(15) + 0.5) / 15:
        (count,) = [n for n, low, high in zip(values, edges[:-1], edges[1:], strict=True) if low < middle < high]
        assert count == ((torch.sigmoid(logits) - middle).abs() < 0.5 / 15).sum()

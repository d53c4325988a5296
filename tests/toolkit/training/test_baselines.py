"""Simpler predictors: the probe is logistic regression, calibrated losses are those of a fitted scale and shift."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from toolkit.acceptance.calibration.scores import CalibrationScores
from toolkit.training.baselines import RIDGE, comparison, complaint, fit_probe, references
from toolkit.training.examples import Positions


@pytest.fixture
def positions():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(600, 5, generator=generator) * torch.tensor([1.0, 10.0, 0.1, 1.0, 0.0]) + 3
    labels = torch.sigmoid(hidden[:, 0] - hidden[:, 1] / 10 + torch.randn(600, generator=generator))
    return Positions(hidden, labels, labels.clamp(0.2, 0.7))


def in_batches(positions, size=70):
    return [Positions(*parts) for parts in zip(*(values.split(size) for values in positions), strict=True)]


def test_the_probe_is_logistic_regression_with_soft_labels(positions):
    probe = fit_probe(in_batches(positions))
    hidden = positions.hidden.numpy()
    deviation = hidden.std(0)
    scaled = (hidden - hidden.mean(0)) / np.where(deviation > 1e-6, deviation, 1)
    weights = torch.cat([positions.labels, 1 - positions.labels]).numpy()
    reference = LogisticRegression(C=1 / (RIDGE * len(hidden)), tol=1e-10, max_iter=1000)
    reference.fit(np.concatenate([scaled, scaled]), [1] * 600 + [0] * 600, sample_weight=weights)
    expected = scaled @ reference.coef_[0] + reference.intercept_[0]
    assert probe(positions.hidden).squeeze(-1).numpy() == pytest.approx(expected, abs=2e-3)


def test_calibrated_losses_do_not_depend_on_scale_and_shift(positions):
    logits = positions.hidden[:, 0] - 3
    losses = []
    for scale, shift in ((1.0, 0.0), (0.3, 2.0)):
        scores = CalibrationScores()
        scores.update(scale * logits + shift, positions.labels)
        losses.append(float(scores.compute()["log_loss_calibrated"]))
        assert losses[-1] <= float(scores.compute()["log_loss"]) + 1e-6
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    both = np.concatenate([logits.numpy()] * 2)[:, None]
    weights = torch.cat([positions.labels, 1 - positions.labels]).double().numpy()
    outcomes = np.array([1] * 600 + [0] * 600)
    fitted = LogisticRegression(C=1e9, tol=1e-10).fit(both, outcomes, sample_weight=weights).predict_proba(both)
    expected = -(weights * np.log(fitted[np.arange(1200), outcomes])).sum() / 600
    assert losses[0] == pytest.approx(expected, abs=1e-4)


def test_each_output_has_a_probe_and_the_first_a_confidence(positions):
    labels = torch.stack([positions.labels, positions.hidden[:, 3].sigmoid()], 1)
    labels[::3, 1] = torch.nan
    batches = in_batches(positions._replace(labels=labels))
    scores = references(batches, batches, ("_accepted", "_following"))
    assert set(scores) == {
        f"{who}/{score}{output}"
        for who, output in (("probe", "_accepted"), ("probe", "_following"), ("confidence", "_accepted"))
        for score in ("auroc", "log_loss_calibrated")
    }
    assert scores["probe/log_loss_calibrated_following"] < 0.25  # the label is a function of one input
    own = {"val/auroc_accepted": 0.9, "val/log_loss_calibrated_accepted": 0.1}
    assert [who for who, *_ in comparison({**scores, **own}, ("_accepted",))] == [
        "head (accepted)", "linear probe (accepted)", "draft confidence (accepted)",
    ]  # fmt: skip


def test_a_head_that_is_no_better_is_complained_of():
    others = {
        "probe/auroc": 0.7,
        "probe/log_loss_calibrated": 0.5,
        "confidence/auroc": 0.6,
        "confidence/log_loss_calibrated": 0.6,
    }
    assert complaint({**others, "val/auroc": 0.8, "val/log_loss_calibrated": 0.4}, ("",)) is None
    said = complaint({**others, "val/auroc": 0.65, "val/log_loss_calibrated": 0.55}, ("",))
    assert said is not None and "linear probe: calibrated log loss 0.5500 against 0.5000" in said
    assert complaint({}, ()) is None

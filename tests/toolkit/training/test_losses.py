"""The weighted loss, its optimum, and the schedule beside it."""

import math

import pytest
import torch

from toolkit.training import WeightedBCE
from toolkit.training.schedule import cosine, cosine_factor


def test_the_loss_is_the_formula():
    loss = WeightedBCE(w_acc=2.0, w_rej=6.0)
    logits, labels = torch.tensor([0.3, -2.0, 4.0]), torch.tensor([1.0, 0.25, 0.0])
    total = weight = 0.0
    for z, p in zip(logits.tolist(), labels.tolist(), strict=True):
        predicted = 1 / (1 + math.exp(-z))
        total += -2 * p * math.log(predicted) - 6 * (1 - p) * math.log(1 - predicted)
        weight += 2 * p + 6 * (1 - p)
    assert [float(x) for x in loss(logits, labels)] == pytest.approx([total, weight], rel=1e-5)


def test_extreme_logits_stay_finite():
    total, weight = WeightedBCE()(torch.tensor([-1e4, 1e4]), torch.tensor([1.0, 0.0]))
    assert float(total) == pytest.approx(2e4) and float(weight) == 2


@pytest.mark.parametrize("w_rej", [1.0, 3.0, 6.0, 12.0])
@pytest.mark.parametrize("label", [0.1, 0.5, 0.9])
def test_the_optimum_is_shifted_by_minus_log_w_rej(w_rej, label):
    loss = WeightedBCE(w_rej=w_rej)
    assert loss.log_w_rej == pytest.approx(math.log(w_rej))
    optimum = math.log(label / (1 - label)) - loss.log_w_rej
    logits = torch.tensor([optimum - 0.1, optimum, optimum + 0.1], dtype=torch.float64, requires_grad=True)
    loss(logits, torch.full_like(logits, label))[0].backward()
    below, at, above = logits.grad.tolist()
    assert below < 0 < above and at == pytest.approx(0, abs=1e-12)


def test_the_cosine_goes_from_the_full_rate_to_nothing():
    assert cosine_factor(0, 100) == 1
    assert cosine_factor(50, 100) == pytest.approx(0.5)
    assert cosine_factor(100, 100) == pytest.approx(0) == cosine_factor(130, 100)
    assert [cosine_factor(step, 100, warmup=3) for step in range(4)] == [0.25, 0.5, 0.75, 1]
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = cosine(optimizer, 10)
    for _ in range(5):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.25)

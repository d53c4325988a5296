"""The weighted loss, its optimum, and the schedule beside it."""

import math

import pytest
import torch

from toolkit.errors import InputError
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


def test_weights_must_be_positive():
    with pytest.raises(InputError, match="loss.w_rej"):
        WeightedBCE(w_rej=0)


def slow_focal(logits, labels, w_acc, w_rej, gamma, weights):
    """Numerator and denominator, position by position."""
    total = norm = 0.0
    for z, y, w in zip(logits, labels, weights, strict=True):
        p = 1 / (1 + math.exp(-z))
        total += -w * w_acc * y * (1 - p) ** gamma * math.log(p) - w * w_rej * (1 - y) * p**gamma * math.log(1 - p)
        norm += w * (w_acc * y + w_rej * (1 - y))
    return total, norm


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_the_focal_loss_and_its_gradient_are_the_formula(gamma):
    loss = WeightedBCE(w_acc=2.0, w_rej=6.0, gamma=gamma)
    values, labels, weights = [0.3, -2.0, 4.0, 1.1], [1.0, 0.25, 0.0, 0.6], [1.0, 0.5, 2.0, 0.0]
    logits = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    known, scale = torch.tensor(labels, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    total, norm = loss(logits, known, scale)
    expected = slow_focal(values, labels, 2.0, 6.0, gamma, weights)
    assert [float(total), float(norm)] == pytest.approx(expected, rel=1e-9)
    total.backward()
    for place, value in enumerate(values):
        up, down = (
            slow_focal([*values[:place], value + d, *values[place + 1 :]], labels, 2.0, 6.0, gamma, weights)[0]
            for d in (1e-6, -1e-6)
        )
        assert float(logits.grad[place]) == pytest.approx((up - down) / 2e-6, abs=1e-6)


def test_gamma_of_0_is_cross_entropy_and_more_attends_to_unsure_positions():
    logits, labels = torch.tensor([3.0, 0.0], dtype=torch.float64), torch.tensor([1.0, 1.0], dtype=torch.float64)
    plain, focal = (WeightedBCE(gamma=gamma)(logits, labels)[0] for gamma in (0.0, 2.0))
    assert torch.equal(plain, torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum"))
    sure = [float(WeightedBCE(gamma=g)(logits[:1], labels[:1])[0]) for g in (0.0, 2.0)]
    assert sure[1] / float(focal) < 0.1 * sure[0] / float(plain)
    extreme = torch.tensor([-1e4, 1e4], requires_grad=True)
    total, _ = WeightedBCE(gamma=0.5)(extreme, torch.tensor([1.0, 1.0]))
    total.backward()
    assert float(total) == pytest.approx(1e4) and bool(extreme.grad.isfinite().all())


def test_position_weights_are_those_of_the_outputs():
    labels = torch.rand(3, 2)
    weighted = WeightedBCE(position_weights=[1.0, 0.25])
    assert torch.equal(weighted.weights_of(labels), torch.tensor([[1.0, 0.25]] * 3))
    assert torch.equal(WeightedBCE().weights_of(labels), torch.ones(3, 2))
    with pytest.raises(InputError, match="expected 2, one per token"):
        WeightedBCE(position_weights=[1.0]).weights_of(labels)
    with pytest.raises(InputError, match="position_weights"):
        WeightedBCE(position_weights=[0.0, 0.0])


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

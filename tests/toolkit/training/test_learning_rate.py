"""The trial that finds a learning rate: it changes nothing, prefers what learns, and passes over what diverges."""

import math

import pytest
import torch
from torch import nn

from toolkit.acceptance import AcceptanceHead, PrereadHead
from toolkit.training.schedule import FURTHER, best_rate, rates_of_width


def test_rates_follow_the_width():
    assert rates_of_width(AcceptanceHead(4096, depth=3))[1] == pytest.approx(5e-5, rel=0.03)  # the paper's
    assert rates_of_width(AcceptanceHead(96, depth=0))[1] == pytest.approx(0.2 / 96)
    assert rates_of_width(PrereadHead(16, 16, width=256))[1] == pytest.approx(0.2 / 256)  # its widest layer
    low, middle, high = rates_of_width(AcceptanceHead(64))
    assert (low * 3, middle * 3) == pytest.approx((middle, high))


def test_the_rate_that_gets_furthest_is_chosen():
    """A line through few points, few steps: the largest rate gets furthest. The head itself stays as it was."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    target = inputs @ torch.arange(8.0)
    head = nn.Linear(8, 1)
    before = {name: value.clone() for name, value in head.state_dict().items()}

    def loss(model, batch=None):
        return (model(inputs).squeeze(-1) - target).square().mean()

    def score(model):
        with torch.no_grad():
            return float(loss(model))

    rate, scores = best_rate(head, torch.optim.Adam, [None, None], 5, loss, score)
    assert rate == max(scores) and len(scores) == 3 + FURTHER  # it went on while the largest was the best
    assert rate == pytest.approx(0.2 / 8 * 3 ** (1 + FURTHER))
    assert scores[rate] < score(head)
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())

    def broken(model):
        moved = (model.weight - before["weight"]).abs().max()
        return math.nan if moved > 0.05 else score(model)

    rate, scores = best_rate(head, torch.optim.Adam, [None], 5, loss, broken)
    assert scores[max(scores)] == math.inf and rate < max(scores)


def test_the_search_goes_down_too():
    """A head that is right already: the smallest rate spoils it least."""
    torch.manual_seed(0)
    inputs, head = torch.randn(64, 8), nn.Linear(8, 1)
    target = head(inputs).detach() + 0.1 * torch.randn(64, 1)

    def loss(model, batch=None):
        return (model(inputs) - target).abs().mean()

    def score(model):
        with torch.no_grad():
            return float(loss(model))

    rate, scores = best_rate(head, torch.optim.SGD, [None], 20, lambda model, batch: 50 * loss(model), score)
    assert list(scores) == sorted(scores) and len(scores) > 3 and rate < 0.2 / 8 / 3

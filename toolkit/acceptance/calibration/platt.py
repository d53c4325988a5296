"""Platt's map of logits: the scale and the shift of the least log loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus


def platt(
    logits: Tensor, accepted: Tensor, rejected: Tensor, pull: float | Tensor, towards: tuple[float, float]
) -> tuple[float, float]:
    """Scale and shift of logits [n] float64 that have the least log loss (Platt's map), by Newton's method.

    accepted, rejected [n]: weight of samples at each logit
    pull, towards  of a quadratic penalty on the distance of scale and shift from two numbers
    """
    features, weight = torch.stack([logits, torch.ones_like(logits)], 1), accepted + rejected
    parameters, center = features.new_tensor([1.0, 0.0]), features.new_tensor(towards)

    def objective(at: Tensor) -> Tensor:
        mapped, away = features @ at, at - center
        return (accepted * softplus(-mapped) + rejected * softplus(mapped)).sum() + pull * (away @ away) / 2

    for _ in range(100):
        probs = torch.sigmoid(features @ parameters)
        gradient = features.T @ (weight * probs - accepted) + pull * (parameters - center)
        curvature = (features.T * (weight * probs * (1 - probs))) @ features + pull * torch.eye(2, dtype=torch.float64)
        step, before = torch.linalg.solve(curvature, gradient), objective(parameters)
        while objective(parameters - step) > before and step.abs().max() > 1e-12:
            step = step / 2
        parameters = parameters - step
        if step.abs().max() < 1e-9:
            break
    scale, shift = parameters.tolist()
    return scale, shift

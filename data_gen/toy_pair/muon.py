"""Muon: momentum whose update is a nearly orthogonal matrix, for the layers' matrices of the toy pair.

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks". The three polynomials are those
of Amsel et al., "The Polar Express" (arXiv:2505.16932). `torch.optim.Muon` always orthogonalises in bfloat16, which is
many times slower than float32 on processors without bfloat16 arithmetic; otherwise it would be used here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

POLYNOMIALS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
)


class Muon(torch.optim.Optimizer):
    """Matrices get Nesterov momentum, orthogonalised: an update's size depends on `lr` alone. Groups with `adam=True`
    (embeddings, norms) get Adam's update. One optimizer for both, because Lightning counts the steps of each.

    params        groups of matrices [out, in], or of anything if `adam`
    betas         Adam's; `momentum` is Muon's
    weight_decay  times the learning rate is taken off the weights at each step
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 0.02,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.0,
    ):
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "weight_decay": weight_decay, "adam": False}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            update = self._adam if group["adam"] else self._muon
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.sub_(group["lr"] * update(weight.grad, self.state[weight], group))
        return loss

    @staticmethod
    def _muon(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        state["momentum"].lerp_(gradient, 1 - group["momentum"])
        rows, columns = gradient.shape
        return max(1.0, rows / columns) ** 0.5 * orthogonal(gradient.lerp(state["momentum"], group["momentum"]))

    @staticmethod
    def _adam(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not state:
            state.update(step=0, mean=torch.zeros_like(gradient), square=torch.zeros_like(gradient))
        state["step"] += 1
        first, second = group["betas"]
        mean = state["mean"].lerp_(gradient, 1 - first) / (1 - first ** state["step"])
        square = state["square"].lerp_(gradient.square(), 1 - second) / (1 - second ** state["step"])
        return mean / (square.sqrt() + 1e-8)


def orthogonal(matrix: Tensor) -> Tensor:
    """U V^T of the singular value decomposition U S V^T, roughly: values within a factor of 100 end between 0.1 and 2."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / (1.02 * x.norm() + 1e-7)
    for linear, cubic, quintic in POLYNOMIALS:
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, beta=cubic, alpha=quintic), x, beta=linear)
    return x.mT if tall else x

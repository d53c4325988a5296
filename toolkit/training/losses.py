"""Weighted binary cross entropy with soft labels, and the focal loss.

Paper: SpecDec++ (arXiv:2405.19715), section 3.1. theirs -> ours: P_i -> labels, P^_i -> sigmoid(logits),
w_acc, w_rej -> the same.

    loss = sum_i [ -w_acc P_i log P^_i - w_rej (1 - P_i) log(1 - P^_i) ]  /  sum_i [ w_acc P_i + w_rej (1 - P_i) ]

The normalisation is the published code's; the paper writes only the numerator. It does not move the optimum, which is at

    logit P^ = logit P - log(w_rej / w_acc)

So adding log(w_rej / w_acc) to a trained head's logit gives back a probability (`AcceptanceHead.corrected`).

With gamma > 0 the loss is the focal loss (Lin et al., arXiv:1708.02002, equation 5; theirs -> ours: p_t -> P^_i or
1 - P^_i, alpha_t -> w_acc or w_rej). Its two terms are weighted by soft labels:

    numerator = sum_i [ -w_acc P_i (1 - P^_i)^gamma log P^_i - w_rej (1 - P_i) P^_i^gamma log(1 - P^_i) ]

For soft labels its optimum is not a probability, so probabilities come from `analysis.heads`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import softplus

from toolkit.config.notes import Above, AtLeast
from toolkit.config.values import check_ranges
from toolkit.errors import InputError


@dataclass(frozen=True)
class WeightedBCE:
    """Cross entropy in nats.

    w_acc, w_rej  weight of an acceptance, of a rejection
    gamma         of the focal loss; 0: cross entropy
    position_weights  of the tokens that a head speaks of, nearest first: of a pre-read head the drawn one, and the one
                  after it; none: all alike
    """

    w_acc: Annotated[float, Above(0)] = 1.0
    w_rej: Annotated[float, Above(0)] = 1.0
    gamma: Annotated[float, AtLeast(0)] = 0.0
    position_weights: Sequence[Annotated[float, AtLeast(0)]] = ()

    def __post_init__(self) -> None:
        check_ranges(self, "loss.")
        if len(self.position_weights) and not sum(self.position_weights) > 0:
            raise InputError(f"loss.position_weights: expected one above 0, got {list(self.position_weights)}")

    @property
    def log_w_rej(self) -> float:
        """The shift of the optimal logit, downwards, by the weights: log(w_rej / w_acc)."""
        return math.log(self.w_rej / self.w_acc)

    def weights_of(self, labels: Tensor) -> Tensor:
        """The position weights of labels [P, O], as [P, O]. Raises InputError unless there are O of them, or none."""
        if not len(self.position_weights):
            return torch.ones_like(labels)
        if len(self.position_weights) != labels.shape[1]:
            raise InputError(
                f"loss.position_weights: expected {labels.shape[1]}, one per token that the head speaks of, got "
                f"{len(self.position_weights)}"
            )
        return torch.tensor(list(self.position_weights), dtype=labels.dtype, device=labels.device).expand_as(labels)

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of the loss, as scalars, so that they can be added up over batches and processes.

        logits [P], labels [P] in [0, 1]: the probability of acceptance of P positions; weights [P] of these, None: 1.
        """
        scale = 1.0 if weights is None else weights
        accepted, rejected = self.w_acc * labels * scale, self.w_rej * (1 - labels) * scale
        # -log sigmoid(z) = softplus(-z) and -log(1 - sigmoid(z)) = softplus(z), without overflow
        sure, unsure = softplus(-logits), softplus(logits)
        if not self.gamma:
            return (accepted * sure + rejected * unsure).sum(), (accepted + rejected).sum()
        total = accepted * (-self.gamma * unsure).exp() * sure + rejected * (-self.gamma * sure).exp() * unsure
        return total.sum(), (accepted + rejected).sum()

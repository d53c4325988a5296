"""Weighted binary cross entropy with soft labels.

Paper: SpecDec++ (arXiv:2405.19715), section 3.1. theirs -> ours: P_i -> labels, P^_i -> sigmoid(logits),
w_acc, w_rej -> the same.

    loss = sum_i [ -w_acc P_i log P^_i - w_rej (1 - P_i) log(1 - P^_i) ]  /  sum_i [ w_acc P_i + w_rej (1 - P_i) ]

The normalisation is the published code's; the paper writes only the numerator. It does not move the optimum, which is at

    logit P^ = logit P - log(w_rej / w_acc)

So adding log(w_rej / w_acc) to a trained head's logit gives back a probability (`AcceptanceHead.corrected`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor
from torch.nn.functional import softplus

from toolkit.config.notes import Above
from toolkit.config.values import check_ranges


@dataclass(frozen=True)
class WeightedBCE:
    """Cross entropy in nats.

    w_acc  weight of an acceptance
    w_rej  weight of a rejection
    """

    w_acc: Annotated[float, Above(0)] = 1.0
    w_rej: Annotated[float, Above(0)] = 1.0

    def __post_init__(self) -> None:
        check_ranges(self, "loss.")

    @property
    def log_w_rej(self) -> float:
        """The shift of the optimal logit, downwards, by the weights: log(w_rej / w_acc)."""
        return math.log(self.w_rej / self.w_acc)

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of the loss, as scalars, so that they can be added up over batches and processes.

        logits [P], labels [P] in [0, 1]: the probability of acceptance of P positions.
        """
        accepted, rejected = self.w_acc * labels, self.w_rej * (1 - labels)
        # -log sigmoid(z) = softplus(-z) and -log(1 - sigmoid(z)) = softplus(z), without overflow
        sure, unsure = softplus(-logits), softplus(logits)
        return (accepted * sure + rejected * unsure).sum(), (accepted + rejected).sum()

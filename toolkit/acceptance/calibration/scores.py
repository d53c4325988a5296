"""Scores of predicted acceptance probabilities, where the truth is a probability and not an outcome.

The label of a position is P = min(1, p/q), the probability that an acceptance draw A ~ Bernoulli(P) says "accepted". Every
number here is the expectation over that acceptance draw: a position counts as P accepted and 1 - P rejected samples.
For labels 0 and 1 that is the usual definition.

    log loss   -P log P^ - (1-P) log(1-P^)                  mean over positions, nats
    binary KL  log loss - entropy(P) = KL(P || P^)          0 for a perfect predictor, unlike the log loss
    Brier      P (1-P^)^2 + (1-P) P^2                       = (P - P^)^2 + P (1-P): the second part is the acceptance draw's
    ECE        sum_b n_b/n |mean P^ in b - mean P in b|     over equal-width bins b of P^ ("expected calibration error")
    AUROC      probability that an accepted sample scores above a rejected one, ties counting half
    log loss, calibrated   the least log loss of any scale * logit + shift (Platt's map, fitted to these very
               positions). It measures how well a score separates accepted from rejected, whatever its scale. So heads,
               probes and the draft's confidence can be compared

`CalibrationScores` adds these up over a stream in fixed memory. Batches and processes are added as sums, which are divided
once. Deviation from torchmetrics' BinaryCalibrationError: labels are soft, and nothing is kept per position.

Shapes: P positions, B reliability bins, R score bins of the ROC curve.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from torchmetrics import Metric

from toolkit.acceptance.calibration.platt import platt

RELIABILITY_BINS = 15
ROC_BINS = 8192
ROC_RANGE = 20.0  # logits beyond +-20 tie: probabilities nearer to 0 and 1 than 2e-9
NAMES = ("log_loss", "log_loss_calibrated", "binary_kl", "brier", "ece", "auroc")  # of `CalibrationScores.compute`


def log_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Expected log loss [P] of each position, nats. logits [P], labels [P] in [0, 1]."""
    return labels * softplus(-logits) + (1 - labels) * softplus(logits)


def label_entropies(labels: Tensor) -> Tensor:
    """Entropy [P] of each position's acceptance draw, nats: the part of the log loss that cannot be predicted."""
    return torch.special.entr(labels) + torch.special.entr(1 - labels)


def brier_scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Expected squared error [P] against the acceptance draw."""
    probs = torch.sigmoid(logits)
    return labels * (1 - probs) ** 2 + (1 - labels) * probs**2


def auroc(accepted: Tensor, rejected: Tensor) -> Tensor:
    """AUROC (a scalar) from the weight of accepted and rejected samples [R] in bins of increasing score.

    Samples of one bin are ties. The result is not a number unless there are both accepted and rejected samples.
    """
    rejected_below = rejected.cumsum(0) - rejected
    wins = (accepted * (rejected_below + rejected / 2)).sum()
    return wins / (accepted.sum() * rejected.sum())


def platt_scaled(accepted: Tensor, rejected: Tensor) -> tuple[float, float, float]:
    """Scale and shift of the logit that have the least mean log loss, and that loss (nats).

    accepted, rejected [R]: weight of samples per bin of the logit, from -ROC_RANGE to ROC_RANGE; a bin's samples lie at its
    middle. A pull of one part in a million towards scale 0 keeps the optimum finite where no sample is on the wrong side.
    """
    width = 2 * ROC_RANGE / len(accepted)
    middle = (torch.arange(len(accepted), dtype=torch.float64) + 0.5) * width - ROC_RANGE
    weight = accepted + rejected
    scale, shift = platt(middle, accepted, rejected, 1e-6 * weight.sum(), (0.0, 0.0))
    logits = scale * middle + shift
    loss = (accepted * softplus(-logits) + rejected * softplus(logits)).sum()
    return scale, shift, float(loss / weight.sum())


class CalibrationScores(Metric):
    """All scores of this page over a stream of (logits, labels); sums in float64.

    For probabilities instead of logits pass torch.logit(probs, eps=1e-6).
    """

    full_state_update = False
    log_loss_sum: Tensor
    entropy_sum: Tensor
    brier_sum: Tensor
    counts: Tensor  # [B] positions per bin of P^
    prob_sums: Tensor  # [B] of P^
    label_sums: Tensor  # [B] of P
    accepted: Tensor  # [R] weight of accepted samples per bin of the logit
    rejected: Tensor  # [R]

    def __init__(self, num_bins: int = RELIABILITY_BINS, num_roc_bins: int = ROC_BINS, **kwargs: Any):
        super().__init__(**kwargs)
        for name in ("log_loss_sum", "entropy_sum", "brier_sum"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("counts", "prob_sums", "label_sums"):
            self.add_state(name, torch.zeros(num_bins, dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("accepted", "rejected"):
            self.add_state(name, torch.zeros(num_roc_bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add positions: logits [P], labels [P] in [0, 1]."""
        logits, labels = logits.detach().double(), labels.detach().double()
        self.log_loss_sum += log_losses(logits, labels).sum()
        self.entropy_sum += label_entropies(labels).sum()
        self.brier_sum += brier_scores(logits, labels).sum()
        probs = torch.sigmoid(logits)
        bins = (probs * len(self.counts)).long().clamp(max=len(self.counts) - 1)
        self.counts.index_add_(0, bins, torch.ones_like(probs))
        self.prob_sums.index_add_(0, bins, probs)
        self.label_sums.index_add_(0, bins, labels)
        width = 2 * ROC_RANGE / len(self.accepted)
        scores = ((logits + ROC_RANGE) / width).long().clamp(0, len(self.accepted) - 1)
        self.accepted.index_add_(0, scores, labels)
        self.rejected.index_add_(0, scores, 1 - labels)

    def compute(self) -> dict[str, Tensor]:
        """Every score as a scalar."""
        count = self.counts.sum()
        return {
            "log_loss": self.log_loss_sum / count,
            "log_loss_calibrated": count.new_tensor(platt_scaled(self.accepted.cpu(), self.rejected.cpu())[2]),
            "binary_kl": (self.log_loss_sum - self.entropy_sum) / count,
            "brier": self.brier_sum / count,
            "ece": (self.prob_sums - self.label_sums).abs().sum() / count,
            "auroc": auroc(self.accepted, self.rejected),
        }

    def reliability(self) -> list[dict[str, float]]:
        """One line per bin that holds positions: its edges, its count, mean prediction and mean label."""
        width = 1 / len(self.counts)
        return [
            {
                "from": i * width,
                "to": (i + 1) * width,
                "count": int(self.counts[i]),
                "mean_prob": float(self.prob_sums[i] / self.counts[i]),
                "mean_label": float(self.label_sums[i] / self.counts[i]),
            }
            for i in range(len(self.counts))
            if self.counts[i] > 0
        ]

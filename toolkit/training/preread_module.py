"""Training a pre-read head: the loss and the scores of both its outputs, each where it has a label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from toolkit.acceptance.calibration.scores import CalibrationScores
from toolkit.training.module import HeadTraining
from toolkit.training.states import Positions

OUTPUTS = ("accepted", "following")

MEANS = ("val/log_loss", "val/log_loss_calibrated")  # of the outputs


class PrereadTraining(HeadTraining):
    """As HeadTraining, with a PrereadHead; labels are [P, 2].

    Logs the scores of each output, val/log_loss_accepted, val/log_loss_following, ..., and the means of their log losses.
    """

    suffixes = outputs = tuple(f"_{name}" for name in OUTPUTS)

    def loss_of(self, head: Any, batch: Positions) -> tuple[Tensor, Tensor]:
        known = ~batch.labels.isnan()
        weights = self.loss.weights_of(batch.labels)[known]
        return self.loss(self.logits_of(head, batch)[known], batch.labels[known], weights)

    def add_scores(self, scores: Mapping[str, CalibrationScores], batch: Positions, head: Any = None) -> None:
        head = self.head if head is None else head
        logits = head.corrected(self.logits_of(head, batch))
        for output, suffix in enumerate(self.suffixes):
            known = ~batch.labels[:, output].isnan()
            scores[suffix].update(logits[known, output], batch.labels[known, output])

    def named(self, scores: Mapping[str, CalibrationScores]) -> dict[str, Tensor]:
        found = super().named(scores)
        for name in MEANS:
            found[name] = torch.stack([found[f"{name}{suffix}"] for suffix in self.suffixes]).mean()
        return found

    @classmethod
    def score_names(cls) -> list[str]:
        return [*super().score_names(), *MEANS]

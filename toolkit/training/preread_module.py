"""Training a pre-read head: the loss and the scores of both its outputs, each where it has a label."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from toolkit.acceptance.calibration import CalibrationScores
from toolkit.training.module import HeadTraining
from toolkit.training.states import Positions

OUTPUTS = ("accepted", "following")


class PrereadTraining(HeadTraining):
    """As HeadTraining, with a PrereadHead; labels are [P, 2].

    Logs the scores of each output, val/log_loss_accepted, val/log_loss_following, ..., and val/log_loss, their mean.
    """

    suffixes = tuple(f"_{name}" for name in OUTPUTS)

    def training_step(self, batch: Positions, batch_idx: int) -> dict[str, Tensor]:
        known = ~batch.labels.isnan()
        total, weight = self.loss(self.head(self._read(batch))[known], batch.labels[known])
        return {"loss": total / weight, "total": total.detach(), "weight": weight.detach()}

    def add_scores(self, scores: Mapping[str, CalibrationScores], batch: Positions) -> None:
        logits = self.head.corrected(self.head(self._read(batch)))
        for output, suffix in enumerate(self.suffixes):
            known = ~batch.labels[:, output].isnan()
            scores[suffix].update(logits[known, output], batch.labels[known, output])

    def named(self, scores: Mapping[str, CalibrationScores]) -> dict[str, Tensor]:
        found = super().named(scores)
        return {**found, "val/log_loss": torch.stack([found[f"val/log_loss{s}"] for s in self.suffixes]).mean()}

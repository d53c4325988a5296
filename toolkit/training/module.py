"""Training an acceptance head on the states of a frozen draft."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from toolkit.acceptance.calibration import CalibrationScores
from toolkit.acceptance.head import AcceptanceHead
from toolkit.training.losses import WeightedBCE
from toolkit.training.states import Positions


class HeadTraining(pl.LightningModule):
    """An acceptance head, its loss, its optimizer; validation is reported raw and with the class weight undone.

    head       built for the draft's hidden size
    loss       returns numerator and denominator of a batch; the head learns from their quotient
    optimizer  of the parameters; scheduler: of (optimizer, num_steps), one step per batch; None: constant rate
    about      travels in every checkpoint: the draft's fingerprint, the head's shape, the W&B run

    Logs val/{log_loss, binary_kl, brier, ece, auroc}, each also with the suffix _corrected; for the rest see Curves.
    """

    def __init__(
        self,
        head: AcceptanceHead,
        loss: WeightedBCE,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., Any] | None = None,
        about: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self.head, self.loss = head, loss
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.about = dict(about or {})
        self.raw, self.corrected = CalibrationScores(), CalibrationScores()

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.head.parameters())
        if self.make_scheduler is None:
            return optimizer
        num_steps = int(self.trainer.estimated_stepping_batches)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_scheduler(optimizer, num_steps), "interval": "step"},
        }

    def training_step(self, batch: Positions, batch_idx: int) -> dict[str, Tensor]:
        total, weight = self.loss(self.head(self._read(batch)), batch.labels)
        return {"loss": total / weight, "total": total.detach(), "weight": weight.detach()}

    def on_validation_epoch_start(self) -> None:
        self.raw.reset()
        self.corrected.reset()

    def validation_step(self, batch: Positions, batch_idx: int) -> None:
        logits = self.head(self._read(batch))
        self.raw.update(logits, batch.labels)
        self.corrected.update(self.head.corrected(logits), batch.labels)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(named_scores(self.raw, self.corrected))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["about"] = self.about

    def _read(self, batch: Positions) -> Tensor:
        return batch.hidden.to(self.head.readout.weight.dtype)


def evaluate(head: AcceptanceHead, batches: Iterable[Positions]) -> tuple[CalibrationScores, CalibrationScores]:
    """Raw and corrected scores of a head over batches, in this process alone."""
    raw, corrected = (CalibrationScores(sync_on_compute=False) for _ in range(2))
    with torch.no_grad():
        for batch in batches:
            logits = head(batch.hidden.to(head.readout.weight.device, head.readout.weight.dtype)).cpu()
            raw.update(logits, batch.labels)
            corrected.update(head.corrected(logits), batch.labels)
    return raw, corrected


def named_scores(raw: CalibrationScores, corrected: CalibrationScores) -> dict[str, Tensor]:
    """Both sets of scores under their keys: val/ece, val/ece_corrected, ..."""
    scores = {f"val/{name}": value for name, value in raw.compute().items()}
    return scores | {f"val/{name}_corrected": value for name, value in corrected.compute().items()}

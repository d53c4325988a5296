"""Training an acceptance head on the states of a frozen draft."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
from torch import Tensor

from toolkit.acceptance.calibration import CalibrationScores
from toolkit.training.losses import WeightedBCE
from toolkit.training.states import Positions


class HeadTraining(pl.LightningModule):
    """A head, its loss, its optimizer; validation is reported raw and with the class weight undone.

    head       built for the draft's hidden size
    loss       returns numerator and denominator of a batch; the head learns from their quotient
    optimizer  of the parameters; scheduler: of (optimizer, num_steps), one step per batch; None: constant rate
    about      travels in every checkpoint: the draft's fingerprint, the head's shape, the W&B run

    Logs val/{log_loss, binary_kl, brier, ece, auroc}, each also with the suffix _corrected; for the rest see Curves.
    """

    suffixes: ClassVar[tuple[str, ...]] = ("", "_corrected")  # of the sets of scores that are kept apart

    def __init__(
        self,
        head: Any,
        loss: WeightedBCE,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., Any] | None = None,
        about: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self.head, self.loss = head, loss
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.about = dict(about or {})
        self.scores = torch.nn.ModuleList(CalibrationScores() for _ in self.suffixes)

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
        for scores in self.scores:
            scores.reset()  # type: ignore[operator]

    def validation_step(self, batch: Positions, batch_idx: int) -> None:
        self.add_scores(self._own_scores(), batch)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.named(self._own_scores()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["about"] = self.about

    def add_scores(self, scores: Mapping[str, CalibrationScores], batch: Positions) -> None:
        """Add a batch to the sets of scores, by suffix."""
        logits = self.head(self._read(batch))
        scores[""].update(logits, batch.labels)
        scores["_corrected"].update(self.head.corrected(logits), batch.labels)

    def named(self, scores: Mapping[str, CalibrationScores]) -> dict[str, Tensor]:
        """All scores under their keys: val/ece, val/ece_corrected, ..."""
        return {f"val/{name}{suffix}": value for suffix, one in scores.items() for name, value in one.compute().items()}

    def evaluate(self, batches: Iterable[Positions]) -> dict[str, CalibrationScores]:
        """The sets of scores over batches, in this process alone; the module must be on the CPU."""
        scores = {suffix: CalibrationScores(sync_on_compute=False) for suffix in self.suffixes}
        with torch.no_grad():
            for batch in batches:
                self.add_scores(scores, batch)
        return scores

    def _own_scores(self) -> dict[str, CalibrationScores]:
        return dict(zip(self.suffixes, self.scores, strict=True))  # type: ignore[arg-type]

    def _read(self, batch: Positions) -> Tensor:
        return batch.hidden.to(next(self.head.parameters()).dtype)

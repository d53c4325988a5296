"""Training ends when the validation score has not got better for a while."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping

from toolkit.config.notes import AtLeast


class EarlyStop(EarlyStopping):
    """Lightning's callback, except that a training that has stopped early does not go on when it is resumed.

    monitor   the validation score
    mode      whether small is good (min), or large (max)
    patience  validations without a better score before training ends
    """

    def __init__(self, monitor: str, mode: Literal["min", "max"] = "min", patience: Annotated[int, AtLeast(1)] = 4):
        super().__init__(monitor=monitor, mode=mode, patience=patience, check_on_train_epoch_end=False)

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if self.wait_count >= self.patience:
            trainer.should_stop = True

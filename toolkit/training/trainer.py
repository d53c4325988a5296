"""Lightning's trainer with the settings that all trainings here share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.plugins.environments import LightningEnvironment

from toolkit.config import instantiate
from toolkit.training.checkpoints import AtomicCheckpointIO
from toolkit.training.console import on_terminal, progress
from toolkit.training.curves import Curves
from toolkit.training.processes import is_distributed


def build_trainer(cfg: Any, folder: Path, loggers: Sequence[Any]) -> pl.Trainer:
    """Lightning's trainer with checkpoints that are whole or absent."""
    callbacks = [instantiate(spec) for spec in (cfg.callbacks or {}).values() if spec is not None]
    alone = [] if is_distributed(cfg.trainer) else [LightningEnvironment()]  # not what a launcher's variables say
    trainer: pl.Trainer = instantiate(cfg.trainer)(
        default_root_dir=str(folder),
        logger=list(loggers) or False,
        callbacks=[*callbacks, Curves(), progress()],
        plugins=[AtomicCheckpointIO(), *alone],
        enable_checkpointing=any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks),
        enable_progress_bar=on_terminal(),
    )
    return trainer

"""Lightning's trainer with the settings that all trainings here share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import LightningEnvironment

from toolkit.config import instantiate
from toolkit.training.checkpoints import AtomicCheckpointIO
from toolkit.training.console import on_terminal, progress
from toolkit.training.curves import Curves
from toolkit.training.processes import is_distributed


def build_trainer(cfg: Any, folder: Path, loggers: Sequence[Any], device: torch.device | None = None) -> pl.Trainer:
    """Lightning's trainer with checkpoints that are whole or absent.

    device  where one process trains if it is a GPU, whatever `trainer.accelerator` says
    """
    callbacks = [instantiate(spec) for spec in (cfg.callbacks or {}).values() if spec is not None]
    alone = [] if is_distributed(cfg.trainer) else [LightningEnvironment()]  # not what a launcher's variables say
    on_gpu = device is not None and device.type == "cuda" and not is_distributed(cfg.trainer)
    trainer: pl.Trainer = instantiate(cfg.trainer)(
        **({"accelerator": "gpu", "devices": [device.index or 0]} if on_gpu and device else {}),
        default_root_dir=str(folder),
        logger=list(loggers) or False,
        callbacks=[*callbacks, Curves(), progress()],
        plugins=[AtomicCheckpointIO(), *alone],
        enable_checkpointing=any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks),
        enable_progress_bar=on_terminal(),
    )
    return trainer

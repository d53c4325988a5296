"""Checkpoints from which training goes on as if it had never stopped, the start of a training, and the early stop.

The run folder's checkpoints/ holds last.ckpt, written every `every_n_steps` steps and at every epoch's end, and best.ckpt. Each
is whole or absent, also if the process is killed while writing, which Lightning's own writer does not ensure.

A training begins with one of these:

    from_pretrained=FOLDER  the weights of a head
    ckpt_path=FILE          the whole state of a checkpoint
    neither                 the run folder's own last checkpoint, or fresh weights where there is none
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning.callbacks import EarlyStopping

from toolkit.acceptance.folder import KINDS, inside
from toolkit.acceptance.saved import SavedHead
from toolkit.config.notes import AtLeast
from toolkit.config.values import check_ranges
from toolkit.errors import InputError
from toolkit.files import journal
from toolkit.files.atomic import write_atomic
from toolkit.files.text import first_line
from toolkit.models.fingerprint import Weights

LAST, BEST = "last.ckpt", "best.ckpt"
LARGE = ("val/alpha", "val/auroc", "val/coverage")  # beginnings of the scores whose largest value is the best one


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints through a neighbour that is flushed to disk and renamed."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        write_atomic(path, lambda temporary: torch.save(checkpoint, temporary))


class Checkpoints(pl.callbacks.Checkpoint):
    """Keeps the last state and the best one.

    monitor        the validation score that says which state is best
    mode           whether the smallest is, or the largest
    every_n_steps  a checkpoint in mid-epoch after every n optimizer steps; None: at the ends of epochs only

    Raises InputError for a score that is not a number: nothing is better than it.
    A process killed between best.ckpt and last.ckpt starts from the older last.ckpt and writes the same best.ckpt once more.
    """

    folder: Path

    def __init__(
        self, monitor: str, mode: Literal["min", "max"] = "min", every_n_steps: Annotated[int, AtLeast(1)] | None = None
    ):
        super().__init__()
        self.monitor, self.mode, self.every_n_steps = monitor, mode, every_n_steps
        check_ranges(self, "callbacks.checkpoints.")
        self.best_score: float | None = None
        self.last_step = 0
        self.validated_step = -1

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.folder = folder_of(trainer.default_root_dir)

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.last_step = trainer.global_step  # of a resumed training, whose next step may take several batches

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        step, due = trainer.global_step, self.every_n_steps
        if step == self.last_step:  # gradients are still being accumulated
            return
        self.last_step = step
        if due and step % due == 0 and not trainer.is_last_batch and not trainer.fast_dev_run:
            self._save(trainer, LAST)

    def on_validation_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Within an epoch the state is kept at once: the epoch's end has another one."""
        self.validated_step = trainer.global_step
        if trainer.validating and trainer.state.fn == "fit" and not trainer.is_last_batch:
            self._keep_best(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if trainer.fast_dev_run:
            return
        if self.validated_step == trainer.global_step:
            self._keep_best(trainer)
        self._save(trainer, LAST)

    def _keep_best(self, trainer: Any) -> None:
        """Save the state that has just been validated if it is the best one."""
        score, best = trainer.callback_metrics.get(self.monitor), self.best_score
        if score is not None and not math.isfinite(score):
            raise InputError(
                f"{self.monitor} is {float(score)} after step {trainer.global_step}: expected a number; train with a lower "
                "learning rate, or with weights and states that float32 holds"
            )
        if score is not None and (best is None or (score < best if self.mode == "min" else score > best)):
            self.best_score = float(score)
            self._save(trainer, BEST)

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A run that goes on from another folder's checkpoint has no best state of its own yet.
        self.best_score = state_dict["best_score"] if (self.folder / BEST).exists() else None

    def _save(self, trainer: pl.Trainer, name: str) -> None:
        for logger in trainer.loggers:  # what was logged up to here belongs to the state that is saved
            logger.save()
        trainer.save_checkpoint(self.folder / name)


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


def folder_of(run_folder: Path | str) -> Path:
    return Path(run_folder) / "checkpoints"


def read_checkpoint(path: Path | str) -> dict[str, Any]:
    """A checkpoint's content on the CPU. Raises InputError if it is missing, damaged, or not one of toolkit.train."""
    hint = "delete it to go on without it, or give another one as ckpt_path"
    journal.check(path, hint)
    try:
        if Path(path).stat().st_size == 0:
            raise InputError(f"{path} is empty: expected a checkpoint; {hint}")
        with zipfile.ZipFile(path) as archive:
            if (broken := archive.testzip()) is not None:  # torch.load does not look at the records' CRC-32
                raise InputError(f"{path} is damaged: the checksum of {broken} does not match; {hint}")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"ckpt_path: expected a checkpoint at {path}, found none") from None
    except InputError:
        raise
    except Exception as error:  # zip, pickle and torch each raise their own errors for other files
        raise InputError(f"{path} is not a checkpoint: {first_line(error)}; {hint}") from None
    if not isinstance(checkpoint, dict) or "about" not in checkpoint or "state_dict" not in checkpoint:
        raise InputError(f"{path} was not written by toolkit.train")
    return checkpoint


# -- the start of a training -------------------------------------------------------------------------------------------


def check_choice(ckpt_path: str | None, from_pretrained: str | None) -> None:
    """Raises InputError if a training is to begin at two points, or at a checkpoint that is not there."""
    if ckpt_path is not None and from_pretrained is not None:
        raise InputError("ckpt_path resumes a training, from_pretrained starts one from a trained head: set only one")
    if ckpt_path not in (None, "last") and not Path(str(ckpt_path)).exists():
        raise InputError(f"ckpt_path: expected a checkpoint at {ckpt_path}, found none")


def mode_of(score: str) -> Literal["min", "max"] | None:
    """Whether the best value of a validation score is its smallest or its largest one; None for any other score."""
    return None if not score.startswith("val/") else "max" if score.startswith(LARGE) else "min"


def check_modes(callbacks: Mapping[str, Any]) -> None:
    """Raises InputError if a callback would take the worst validation score for the best one."""
    for name, spec in callbacks.items():
        monitor, mode = str((spec or {}).get("monitor", "")), (spec or {}).get("mode", "min")
        expected = mode_of(monitor)
        if expected not in (None, mode):
            raise InputError(f"callbacks.{name}.mode: expected {expected} for {monitor}, got {mode}")


def pretrained_files(from_pretrained: str | None) -> list[Path]:
    """The files that a warm start depends on. Raises InputError if they hold no head."""
    if from_pretrained is None:
        return []
    folder = inside(from_pretrained)
    kinds = [kind for kind in KINDS.values() if kind.is_in(folder)]
    for kind in kinds or KINDS.values():  # of none, the first one says what is missing
        kind.load(folder)
    return [folder / name for kind in kinds for name in (kind.weights_file, kind.config_file)]


def warm_start(head: SavedHead, from_pretrained: str | None, draft: Weights) -> None:
    """Copy a trained head's weights. Raises InputError if it was made for another draft or in another shape."""
    if from_pretrained is None:
        return
    trained, record = type(head).load(inside(from_pretrained))
    if (reason := Weights.changed(record, draft)) is not None:
        raise InputError(f"from_pretrained: the head in {from_pretrained} was trained for another draft ({reason})")
    for name in {**head.config, **trained.config}:
        own, other = head.config.get(name), trained.config.get(name)
        if other != own and name not in ("log_w_rej", "dropout"):  # another goal or training, not another head
            raise InputError(f"from_pretrained: expected a head with {name}={own}, {from_pretrained} has {other}")
    head.load_state_dict(trained.state_dict())


def resume_path(run_folder: Path, ckpt_path: str | None) -> Path | None:
    """The checkpoint to go on from; None: begin."""
    if ckpt_path not in (None, "last"):
        return Path(str(ckpt_path))
    own = folder_of(run_folder) / LAST
    return own if own.exists() else None


def check_resumable(checkpoint: Mapping[str, Any], head: SavedHead, draft: Weights, path: Path) -> None:
    """Raises InputError if a checkpoint is of another draft or of a head of another shape."""
    record = checkpoint["about"]
    if (reason := Weights.changed(record, draft)) is not None:
        raise InputError(f"{path} was made with another draft ({reason})")
    for name in {**head.config, **record["head"]}:
        own, saved = head.config.get(name), record["head"].get(name)
        if saved != own:
            raise InputError(f"{path} holds another head: expected {name}={own}, got {saved}")

"""Lightning's trainer with the settings that all trainings here share, its steps and its curves.

The loss of a step is a quotient of two sums, over all batches that are accumulated and over all processes:

    loss = sum(total) / sum(weight)

Lightning divides each batch's loss by the number of accumulated batches, and averages gradients over processes. So a batch's
numerator is divided by a fixed number, and before the optimizer's step the gradients are rescaled by the whole weight. A
training that accumulates two batches, or runs in two processes, thus equals one with twice the batch, up to rounding.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import RichProgressBar
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch import Tensor

from toolkit.config import commands, instantiate, plain
from toolkit.files.atomic import write_text
from toolkit.training.checkpoints import AtomicCheckpointIO, read_checkpoint, resume_path
from toolkit.training.console import EpochLines, quiet_lightning
from toolkit.training.loggers import run_id_of
from toolkit.training.processes import is_distributed, is_first_process

REFERENCE = 1024.0  # what a share of a step's loss is divided by until the step's whole weight is known


class WholeSteps(pl.LightningModule):
    """A module whose training step ends with `share_of_step`.

    scheduler: of (optimizer, num_steps), one step per batch; None: constant rate; about: travels in every checkpoint
    """

    def __init__(
        self,
        optimizer: partial[torch.optim.Optimizer],
        scheduler: Callable[..., Any] | None = None,
        about: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self.make_optimizer, self.make_scheduler, self.about = optimizer, scheduler, dict(about or {})
        self.step_weight = torch.zeros(())

    def with_schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        """What `configure_optimizers` returns: the optimizer, with its schedule if there is one."""
        if self.make_scheduler is None:
            return optimizer
        schedule = self.make_scheduler(optimizer, num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["about"] = self.about

    @property
    def num_shares(self) -> int:
        """The number of batches that make one step: those that are accumulated, of all processes."""
        return int(self.trainer.accumulate_grad_batches) * int(self.trainer.world_size)

    def share_of_step(self, total: Tensor, weight: Tensor, positions: int) -> dict[str, Tensor]:
        """The loss of a batch, and numerator, denominator and positions of the batches of all processes (see Curves).

        total, weight  numerator and denominator of this batch's loss (scalars); positions: their number
        """
        alone = self.num_shares == 1
        if not alone:
            self.step_weight = self.step_weight + weight.detach()
        sums = torch.stack([total.detach().double(), weight.detach().double(), weight.new_tensor(positions).double()])
        if self.trainer.world_size > 1:
            sums = self.trainer.strategy.reduce(sums, reduce_op="sum")
        loss = total / (weight if alone else REFERENCE)
        return {"loss": loss, "total": sums[0], "weight": sums[1], "positions": sums[2]}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Make the gradient that of sum(total) / sum(weight) over all batches and processes of the step."""
        if self.num_shares == 1:
            return
        weight = self.trainer.strategy.reduce(self.step_weight, reduce_op="sum")
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(REFERENCE * self.num_shares / weight)
        self.step_weight = torch.zeros_like(self.step_weight)


class Curves(pl.Callback):
    """Logs train/loss, train/lr and perf/tokens_per_second (positions with a label).

    The loss is the quotient of sums over all batches and processes since the last line. Checkpoints hold the sums. As a
    callback, and not in the module, this runs before the checkpoint of the same step is saved.
    """

    def __init__(self) -> None:
        super().__init__()
        # These are scalar tensors on the device: reading them every step would mean waiting for the device every step.
        self.total: Tensor | float = 0.0
        self.weight: Tensor | float = 0.0
        self.num_positions: Tensor | int = 0
        self.learning_rate = 0.0
        self.started = self.seconds = self.paused = 0.0
        self.last_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.started = perf_counter() - self.seconds
        self.last_step = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.learning_rate = trainer.optimizers[0].param_groups[0]["lr"]  # at the end it is the next step's

    def on_train_batch_end(
        self, trainer: Any, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.total += outputs["total"]
        self.weight += outputs["weight"]
        self.num_positions += outputs["positions"]
        if trainer.global_step == self.last_step:  # gradients are still being accumulated
            return
        self.last_step = trainer.global_step
        if trainer.global_step % trainer.log_every_n_steps == 0 or trainer.is_last_batch:
            self._log(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.paused = perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.started += perf_counter() - self.paused  # validation is not training time

    def state_dict(self) -> dict[str, Any]:
        sums = {"total": float(self.total), "weight": float(self.weight), "num_positions": int(self.num_positions)}
        return {**sums, "seconds": perf_counter() - self.started}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.total, self.weight = state_dict["total"], state_dict["weight"]
        self.num_positions = state_dict["num_positions"]
        self.seconds = state_dict.get("seconds", 0.0)  # checkpoints of earlier revisions lack it

    def _log(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        now = perf_counter()
        values = {"train/loss": float(self.total / self.weight), "train/lr": self.learning_rate}
        values["perf/tokens_per_second"] = int(self.num_positions) / max(now - self.started, 1e-9)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step - 1)
        for name in ("train/loss", "perf/tokens_per_second"):
            pl_module.log(name, values[name], prog_bar=True, logger=False)
        self.total, self.weight, self.num_positions, self.started = 0.0, 0.0, 0, now


class OwnSignals(pl.Callback):
    """SIGTERM does what it did before the trainer was made.

    Lightning's own handler ends the process with exit code 0 at the next batch, after it has waited for other processes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def _restore(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.handler)


class Resumed(NamedTuple):
    """Where a training goes on: a checkpoint's file and content (None: it begins), and the W&B run that it logs to."""

    path: Path | None
    checkpoint: dict[str, Any] | None
    run_id: str


def begin_training(cfg: commands.Train | commands.Distill, folder: Path) -> Resumed:
    """Seed random numbers and write config.yaml; says where the training goes on."""
    quiet_lightning()
    if is_first_process():
        write_text(folder / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    path = resume_path(folder, cfg.ckpt_path)
    checkpoint = None if path is None else read_checkpoint(path)
    return Resumed(path, checkpoint, run_id_of(folder, checkpoint))


@contextmanager
def opened_trainer(
    cfg: commands.Train | commands.Distill, folder: Path, resumed: Resumed, device: torch.device | None = None
) -> Iterator[tuple[pl.Trainer, list[Any]]]:
    """Lightning's trainer and the open loggers of a config; at the end all processes wait for each other."""
    first_step = 0 if resumed.checkpoint is None else resumed.checkpoint["global_step"]
    runtime = {"folder": folder, "config": plain(cfg), "run_id": resumed.run_id, "first_step": first_step}
    with ExitStack() as stack:
        opened = [stack.enter_context(instantiate(spec)(**runtime)) for spec in (cfg.logger or {}).values()]
        loggers = [logger for logger in opened if logger is not None]  # None: another process logs
        trainer = build_trainer(cfg, folder, loggers, device)
        yield trainer, loggers
        trainer.strategy.barrier("results")


def build_trainer(
    cfg: commands.Trains, folder: Path, loggers: Sequence[Any], device: torch.device | None = None
) -> pl.Trainer:
    """Lightning's trainer with checkpoints that are whole or absent.

    device  where one process trains if it is a GPU, whatever `trainer.accelerator` says
    """
    callbacks = [instantiate(spec) for spec in (cfg.callbacks or {}).values() if spec is not None]
    alone = [] if is_distributed(cfg.trainer) else [LightningEnvironment()]  # not what a launcher's variables say
    on_gpu = device is not None and device.type == "cuda" and not is_distributed(cfg.trainer)
    on_terminal = sys.stdout.isatty()
    trainer: pl.Trainer = instantiate(cfg.trainer)(
        **({"accelerator": "gpu", "devices": [device.index or 0]} if on_gpu and device else {}),
        default_root_dir=str(folder),
        logger=list(loggers) or False,
        callbacks=[*callbacks, Curves(), OwnSignals(), RichProgressBar(leave=True) if on_terminal else EpochLines()],
        plugins=[AtomicCheckpointIO(), *alone],
        enable_checkpointing=any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks),
        enable_progress_bar=on_terminal,
    )
    return trainer

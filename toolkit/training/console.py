"""What a training run shows: the config, a bar on a terminal or a line per epoch elsewhere, a table at the end."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import pytorch_lightning as pl
from rich.console import Console
from rich.tree import Tree

from toolkit.files import terminal

UNFITTING = ("smaller than the logging interval", "your dataloader is not resumable", "sync_dist=True",
             "Found .* in eval mode", "`isinstance\\(treespec, LeafSpec\\)` is deprecated")  # fmt: skip
FIRST = 10  # seconds of a training before the first line that says how long it takes
OF_EPOCH = ("train/loss", "val/log_loss_calibrated", "val/auroc", "val/auroc_accepted", "val/loss", "val/alpha",
            "val/cross_entropy", "perf/tokens_per_second")  # fmt: skip


def print_config(config: Mapping[str, Any]) -> None:
    tree = Tree("config", guide_style="dim")
    _grow(tree, config)
    Console(width=terminal.width()).print(tree)


def print_scores(scores: Mapping[str, float], suffixes: Sequence[str]) -> None:
    """Validation scores, one column per set of them (`HeadTraining.suffixes`)."""
    names = [key.removesuffix(suffixes[-1]) for key in scores if key.endswith(suffixes[-1])]
    rows = [[name, *(f"{scores[name + suffix]:.4f}" for suffix in suffixes)] for name in names]
    headings = ["validation", *(suffix.lstrip("_") or "raw" for suffix in suffixes)]
    terminal.print_table("exported head", headings, rows, [False, *(True for _ in suffixes)])


def print_comparison(lines: Sequence[tuple[str, float, float]], complaint: str | None) -> None:
    """The head beside simpler predictors (`toolkit.training.baselines`), and a warning if it is no better."""
    rows = [[name, f"{auroc:.4f}", f"{log_loss:.4f}"] for name, auroc, log_loss in lines]
    headings = ["validation", "AUROC", "calibrated log loss"]
    terminal.print_table("compared with simpler predictors", headings, rows, [False, True, True])
    if complaint is not None:
        print(complaint, flush=True)


def print_table(title: str, rows: Sequence[Mapping[str, str]], rest: Path) -> None:
    """Rows with the same keys: the columns that fit. rest: the file with all of them."""
    terminal.print_table(title, list(rows[0]), [list(row.values()) for row in rows], rest=rest)


def quiet_lightning() -> None:
    """Suppress Lightning's banners about accelerators, and its advice that does not hold here.

    The batches find their position by themselves, and the scores are added up over processes before they are logged.
    """
    for name in ("pytorch_lightning", "lightning_fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for warning in UNFITTING:
        warnings.filterwarnings("ignore", message=f".*{warning}")


class EpochLines(pl.Callback):
    """One line per epoch, and within one a line after FIRST seconds and after every minute."""

    validated_epoch = -1  # its scores stay among the trainer's until the next validation

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.validated_epoch = trainer.current_epoch

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.started, self.first_step, self.due = perf_counter(), trainer.global_step, perf_counter() + FIRST
        self.validated_epoch = -1

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now, step, last = perf_counter(), trainer.global_step, trainer.estimated_stepping_batches
        if now < self.due or not trainer.is_global_zero or not self.first_step < step < last:
            return
        self.due = now + 60
        minutes = (now - self.started) / (step - self.first_step) * (last - step) / 60
        print(f"step {step:,} of {last:,.0f}, about {minutes:.1f} minutes to go", flush=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        validated = self.validated_epoch == trainer.current_epoch
        names = [name for name in OF_EPOCH if name in values and (validated or not name.startswith("val/"))]
        entries = [f"{name} {values[name]:.4f}" for name in names]
        print(f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  {'  '.join(entries)}", flush=True)


def _grow(tree: Tree, config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            _grow(tree.add(f"[bold]{key}[/bold]"), value)
        else:
            tree.add(f"{key}: {value!r}".replace("[", r"\["))

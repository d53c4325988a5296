"""The curves of a training run: metrics.csv in the run folder and Weights & Biases, as context managers.

Each `open_*` yields a Lightning logger, or None if another process of the run logs.
"""

from __future__ import annotations

import csv
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, WandbLogger
from pytorch_lightning.utilities import rank_zero_only

from toolkit.drafts.kinds import kind_by_target
from toolkit.files import journal
from toolkit.files.atomic import write_text
from toolkit.files.text import as_csv, lines_of
from toolkit.runs.tracking import log_folder, wandb_run
from toolkit.training.processes import is_first_process

METRICS, RUN_ID = "metrics.csv", "wandb_run_id.txt"


class MetricsFile(Logger):
    """One line per step that something was logged at, in metrics.csv.

    Lightning's CSVLogger empties its file when a run is resumed. This one keeps the lines before `first_step`.
    """

    def __init__(self, folder: Path | str, first_step: int = 0):
        super().__init__()
        self.path = Path(folder) / METRICS
        self.lines: dict[int, dict[str, Any]] = {}
        if first_step and self.path.exists():
            journal.check(self.path, "delete it to go on without the lines before")
            rows = list(csv.DictReader(lines_of(self.path.read_text())))
            earlier_rows = [row for row in rows if int(row["step"]) < first_step]
            self.lines = {int(row["step"]): {k: v for k, v in row.items() if v and k != "step"} for row in earlier_rows}

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run folder holds the config."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.lines.setdefault(int(step or 0), {}).update({key: float(value) for key, value in metrics.items()})

    @rank_zero_only
    def save(self) -> None:
        names = sorted({name for line in self.lines.values() for name in line} - {"epoch"})
        rows = ({"step": step, **self.lines[step]} for step in sorted(self.lines))
        write_text(self.path, as_csv(["step", "epoch", *names], rows))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()


@contextmanager
def open_csv(folder: Path, first_step: int = 0, **_: Any) -> Iterator[Logger | None]:
    logger = MetricsFile(folder, first_step)
    try:
        yield logger
    finally:
        logger.save()


@contextmanager
def open_wandb(
    folder: Path,
    config: Mapping[str, Any],
    run_id: str,
    project: str | None = None,
    group: str | None = None,
    tags: Sequence[str] = (),
    id: str | None = None,
    offline: bool | None = None,
    log_head: bool = False,
    **_: Any,
) -> Iterator[Logger | None]:
    """One W&B run, finished in any case and with exit code 1 after an error.

    run_id    the run folder's, so that a resumed training continues its run
    id        another run to continue; None: run_id
    project   of Weights & Biases; None: WANDB_PROJECT, or the toolkit's
    group     of its runs; None: as `toolkit.runs.tracking.wandb_run` says
    tags      of the run
    log_head  upload the exported head as an artifact
    offline   True: never connect; None: as `toolkit.runs.tracking.wandb_mode` decides, without ever asking for a key
    """
    with wandb_run(
        "train",
        config,
        folder,
        group,
        tags,
        track=is_first_process(),
        name=what_is_trained(config),
        project=project,
        run_id=id or run_id,
        mode="offline" if offline else None,
        inputs=[path] if (path := (config.get("data") or {}).get("path")) else [],
    ) as run:
        if run is None:
            yield None
            return
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        yield WandbLogger(experiment=run, save_dir=str(folder), log_model=False)
        if log_head and (folder / "head").exists():
            log_folder(run, f"head-{folder.name}", "head", folder / "head")


def what_is_trained(config: Mapping[str, Any]) -> str:
    """What sets a training apart from others of its experiment: acceptance_head, preread_head, draft, a kind's name"""
    if head := config.get("head"):
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(head["_target_"]).rpartition(".")[2]).lower()
    return kind_by_target(config["kind"]).name if config.get("kind") else "draft"


def run_id_of(folder: Path, checkpoint: Mapping[str, Any] | None) -> str:
    """The W&B run that a folder's training logs to: the checkpoint's, the folder's, or a new one (then remembered)."""
    path = folder / RUN_ID
    if checkpoint is not None and checkpoint["about"].get("wandb_run_id"):
        return str(checkpoint["about"]["wandb_run_id"])
    if not path.exists() and is_first_process():
        write_text(path, secrets.token_hex(4))
    return path.read_text().strip() if path.exists() else ""

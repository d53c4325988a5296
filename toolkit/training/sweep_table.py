"""One table for all jobs of a sweep: a Hydra callback, switched on in conf/train.yaml.

Every job's folder within the sweep's folder gets a job.json. After each job, table.csv and table.md are written again from
these files, so the table is there even if a later job fails. At the end it is also logged to W&B, if the jobs had runs there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from toolkit.files.atomic import read_json, write_json, write_text
from toolkit.files.text import as_csv, first_line
from toolkit.runs.stage import OUTPUT
from toolkit.runs.tracking import log_summary, log_table, run_of, wandb_run

JOB = "job.json"


class SweepTable(Callback):
    """Collects the scores of a sweep's jobs.

    scores  name of the JSON file with a job's scores, in its output folder
    """

    def __init__(self, scores: str = "metrics.json"):
        self.scores = scores

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """In a sweep: note the job's results, and draw the table."""
        folder = Path(config.hydra.runtime.output_dir)
        if config.hydra.mode is None or config.hydra.mode.name != "MULTIRUN":
            return
        job: dict[str, Any] = {
            "job": int(config.hydra.job.num),
            "overrides": list(config.hydra.overrides.task),
            "status": "done" if job_return.status == JobStatus.COMPLETED else "failed",
        }
        if job["status"] == "failed":
            job["error"] = first_line(job_return._return_value)
        elif (folder / OUTPUT).exists():
            output = Path(read_json(folder / OUTPUT)["folder"])
            job |= {"folder": str(output), "scores": read_json(output / self.scores)}
        write_json(folder / JOB, job)
        write_table(folder.parent, table_rows(folder.parent))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table and its path; log it to the project of the jobs' runs."""
        from toolkit.training.console import print_table

        folder = Path(config.hydra.sweep.dir)
        rows = table_rows(folder)
        if rows:
            print_table(f"sweep {folder.name}", rows, folder / "table.csv")
            print(f"table: {folder / 'table.csv'}")
            log_sweep(folder, rows)


def table_rows(folder: Path) -> list[dict[str, str]]:
    """A sweep's jobs in order: the overrides that differ between them, their scores and folders, as text."""
    jobs = _jobs(folder)
    settings = [dict(override.lstrip("+").split("=", 1) for override in job["overrides"]) for job in jobs]
    names = list(dict.fromkeys(name for setting in settings for name in setting))
    varied = [name for name in names if len({setting.get(name) for setting in settings}) > 1]
    scores = list(dict.fromkeys(name for job in jobs for name in job.get("scores", {})))
    rows = []
    for job, setting in zip(jobs, settings, strict=True):
        row = {"job": str(job["job"]), **{name: setting.get(name, "") for name in varied}}
        for name in scores:
            score = job.get("scores", {}).get(name)
            row[name] = f"{score:.6g}" if isinstance(score, float) else str("" if score is None else score)
        status = job["status"] if job["status"] == "done" else f"{job['status']}: {job['error']}"
        rows.append({**row, "status": status, "folder": job.get("folder", "")})
    return rows


def _jobs(folder: Path) -> list[dict[str, Any]]:
    """What is noted of a sweep's jobs, in order."""
    return sorted((read_json(path) for path in folder.glob(f"*/{JOB}")), key=lambda job: job["job"])


def write_table(folder: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write rows with the same keys as table.csv and table.md."""
    write_text(folder / "table.csv", as_csv(list(rows[0]), rows))
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    write_text(folder / "table.md", "".join(f"| {' | '.join(line)} |\n" for line in lines))


def log_sweep(folder: Path, rows: list[dict[str, str]]) -> None:
    """A W&B run with the joint table, in the group and project of the jobs' runs; nothing if no job had one."""
    homes = [Path(row["folder"]) for row in rows if row["folder"]]
    runs = [run for home in homes if (run := run_of(home)) is not None]
    if not runs:
        return
    frame = pd.DataFrame(rows)
    for name in frame:  # a column of texts as numbers, if all texts that are there are numbers
        numbers = pd.to_numeric(frame[name], errors="coerce")
        if bool((numbers.notna() | (frame[name] == "")).all()):
            frame[name] = numbers
    jobs = [job["overrides"] for job in _jobs(folder)]
    options = {"name": f"multirun {folder.name}", "inputs": homes, "project": runs[0]["project"]}
    with wandb_run("multirun", {"jobs": jobs}, folder, group=runs[0]["group"], **options) as wandb:
        done = int((frame["status"] == "done").sum())
        log_summary(wandb, {"jobs": len(frame), "jobs_done": done, "jobs_failed": len(frame) - done})
        log_table(wandb, "multirun/table", frame)

"""python -m toolkit.sync folder=outputs: upload every offline W&B run below a folder. Needs an API key and the server.

Runs that were uploaded before are skipped (`wandb sync` marks them); one that fails is named and the others go on.
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("sync")

import os
import subprocess
import sys
from pathlib import Path

from toolkit.config import commands
from toolkit.errors import InputError
from toolkit.runs.tracking import register_chart


def run(cfg: commands.Sync) -> Path:
    """Upload; returns the folder. Raises InputError if there is nothing to upload, or if a run could not be."""
    folder = Path(cfg.folder)
    runs = offline_runs(folder)
    if not runs:
        raise InputError(f"folder: expected offline runs (wandb/offline-run-*) below {folder}, found none")
    waiting = [path for path in runs if not synced(path)]
    print(f"sync: {len(runs)} offline runs, {len(runs) - len(waiting)} uploaded before")
    entity = cfg.entity or os.environ.get("WANDB_ENTITY")
    if entity and waiting and not cfg.dry_run:
        register_chart(entity)  # offline runs name it if they knew the team
    failed = []
    for path in waiting:
        print(f"sync: {path}")
        if not cfg.dry_run and subprocess.run(sync_command(path, cfg.project, cfg.entity)).returncode != 0:
            failed.append(path)
    if failed:
        raise InputError(
            f"{len(failed)} of {len(waiting)} runs could not be uploaded, first {failed[0]}; run again to retry"
        )
    return folder


def offline_runs(folder: Path) -> list[Path]:
    """Folders of offline runs below a folder, the oldest first."""
    return sorted(folder.rglob("wandb/offline-run-*"), key=lambda path: path.name)


def synced(run: Path) -> bool:
    """Whether `wandb sync` has uploaded a run: it leaves a mark beside the run's file."""
    return any(run.glob("*.wandb.synced"))


def sync_command(run: Path, project: str | None, entity: str | None) -> list[str]:
    options = [*(["--project", project] if project else ()), *(["--entity", entity] if entity else ())]
    return [sys.executable, "-m", "wandb", "sync", *options, str(run)]

"""Weights & Biases, never in the way: offline without a key, no prompts for one, one run per stage.

Everything logged here is on disk as well (an offline run cannot be read back): tables as CSV and Parquet, figures as
PNG. `wandb sync FOLDER/wandb/offline-run-*` uploads an offline run later.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from toolkit import journal
from toolkit.errors import InputError
from toolkit.lines import first_line

Mode = Literal["online", "offline", "disabled"]
PROJECT = "acceptance-toolkit"
LINKS = ("latest-run", "debug.log", "debug-internal.log")  # that wandb makes beside its runs
SPELLINGS: dict[str, Mode] = {
    "online": "online",
    "run": "online",
    "shared": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}


def wandb_mode() -> Mode:
    """What WANDB_MODE says; else online if there is an API key (WANDB_API_KEY or netrc); else offline."""
    asked = os.environ.get("WANDB_MODE", "").strip().lower()
    if asked:
        if asked not in SPELLINGS:
            raise InputError(f"WANDB_MODE: expected online, offline or disabled, got {asked!r}")
        return SPELLINGS[asked]
    return "online" if os.environ.get("WANDB_API_KEY") or _netrc_has_key() else "offline"


@contextmanager
def wandb_run(
    job_type: str,
    config: Mapping[str, Any],
    folder: Path | str,
    group: str | None = None,
    tags: Sequence[str] = (),
    track: bool = True,
    *,
    project: str | None = None,
    run_id: str | None = None,
    mode: Mode | None = None,
) -> Iterator[Any]:
    """A run around a stage; finished in any case, with exit code 1 if the stage raised.

    job_type  the stage's name
    config    plain containers
    folder    the run's files go to <folder>/wandb
    track     False: no run
    project   None: WANDB_PROJECT, or the toolkit's
    run_id    an earlier run of this id is continued; None: a new one
    mode      None: as `wandb_mode` decides
    Yields the wandb run, or None if there is none to log to; the `log_*` functions below take either.
    """
    mode = (mode or wandb_mode()) if track else "disabled"
    if mode == "disabled":
        yield None
        return
    project = project or os.environ.get("WANDB_PROJECT", PROJECT)
    known = {} if run_id is None or mode == "offline" else {"resume": "allow"}  # offline runs are joined when synced
    options = {"project": project, "id": run_id, "group": group, "tags": list(tags), **known}
    run = _start(mode, job_type, config, Path(folder), options)
    _list_files(run, Path(folder))
    failed = True
    try:
        yield run
        failed = False
    finally:
        run.finish(exit_code=int(failed))
        if run.settings._offline:
            print(f"wandb: offline run; upload it with: wandb sync {run.settings.sync_dir}")


def log_table(run: Any, name: str, frame: Any) -> None:
    """A pandas table, as wandb.Table; cells that are neither numbers nor text are logged as text."""
    if run is not None:
        run.log({name: _table(frame)})


def log_image(run: Any, name: str, path: Path | str) -> None:
    """A figure from its file."""
    if run is not None:
        import wandb

        run.log({name: wandb.Image(str(path))})


def log_scatter(run: Any, name: str, frame: Any, x: str, y: str, title: str) -> None:
    """Two columns of a table as a custom chart."""
    if run is not None:
        import wandb

        run.log({name: wandb.plot.scatter(_table(frame), x=x, y=y, title=title)})


def log_lines(run: Any, name: str, frame: Any, x: str, y: str, by: str, title: str) -> None:
    """One line of (x, y) per value of the column `by`, as a custom chart."""
    if run is not None:
        import wandb

        groups = [(str(key), group.sort_values(x)) for key, group in frame.groupby(by, sort=False)]
        chart = wandb.plot.line_series(
            xs=[group[x].tolist() for _, group in groups],
            ys=[group[y].tolist() for _, group in groups],
            keys=[key for key, _ in groups],
            title=title,
            xname=x,
        )
        run.log({name: chart})


def _start(mode: Mode, job_type: str, config: Any, folder: Path, options: Mapping[str, Any]) -> Any:
    """wandb.init without output capture; a server that cannot be reached makes the run an offline one."""
    import wandb

    def init(mode: Mode) -> Any:
        return wandb.init(
            dir=str(folder),
            mode=mode,
            config=dict(config),
            job_type=job_type,
            name=folder.name,
            reinit="create_new",  # a training run of the same process goes on
            settings=wandb.Settings(console="off", quiet=True, silent=True),
            **options,
        )

    folder.mkdir(parents=True, exist_ok=True)
    try:
        return init(mode)
    except wandb.errors.Error as error:
        if mode == "offline":
            raise
        print(f"wandb: {first_line(error)}; this run is logged offline")
        return init("offline")


def _list_files(run: Any, folder: Path) -> None:
    """The run's folder, and the links to the newest one, belong to the stage (`toolkit.journal`)."""
    for path in (Path(run.settings.sync_dir), *(folder / "wandb" / name for name in LINKS)):
        journal.note(path, folder=True)


def _table(frame: Any) -> Any:
    """A column of a wandb.Table has one type: numbers where all are, else text; None where a value is missing."""
    import wandb

    columns = []
    for name in frame.columns:
        values = [None if isinstance(value, float) and value != value else value for value in frame[name].tolist()]
        numbers = all(isinstance(value, bool | int | float) for value in values if value is not None)
        columns.append(values if numbers else [None if value is None else str(value) for value in values])
    names: list[Any] = [str(name) for name in frame.columns]
    return wandb.Table(columns=names, data=[list(row) for row in zip(*columns, strict=True)])


def _netrc_has_key() -> bool:
    """Whether netrc has a password for the W&B server. The password itself is neither kept nor returned."""
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    given = os.environ.get("NETRC")
    candidates = [Path(given)] if given else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for path in candidates:
        try:
            entry = netrc.netrc(path).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if entry is not None and entry[2]:
            return True
    return False

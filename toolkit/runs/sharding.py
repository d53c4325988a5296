"""Several processes that share one stage: each makes every world_size-th part of one folder, and the last one joins them.

    python -m data_gen.traces -m responses=FOLDER world_size=4 rank=0,1,2,3 hydra/launcher=joblib

A process that is run again makes what is missing of its own parts; with world_size=1, all that is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from toolkit.config import commands
from toolkit.errors import InputError
from toolkit.files import lock
from toolkit.runs.stage import Stage

RANKS = ("rank", "world_size")  # keys that do not determine content
JOIN = ".lock-join"
Part = TypeVar("Part")


def part_of(cfg: commands.Shared) -> str:
    """The name of this process's share of a folder; empty if it works alone. Raises InputError for a rank out of range."""
    if not 0 <= cfg.rank < cfg.world_size:
        raise InputError(f"rank: expected 0 to {cfg.world_size - 1} (world_size - 1), got {cfg.rank}")
    return str(cfg.rank) if cfg.world_size > 1 else ""


def share(parts: Sequence[Part], cfg: commands.Shared) -> list[Part]:
    return [part for number, part in enumerate(parts) if number % cfg.world_size == cfg.rank]


def all_there(stage: Stage, paths: Sequence[Path], cfg: commands.Shared) -> bool:
    """Whether every part is there; says how many are missing, if not, and leaves the folder to the others."""
    missing = sum(not path.exists() for path in paths)
    if missing and cfg.world_size > 1:
        stage.leave()
        rank = f"rank {cfg.rank} of {cfg.world_size}"
        print(f"{stage.name}: {rank} is done; {missing} of {len(paths)} parts are not there yet")
    return not missing or cfg.world_size == 1


@contextmanager
def joining(stage: Stage) -> Iterator[bool]:
    """Whether this process is to join the parts: no other one does at this moment, and none has."""
    try:
        lock.take(stage.folder, JOIN)
    except InputError:
        stage.leave()
        print(f"{stage.name}: another process joins the parts")
        yield False
        return
    try:
        yield not stage.finished
    finally:
        lock.release(stage.folder, JOIN)

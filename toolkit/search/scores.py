"""The scores of a finished stage, by name: what a search reads of a job."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import InputError
from toolkit.io import read_json
from toolkit.lines import lines_of

FILES = ("metrics.json", "summary.json")  # of trainings and of decoding
TABLE = "summary.csv"  # of analysis.sweep: a line per setting
NO_CHOICE = ("oracle", "upper_bound", "autoregressive")  # methods that are not searched for


def scores_of(folder: Path, names: Sequence[str]) -> list[float]:
    """These scores of an output folder. Raises InputError if one is missing, or there are several settings."""
    found: dict[str, float] = {}
    for file in FILES:
        if (folder / file).is_file():
            about = read_json(folder / file)
            found |= {str(name): float(value) for name, value in about.items() if isinstance(value, int | float)}
    if not found and (folder / TABLE).is_file():
        found = _only_setting(folder / TABLE)
    missing = [name for name in names if name not in found]
    if missing:
        raise InputError(
            f"hydra.sweeper.metrics: expected of {', '.join(sorted(found)) or 'nothing'} (the scores in {folder}), got "
            f"{missing[0]}"
        )
    return [found[name] for name in names]


def _only_setting(path: Path) -> dict[str, float]:
    """Numbers of the one setting of a sweep that is no reference."""
    lines = list(csv.DictReader(lines_of(path.read_text(encoding="utf-8"))))
    rows = [row for row in lines if row.get("method") not in NO_CHOICE]
    if len(rows) != 1:
        raise InputError(f"{path}: expected one setting to score (a grid of one), got {len(rows)}")
    numbers = {}
    for name, value in rows[0].items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError):
            continue
    return numbers

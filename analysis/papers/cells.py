"""The numbers of a paper's table, looked up in the tables that runs wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.papers.spec import PaperTable, merged
from analysis.tables.files import read_table
from toolkit.errors import InputError, unknown_name
from toolkit.stage import read_manifest

NOTHING = "–"  # in a cell that the paper leaves empty


@dataclass(frozen=True)
class Cell:
    """A number with its interval (None: there is none), or None, and `why`, where its run was not made or measured nothing."""

    value: float | str | None
    low: float | None = None
    high: float | None = None
    form: str = "{:.2f}"
    note: str = ""
    why: str = "not run"

    def text(self) -> str:
        """As a page shows it."""
        if self.value is None:
            return self.why
        if isinstance(self.value, str):
            return self.value
        number, note = self.form.format(self.value), f", {self.note}" if self.note else ""
        if self.low is None or self.high is None or pd.isna(self.low) or pd.isna(self.high):
            return number + note
        return f"{number} [{self.form.format(self.low)}, {self.form.format(self.high)}]{note}"


class NoLine(InputError):
    """No line of a table is what a cell asks for."""


class Runs:
    """Tables of named run folders, each read once."""

    def __init__(self, folders: Mapping[str, Path | str]):
        self.folders = {name: Path(folder) for name, folder in folders.items()}
        self._read: dict[tuple[str, str], pd.DataFrame] = {}

    @cached_property
    def pairs(self) -> set[str]:
        """Names of the pairs that ran, as far as they have names."""
        configs = [(read_manifest(folder) or {}).get("config") or {} for folder in self.folders.values()]
        return {str(config["pair"]["name"]) for config in configs if (config.get("pair") or {}).get("name")}

    def table(self, run: str, name: str) -> pd.DataFrame:
        """A run's table. Raises InputError if it has none of this name."""
        if (run, name) not in self._read:
            self._read[run, name] = read_table(self.folders[run], name)
        return self._read[run, name]

    def lines(self, told: Mapping[str, Any], what: str) -> pd.DataFrame:
        """The lines that `where` leaves. Raises InputError for unknown columns, and if nothing is left."""
        table = self.table(told["run"], told["table"])
        for column, wanted in (told.get("where") or {}).items():
            if wanted is None:
                continue
            if column not in table:
                raise unknown_name(f"{what}: column of {told['table']}", column, table.columns)
            listed = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]
            kept = table[table[column].isin(listed)]
            if kept.empty:
                raise NoLine(
                    f"{what}: {told['table']} of run {told['run']} has no line with {column}={wanted}; "
                    f"it has {', '.join(map(str, table[column].unique()[:20]))}"
                )
            table = kept
        return table

    def alike(self, told: Mapping[str, Any], what: str) -> pd.DataFrame:
        """The lines that `where` and `like` leave. Raises InputError if nothing is left."""
        lines = self.lines(told, what)
        if not told.get("like"):
            return lines
        other = {**told["like"]}
        column = other.pop("column", None)
        if column not in lines:
            raise unknown_name(f"{what}: like.column", str(column), lines.columns)
        other = {**merged(told, other), "like": None}
        wanted = chosen(self.lines(other, what), other, what)[column]
        return self.lines({**told, "where": {**(told.get("where") or {}), column: wanted}}, what)

    def cell(self, told: Mapping[str, Any], what: str) -> Cell:
        """The number that a source tells of. Raises InputError if there is not exactly one."""
        form = told.get("form", "{:.2f}")
        if told.get("runs"):
            return self._mean(told, what)
        if told.get("run") not in self.folders:
            return Cell(None, form=form)
        try:
            line = chosen(self.alike(told, what), told, what)
        except NoLine:
            if told.get("optional"):
                return Cell(NOTHING, form=form)
            raise
        name = column_of(told["value"], line.index, f"{what}: column of {told['table']}")
        if isinstance(line[name], str):
            return Cell(line[name], form=form)
        if pd.isna(line[name]):
            return Cell(None, form=form, why="not measured")
        if told.get("over"):
            other = self.cell({**merged(told, told["over"]), "over": None}, f"{what}, what it is divided by")
            if not isinstance(other.value, float):
                return Cell(None, form=form)
            return Cell(float(line[name]) / other.value * told.get("scale", 1.0), form=form)
        ends = [line.get(f"{name}_{end}") for end in ("low", "high")]
        low, high = (None if end is None else float(end) * told.get("scale", 1.0) for end in ends)
        note = str(line[told["note"]]) if told.get("note") else ""
        return Cell(float(line[name]) * told.get("scale", 1.0), low, high, form, note)

    def _mean(self, told: Mapping[str, Any], what: str) -> Cell:
        """The mean over several runs, each counting alike."""
        parts = [self.cell({**told, "runs": None, "run": run}, what) for run in told["runs"]]
        empty = next((part for part in parts if not isinstance(part.value, float)), None)
        values = [part.value for part in parts if isinstance(part.value, float)]
        return empty or Cell(sum(values) / len(values), form=parts[0].form)


def column_of(names: str | Sequence[str], columns: Iterable[str], what: str) -> str:
    """The first name that is a column. Raises InputError if none is."""
    names, known = [names] if isinstance(names, str) else list(names), list(columns)
    found = next((name for name in names if name in known), None)
    if found is None:
        raise unknown_name(what, names[0], known)
    return found


def chosen(lines: pd.DataFrame, told: Mapping[str, Any], what: str) -> pd.Series[Any]:
    """The one line a cell is about: the only one, or the best of several."""
    if told.get("best"):
        kind, _, column = str(told["best"]).partition(" ")
        if kind not in ("max", "min") or column not in lines:
            raise InputError(
                f"{what}: best: expected 'max COLUMN' or 'min COLUMN' of {', '.join(lines.columns)}, got {told['best']!r}"
            )
        return lines.loc[lines[column].idxmax() if kind == "max" else lines[column].idxmin()]
    if len(lines) != 1:
        raise InputError(
            f"{what}: {told['table']} of run {told['run']} has {len(lines)} lines for it; expected one: narrow `where`, or "
            "give `best`"
        )
    return lines.iloc[0]


def cells_of(spec: PaperTable, runs: Runs) -> dict[tuple[str, str], Cell]:
    """Every cell of a table, by row and column; nothing in those of a pair where another one of the paper's pairs ran."""
    found = {}
    for row in spec.rows:
        for column in spec.columns:
            told = spec.source(row, column)
            hidden = told.get("of_pair") and (runs.pairs & set(spec.pairs)) - {told["of_pair"]}
            what = f"{spec.item}, {row} / {column}"
            found[row, column] = Cell(None, why="not run: another pair") if hidden else runs.cell(told, what)
    return found


def as_frame(spec: PaperTable, cells: Mapping[tuple[str, str], Cell]) -> pd.DataFrame:
    """One line per cell: row, column, value, low, high, published."""
    lines = []
    for (row, column), cell in cells.items():
        numbers = spec.published.get(row)
        published = None if numbers is None else numbers[list(spec.columns).index(column)]
        text = isinstance(cell.value, str)
        lines.append({
            "row": row, "column": column,
            "value": float("nan") if text or cell.value is None else cell.value,
            "text": cell.value if text else None,
            "low": cell.low, "high": cell.high, "note": cell.note,
            "published": None if published is None else str(published),
        })  # fmt: skip
    return pd.DataFrame(lines)

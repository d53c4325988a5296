"""A table of a paper: rows x columns of numbers that runs have measured, beside those that the paper prints.

An entry of `conf/papers/PAPER.yaml` has: title, pairs (the paper's), differs, cell, rows, columns, figure, published {row: one
number per column}, and claims [{text, left, right, only}]: row `left` over row `right`, per column, or columns, per row; `only`
those listed, or those whose name ends with this text. `differs` has sentences: a text, {toy: a text for the toy pair}, or
{models: a text for other pairs}. In them "{RUN.KEY}" stands for what this run's manifest or its config says.

A source says where a number comes from. A cell's is merged from `cell`, its row's and its column's, the later ones win:

    run     name of a run in `runs`
    runs    several of them, instead: the mean of their cells
    table   its table: frontier, comparison, acceptance, ... (a .parquet file of the run)
    where   {column: value, or list of values; null: any}: the lines looked at; merged key by key
    like    a mapping that replaces keys of the source, and `column`: only lines that agree in this column with the line that
            the changed source finds
    best    "max COLUMN" or "min COLUMN": of several lines, the one to take
    value   column of the number; or several: the first one that the table has
    over    a mapping that replaces keys of the source: the number is divided by that other one (a speed-up)
    form    format of the number, "{:.2f}"
    less    what is subtracted before that: 1 makes a gain of a quotient
    scale   factor of the number before it is shown
    optional  whether there may be no such line: a setting that the paper's table leaves out
    note    column whose entry is shown beside the number: the setting that was chosen
    of_pair the pair of the paper whose number it is: nothing is shown where another one of the paper's pairs ran

Any other key is a name for braces: with `pair: here`, "{pair}" stands for here in all of them. Rows, columns, panels, curves
and claims can be multiplied out as stages can, with `for_each: {AXIS: [VALUE, ...], or {NAME: VALUE, or a source}}`: their
own names show "{AXIS}" as the NAME.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.reporting.method_table import measured_figures
from analysis.tables.bootstrap import ENOUGH, brackets
from analysis.tables.files import read_table
from toolkit.errors import InputError, unknown_name
from toolkit.runs.pipeline import NAME
from toolkit.runs.stage import read_manifest

KEYS = (
    "run", "runs", "table", "where", "like", "best", "value", "over", "form", "less", "scale", "optional", "note", "of_pair",
)  # fmt: skip
NOTHING = "–"  # in a cell that the paper leaves empty
FACT = re.compile(r"\{(\w+(?:\.[\w =]+)+)\}")
Source = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """A number with its interval (None: there is none), or None, and `why`, where its run was not made or measured nothing."""

    value: float | str | None
    low: float | None = None
    high: float | None = None
    form: str = "{:.2f}"
    note: str = ""
    why: str = "not run"
    number: int = ENOUGH  # prompts or groups: the ends of few are a range

    def text(self) -> str:
        if self.value is None or isinstance(self.value, str):
            return self.value or self.why
        number, note = self.form.format(self.value), f", {self.note}" if self.note else ""
        if self.low is None or self.high is None or pd.isna(self.low) or pd.isna(self.high):
            return number + note
        return f"{number} {brackets(self.form.format(self.low), self.form.format(self.high), self.number)}{note}"


@dataclass(frozen=True)
class PaperTable:
    paper: str
    cite: str
    item: str
    title: str
    experiment: str
    pairs: Sequence[str]
    differs: Sequence[str | Mapping[str, str]] = ()
    cell: Source = field(default_factory=dict)
    rows: Mapping[str, Source] = field(default_factory=dict)
    columns: Mapping[str, Source] = field(default_factory=dict)
    published: Mapping[str, Sequence[float | str | None]] = field(default_factory=dict)
    claims: Sequence[Mapping[str, Any]] = ()
    figure: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> PaperTable:
        """The table that a config describes. Raises InputError for unknown keys and for names of no row or column."""
        for key in config:
            if key not in cls.__dataclass_fields__:
                raise unknown_name("table: key", key, cls.__dataclass_fields__)
        if missing := [key for key in ("paper", "cite", "item", "title", "experiment", "pairs") if key not in config]:
            raise InputError(f"table: expected the keys {', '.join(missing)}, too (choose one with table=NAME)")
        rows, columns = expanded(config.get("rows")), expanded(config.get("columns"))
        claims = [claim for pattern in config.get("claims") or () for claim in _claims(pattern, rows, columns)]
        table = cls(**{**config, "rows": rows, "columns": columns, "claims": claims})
        for source in (table.cell, *rows.values(), *columns.values()):
            check_keys(source, f"cells of {table.item}", str(config))
        for name, numbers in table.published.items():
            if name not in rows:
                raise unknown_name(f"published figures of {table.item}: row", name, rows)
            if len(numbers) != len(columns):
                raise InputError(
                    f"published figures of {table.item}, row {name!r}: expected one per column ({len(columns)}; null "
                    f"where the paper has none), got {len(numbers)}"
                )
        return table

    def source(self, row: str, column: str) -> dict[str, Any]:
        return merged(self.cell, self.rows[row], self.columns[column])

    def printed(self, row: str, column: str) -> float | str | None:
        return self.published[row][list(self.columns).index(column)] if row in self.published else None


class Runs:
    def __init__(self, folders: Mapping[str, Path | str]):
        self.folders = {name: Path(folder) for name, folder in folders.items()}
        self._tables: dict[tuple[str, str], pd.DataFrame] = {}

    def filled(self, sentence: str) -> str | None:
        """A sentence with what runs say in place of "{RUN.KEY}"; None if one of them was not made."""
        missing = []

        def fact(match: re.Match[str]) -> str:
            run, *keys = match[1].split(".")
            manifest = (read_manifest(self.folders[run]) if run in self.folders else None) or {}
            value: Any = {**(manifest.get("config") or {}), **manifest}
            for key in keys:
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is None:
                missing.append(match[1])
            items = value if isinstance(value, list) else [value]
            values = [f"{item:,}" if isinstance(item, int) else str(item) for item in items]
            return " and ".join(filter(None, [", ".join(values[:-1]), values[-1]]))

        text = FACT.sub(fact, sentence)
        return None if missing else text

    @cached_property
    def pairs(self) -> set[str]:
        configs = [(read_manifest(folder) or {}).get("config") or {} for folder in self.folders.values()]
        return {str(config["pair"]["name"]) for config in configs if (config.get("pair") or {}).get("name")}

    def lines(self, source: Source, what: str) -> pd.DataFrame:
        """The lines of a run's table that `where` leaves. Raises InputError for unknown columns and values."""
        run, name = source["run"], source["table"]
        if (run, name) not in self._tables:
            self._tables[run, name] = read_table(self.folders[run], name)
        table = self._tables[run, name]
        for column, value in (source.get("where") or {}).items():
            if value is None:
                continue
            if column not in table:
                raise unknown_name(f"{what}: column of {name}", column, table.columns)
            chosen = table[table[column].isin(value if isinstance(value, list) else [value])]
            if chosen.empty and not source.get("optional"):
                raise InputError(
                    f"{what}: {name} of run {run} has no line with {column}={value}; "
                    f"it has {', '.join(map(str, table[column].unique()[:20]))}"
                )
            table = chosen
        return table

    def line(self, source: Source, what: str) -> pd.Series[Any] | None:
        """The one line that a source is about; None if there is none and need be none. Raises InputError for several."""
        lines, best = self.lines(source, what), source.get("best")
        if source.get("like"):
            column = source["like"].get("column")
            if column not in lines:
                raise unknown_name(f"{what}: like.column", str(column), lines.columns)
            other = self.line({**merged(source, source["like"]), "like": None}, what)
            lines = lines if other is None else lines[lines[column] == other[column]]
        if best and not lines.empty:
            kind, _, column = str(best).partition(" ")
            if kind not in ("max", "min") or column not in lines:
                raise InputError(
                    f"{what}: best: expected 'max COLUMN' or 'min COLUMN' of {', '.join(lines.columns)}, got {best!r}"
                )
            return lines.loc[lines[column].idxmax() if kind == "max" else lines[column].idxmin()]
        if lines.empty and source.get("optional"):
            return None
        if len(lines) != 1:
            raise InputError(
                f"{what}: {source['table']} of run {source['run']} has {len(lines)} lines for it; expected one: narrow "
                "`where`, or give `best`"
            )
        return lines.iloc[0]

    def cell(self, source: Source, what: str) -> Cell:
        """The number that a source says. Raises InputError if there is not exactly one."""
        form, less, scale = source.get("form", "{:.2f}"), source.get("less", 0.0), source.get("scale", 1.0)
        if source.get("runs"):
            parts = [self.cell({**source, "runs": None, "run": run}, what) for run in source["runs"]]
            empty = next((part for part in parts if not isinstance(part.value, float)), None)
            values = [part.value for part in parts if isinstance(part.value, float)]
            return empty or Cell(sum(values) / len(values), form=form)
        if source.get("run") not in self.folders:
            return Cell(None, form=form)
        line = self.line(source, what)
        if line is None:
            return Cell(NOTHING, form=form)
        name = first_column(source["value"], line.index, f"{what}: column of {source['table']}")
        if isinstance(line[name], str):
            return Cell(line[name], form=form)
        if pd.isna(line[name]):
            return Cell(None, form=form, why="not measured")
        if source.get("over"):
            below = {**merged(source, source["over"]), "over": None, "less": 0, "scale": 1}
            other = self.cell(below, f"{what}, what it is divided by")
            value = (float(line[name]) / other.value - less) * scale if isinstance(other.value, float) else None
            return Cell(value, form=form)
        ends = (name, f"{name}_low", f"{name}_high")
        value, low, high = ((float(line[end]) - less) * scale if end in line else None for end in ends)
        prompts = line.get(f"{name}_scored", line.get("prompts", line.get("texts", ENOUGH)))
        number = int(line.get("groups", ENOUGH) if name in measured_figures(0) else prompts)
        note = str(line[source["note"]]) if source.get("note") else ""
        return Cell(value, low, high, form, note, number=number)


def cells_of(table: PaperTable, runs: Runs) -> dict[tuple[str, str], Cell]:
    """Every cell, by row and column; nothing in those of a pair where another one of the paper's pairs ran."""
    cells = {}
    for row, column in product(table.rows, table.columns):
        source = table.source(row, column)
        pair = source.get("of_pair")
        other_pairs = runs.pairs & set(table.pairs) - {pair} if pair else set()
        empty = Cell(None, why="not run: another pair")
        cells[row, column] = empty if other_pairs else runs.cell(source, f"{table.item}, {row} / {column}")
    return cells


def as_frame(table: PaperTable, cells: Mapping[tuple[str, str], Cell]) -> pd.DataFrame:
    lines = []
    for (row, column), cell in cells.items():
        text, printed = isinstance(cell.value, str), table.printed(row, column)
        lines.append({
            "row": row, "column": column,
            "value": float("nan") if text or cell.value is None else cell.value,
            "text": cell.value if text else None,
            "low": cell.low, "high": cell.high, "note": cell.note,
            "published": None if printed is None else str(printed),
        })  # fmt: skip
    return pd.DataFrame(lines)


def first_column(names: str | Sequence[str], columns: pd.Index[Any], what: str) -> str:
    """The first name that is a column. Raises InputError if none is."""
    names = [names] if isinstance(names, str) else list(names)
    if not (present := [name for name in names if name in columns]):
        raise unknown_name(what, names[0], columns)
    return present[0]


def check_keys(source: Source, what: str, text: str, more: Sequence[str] = ()) -> None:
    """Raises InputError for a key that no source has, and that does not stand in braces anywhere in the text either."""
    for key in source:
        if key not in (*KEYS, *more) and f"{{{key}}}" not in text:
            raise unknown_name(f"{what}: key", key, (*KEYS, *more))


def merged(*parts: Source) -> dict[str, Any]:
    """One source of several, names filled in; the later ones win, `where` and `over` key by key."""
    whole: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = key in ("where", "over") and isinstance(value, Mapping) and isinstance(whole.get(key), Mapping)
            whole[key] = merged(whole[key], value) if both else value
    names = {key: value for key, value in whole.items() if key not in KEYS}
    return {key: filled(value, names) for key, value in whole.items()}


def expanded(entries: Mapping[str, Source | None] | None) -> dict[str, dict[str, Any]]:
    whole = {}
    for pattern, entry in (entries or {}).items():
        source = dict(entry or {})
        for names, values in _combinations(source.pop("for_each", None)):
            parts = [value if isinstance(value, Mapping) else {axis: value} for axis, value in values.items()]
            whole[filled(str(pattern), {axis: str(name) for axis, name in names.items()})] = merged(source, *parts)
    return whole


def filled(value: Any, names: Mapping[str, Any]) -> Any:
    """A value with what stands for "{name}" in its texts; a text that is one name alone becomes what it stands for."""
    if isinstance(value, Mapping):
        return {key: filled(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, names) for item in value]
    if not isinstance(value, str):
        return value
    whole = NAME.fullmatch(value)
    if whole and whole[1] in names:
        return names[whole[1]]
    return NAME.sub(lambda match: str(names.get(match[1], match[0])), value)


def _claims(claim: Mapping[str, Any], rows: Mapping[str, Any], columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A claim for each combination of its names, with the rows or columns that it is about. Raises InputError for others."""
    claims = []
    for names, _ in _combinations(claim.get("for_each")):
        entry = {key: filled(value, names) for key, value in claim.items() if key != "for_each"}
        own, others = (columns, rows) if entry["left"] in columns else (rows, columns)
        only = entry.get("only") or list(others)
        entry["only"] = [name for name in others if name.endswith(only)] if isinstance(only, str) else only
        for listed, all_names in (((entry["left"], entry["right"]), own), (entry["only"] or [only], others)):
            for name in listed:
                if name not in all_names:
                    raise unknown_name("claims: row or column", name, all_names)
        claims.append(entry)
    return claims


def _combinations(axes: Mapping[str, Any] | None) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    listed = (axes or {}).items()
    named = {axis: each if isinstance(each, Mapping) else {value: value for value in each} for axis, each in listed}
    for names in product(*named.values()):
        chosen = dict(zip(named, names, strict=True))
        yield chosen, {axis: named[axis][name] for axis, name in chosen.items()}

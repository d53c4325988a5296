"""What a table or figure of a paper shows: rows, columns, where each cell's number comes from, and what was published.

A mapping says where a cell's number comes from. It is merged from the table's (`cell`), its row's and its column's mapping, and
the later ones win. `where` and `over` are merged key by key. The keys are:

    run     name of a run in `runs`; "{pair}" in it stands for `pair`
    runs    several of them, instead: the mean of their cells
    pair    name of a pair: rows tell the run, columns the pair, or the other way round
    table   its table: frontier, comparison, acceptance, ... (a .parquet file of the run)
    where   {column: value, or list of values; null: any}: the lines looked at
    like    a mapping that replaces keys of the cell, and `column`: only lines that agree in this column with the line that the
            changed cell finds
    best    "max COLUMN" or "min COLUMN": of several lines, the one to take
    value   column of the number; or several: the first one that the table has
    over    a mapping that replaces keys of the cell: the number is divided by that other cell's (a speed-up)
    form    format of the number, "{:.2f}"
    scale   factor of the number before it is shown
    optional  whether there may be no such line: a setting that the paper's table leaves out
    note    column whose entry is shown behind the number: the setting that was chosen
    of_pair the pair of the paper whose number it is: nothing is shown where another one of the paper's pairs ran
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import InputError, unknown_name
from toolkit.lines import first_line

CELL_KEYS = (
    "run", "runs", "pair", "table", "where", "like", "best", "value", "over", "form", "scale", "note", "optional", "of_pair",
)  # fmt: skip
AXES = ("x", "y", "x_label", "y_label", "better")  # of a figure, and of a panel that has others
MERGED = ("where", "over")
Source = Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper as numbers: row `left` over row `right`, per column; or columns, per row (those in `only`)."""

    text: str
    left: str
    right: str
    only: Sequence[str] = ()


@dataclass(frozen=True)
class Figure:
    """A figure: one panel per entry of `panels`, one line per entry of `curves`, each told as a cell is.

    x, y    columns, or several: the first one that the table has; a panel can have its own, and its own labels
    points  markers alone: settings that no line connects
    better  "more x, less y": lines connect the settings that no other one of their curve beats
    """

    x: str | Sequence[str]
    y: str | Sequence[str]
    x_label: str
    y_label: str
    panels: Mapping[str, Source]
    curves: Mapping[str, Source]
    points: bool = False
    better: str | None = None


@dataclass(frozen=True)
class PaperTable:
    """One table or figure of a paper. Errors: InputError for unknown keys and for published figures of another shape."""

    paper: str
    item: str
    title: str
    experiment: str
    pairs: Sequence[str]
    differs: Sequence[str] = ()
    cell: Source = field(default_factory=dict)
    rows: Mapping[str, Source] = field(default_factory=dict)
    columns: Mapping[str, Source] = field(default_factory=dict)
    published: Mapping[str, Sequence[float | str | None]] = field(default_factory=dict)
    claims: Sequence[Claim] = ()
    figure: Figure | None = None

    def __post_init__(self) -> None:
        for name, numbers in self.published.items():
            if name not in self.rows:
                raise unknown_name(f"published figures of {self.item}: row", name, self.rows)
            if len(numbers) != len(self.columns):
                raise InputError(
                    f"published figures of {self.item}, row {name!r}: expected one per column ({len(self.columns)}; null "
                    f"where the paper has none), got {len(numbers)}"
                )
        for claim in self.claims:
            known, others = (self.columns, self.rows) if claim.left in self.columns else (self.rows, self.columns)
            for names, among in (((claim.left, claim.right), known), (claim.only, others)):
                for name in names:
                    if name not in among:
                        raise unknown_name(f"claims of {self.item}: row or column", name, among)
        for told in (self.cell, *self.rows.values(), *self.columns.values()):
            check_source(told, self.item)
        if not self.rows and self.figure is None:
            raise InputError(f"{self.item}: expected rows and columns, or a figure")

    def source(self, row: str, column: str) -> dict[str, Any]:
        """What tells the number of a cell."""
        return source_of(self.cell, self.rows[row] or {}, self.columns[column] or {})


def merged(*parts: Source) -> dict[str, Any]:
    """One mapping of several; the later ones win, `where` and `over` key by key."""
    whole: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = key in MERGED and isinstance(value, Mapping) and isinstance(whole.get(key), Mapping)
            whole[key] = merged(whole[key], value) if both else value
    return whole


def source_of(*parts: Source) -> dict[str, Any]:
    """`merged`, with the pair's name in the run's."""
    told = merged(*parts)
    if told.get("run") is not None:
        told["run"] = str(told["run"]).replace("{pair}", str(told.get("pair")))
    return told


def check_source(told: Source | None, item: str) -> None:
    """Raises InputError if a mapping has keys that no cell has."""
    for key in told or {}:
        if key not in CELL_KEYS:
            raise unknown_name(f"cells of {item}: key", key, CELL_KEYS)


def of_config(config: Mapping[str, Any]) -> PaperTable:
    """The specification in `conf/table/NAME.yaml`. Raises InputError for what it cannot mean."""
    told = dict(config)
    known = set(PaperTable.__dataclass_fields__)
    for key in told:
        if key not in known:
            raise unknown_name("table: key", key, known)
    missing = [key for key in ("paper", "item", "title", "experiment", "pairs") if key not in told]
    if missing:
        raise InputError(f"table: expected the keys {', '.join(missing)}, too (choose one with table=NAME)")
    told["claims"] = [_built(Claim, one, "claims") for one in told.get("claims") or ()]
    told["figure"] = _built(Figure, told["figure"], "figure") if told.get("figure") else None
    for key in ("rows", "columns"):
        told[key] = {str(name): source or {} for name, source in (told.get(key) or {}).items()}
    return PaperTable(**told)


def _built(kind: Any, given: Mapping[str, Any], what: str) -> Any:
    """A part of the specification from its keys. Raises InputError for keys that it does not have or lacks."""
    fields = kind.__dataclass_fields__
    for key in given:
        if key not in fields:
            raise unknown_name(f"table.{what}: key", key, fields)
    try:
        return kind(**given)
    except TypeError as error:
        raise InputError(f"table.{what}: {first_line(error)}") from None

"""Tables and figures of folders, ready for a page."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.tables.files import cell, markdown, numeric_columns

FIRST = ("results", "comparison", "frontier", "summary")  # tables made to be read come first


@dataclass(frozen=True)
class TableView:
    """A table ready to be shown; `rows` is None, and `note` says why, if it is not."""

    name: str
    note: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] | None = None
    numeric: Sequence[bool] = ()
    markdown: str = ""


@dataclass(frozen=True)
class FigureView:
    """A figure as the page's own data (None: it would make the page too large), and as a file beside the Markdown."""

    name: str
    file: str
    base64: str | None


def table_files(folder: Path) -> list[Path]:
    """The folder's tables, the one that was made to be read first."""
    rank = {name: number for number, name in enumerate(FIRST)}
    return sorted(folder.glob("*.csv"), key=lambda path: (rank.get(path.stem, len(FIRST)), path.name))


def figure_files(folder: Path) -> list[Path]:
    """The folder's figures, those in `figures/` too."""
    return sorted([*folder.glob("*.png"), *folder.glob("figures/*.png")])


def table_view(path: Path, max_cells: int) -> TableView:
    """The whole table of a CSV file. Larger ones, such as the single rows of a sweep, are named with their size."""
    try:
        frame = pd.read_csv(path)
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError):
        return TableView(path.stem, note=f"Missing: {path.name} could not be read as a table.")
    if frame.size > max_cells:
        return TableView(path.stem, note=f"{len(frame)} lines of {len(frame.columns)} columns, in {path.name} there.")
    return frame_view(path.stem, frame)


def frame_view(name: str, frame: pd.DataFrame) -> TableView:
    """A table in memory, whole."""
    rows = [[cell(value) for value in row] for row in frame.itertuples(index=False)]
    columns = [str(column) for column in frame.columns]
    return TableView(name, "", columns, rows, numeric_columns(rows, len(columns)), markdown(frame))


def figure_views(paths: Sequence[Path], number: int, report: Path, budget: int) -> list[FigureView]:
    """Copies beside the report; within the page as far as `budget` bytes suffice."""
    views = []
    for path in paths:
        copy = report / "figures" / f"{number}-{path.name}"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        size = path.stat().st_size * 4 // 3
        budget -= size
        data = base64.b64encode(path.read_bytes()).decode() if budget >= 0 else None
        views.append(FigureView(path.stem, copy.relative_to(report).as_posix(), data))
    return views

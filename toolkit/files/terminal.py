"""Tables on the console: the first columns that fit; no number is ever cut or broken over lines."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

WIDTH = 120  # where stdout is not a terminal and COLUMNS says nothing
NARROWEST = 24  # texts that are longer are broken over lines, and headings that are longer than TITLE
TITLE = 10
GAP = 2  # blanks between columns
# A text may be broken after a blank, or after one of these signs unless it stands inside a number.
BREAK = re.compile(r"(?<= )(?=\S)|(?<=[,;/=:_])(?![\s\d])|(?<=[^\d\s][,;/=:_])(?=\d)")


def width() -> int:
    """Columns of the terminal; where stdout is not one, COLUMNS or 120."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size((WIDTH, 24)).columns
    return WIDTH


def print_table(
    title: str,
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Sequence[bool] = (),
    rest: Path | str | None = None,
) -> None:
    """Print the columns that fit, and one line on those that do not. A column that does not fit is passed over.

    names    one heading per column, the most important first; the first column is always shown
    rows     one text per column
    numeric  which columns are numbers: aligned right, never broken; () for none
    rest     the file that has all columns
    """
    from rich.console import Console
    from rich.table import Table

    numbers = [*numeric, *[False] * (len(names) - len(numeric))]
    columns = [[row[i] for row in rows] for i in range(len(names))]
    needed = [_narrowest(name, column, number) for name, column, number in zip(names, columns, numbers, strict=True)]
    visible = _fitting(needed, width())
    widths = _widened(
        {i: needed[i] for i in visible}, {i: max(map(_cells, ("", *columns[i]))) for i in visible}, width()
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i in visible:
        heading = "\n".join(_broken(names[i], widths[i]))
        table.add_column(heading, justify="right" if numbers[i] else "left", width=widths[i], no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] if numbers[i] else "\n".join(_broken(row[i], widths[i])) for i in visible))
    print()
    total = sum(widths.values()) + GAP * (len(visible) - 1)
    Console(width=max(width(), total), highlight=False, markup=False).print(table)
    if len(visible) < len(names):
        where = "a wider terminal or COLUMNS=200 shows more" if rest is None else f"all of them: {rest}"
        print(f"{len(names) - len(visible)} of {len(names)} columns do not fit; {where}")


def _fitting(needed: Sequence[int], available: int) -> list[int]:
    """Indices of the columns to show, in order."""
    visible: list[int] = []
    used = 0
    for i, cells in enumerate(needed):
        if not visible or used + GAP + cells <= available:
            used += cells + (GAP if visible else 0)
            visible.append(i)
    return visible


def _narrowest(name: str, column: Iterable[str], number: bool) -> int:
    """The fewest cells that a column needs: whole numbers, whole parts of texts, a heading that is broken between words."""
    body = [_cells(text) if number else _needed(text, NARROWEST) for text in column]
    return max([_needed(name, max([*body, TITLE])), *body])


def _needed(text: str, comfortable: int) -> int:
    """The width of a text that is broken where it is longer than `comfortable`."""
    return max(map(_cells, _broken(text, comfortable)), default=0)


def _widened(widths: dict[int, int], longest: dict[int, int], available: int) -> dict[int, int]:
    """What is left of the line goes to the columns that would be wider, from the first on."""
    left = available - sum(widths.values()) - GAP * (len(widths) - 1)
    widened = dict(widths)
    for i, now in widths.items():
        more = min(max(longest[i] - now, 0), max(left, 0))
        widened[i], left = now + more, left - more
    return widened


def _broken(text: str, most: int) -> list[str]:
    """Lines of at most `most` cells, broken between parts alone: a part that is longer has a line of its own."""
    lines = [""]
    for part in BREAK.split(text):
        if lines[-1] and _cells((lines[-1] + part).rstrip()) > most:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def _cells(text: str) -> int:
    """Cells of the terminal that a text takes."""
    from rich.cells import cell_len

    return cell_len(text)

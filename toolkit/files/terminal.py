"""Tables on the console: the first columns that fit; no number is ever cut or broken over lines."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.files.text import visible

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
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    title, names, rows = visible(title), [*map(visible, names)], [[*map(visible, row)] for row in rows]
    numbers = [*numeric, *[False] * (len(names) - len(numeric))]
    columns = [[row[i] for row in rows] for i in range(len(names))]
    needed = []  # the fewest cells: whole numbers, whole parts of texts, a heading that is broken between words
    for name, column, is_number in zip(names, columns, numbers, strict=True):
        body = [cell_len(text) if is_number else _needed(text, NARROWEST) for text in column]
        needed.append(max([_needed(name, max([*body, TITLE])), *body]))
    fitting: list[int] = []
    used = -GAP
    for i, cells in enumerate(needed):
        if not fitting or used + GAP + cells <= width():
            used += GAP + cells
            fitting.append(i)
    widths = {i: needed[i] for i in fitting}
    for i in fitting:  # what is left of the line goes to the columns that would be wider, from the first on
        longest = max(map(cell_len, ("", *columns[i])))
        more = min(max(longest - needed[i], 0), max(width() - used, 0))
        widths[i], used = needed[i] + more, used + more
    table = Table(box=None, pad_edge=False)
    for i in fitting:
        heading = "\n".join(_broken(names[i], widths[i]))
        table.add_column(heading, justify="right" if numbers[i] else "left", width=widths[i], no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] if numbers[i] else "\n".join(_broken(row[i], widths[i])) for i in fitting))
    print()
    total = sum(widths.values()) + GAP * (len(fitting) - 1)
    console = Console(width=max(width(), total), highlight=False, markup=False)
    if title:
        console.print(title, style="bold")  # on its own: a table's title is broken at the table's width
    console.print(table)
    if len(fitting) < len(names):
        where = "a wider terminal or COLUMNS=200 shows more" if rest is None else f"all of them: {rest}"
        print(f"{len(names) - len(fitting)} of {len(names)} columns do not fit; {where}")


def _needed(text: str, comfortable: int) -> int:
    """The width of a text that is broken where it is longer than `comfortable`."""
    from rich.cells import cell_len

    return max(map(cell_len, _broken(text, comfortable)), default=0)


def _broken(text: str, most: int) -> list[str]:
    """Lines of at most `most` cells, broken between parts alone: a part that is longer has a line of its own."""
    from rich.cells import cell_len

    lines = [""]
    for part in BREAK.split(text):
        if lines[-1] and cell_len((lines[-1] + part).rstrip()) > most:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]

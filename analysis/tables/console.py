"""Tables and pages of commands on the console, as wide as the terminal; the whole tables are in files."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.tables.files import cell, numeric_columns
from toolkit.files.terminal import print_table
from toolkit.files.text import lines_of

BAR = re.compile(r"(?<!\\)\|")  # between columns of Markdown


def show(frame: pd.DataFrame, title: str, rest: Path | str | None = None, first: Sequence[str] = ()) -> None:
    """Print a table with the columns that fit.

    rest   the file that has all columns
    first  the most important columns, in order; the others follow as they stand
    """
    front = [name for name in first if name in frame]
    ordered = frame[[*front, *(name for name in frame.columns if name not in front)]]
    rows = [[cell(value) for value in row] for row in ordered.itertuples(index=False)]
    names = list(map(str, ordered.columns))
    print_table(title, names, rows, numeric_columns(rows, len(names)), rest)


def show_page(path: Path) -> None:
    """Print a Markdown page; its tables as `show` does."""
    table: list[list[str]] = []
    for line in [*lines_of(path.read_text(encoding="utf-8")), ""]:
        if line.startswith("| "):
            table.append([_plain(text) for text in BAR.split(line)[1:-1]])
            continue
        if table:
            names, _, *rows = table
            print_table("", names, rows, numeric_columns(rows, len(names)), path)
            table = []
        print(line)


def _plain(text: str) -> str:
    """The text that `as_markdown_text` escaped."""
    return html.unescape(re.sub(r"\\([|`(])", r"\1", text.strip()))

"""Lines of text, split at newline characters only.

`str.splitlines` also splits at U+0085, U+2028, form feeds and others, which texts may hold. A test forbids it everywhere.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def lines_of(text: str, keep_ends: bool = False) -> list[str]:
    """The lines of a text; no empty one after the last newline."""
    lines = text.split("\n")
    whole = [f"{line}\n" if keep_ends else line for line in lines[:-1]]
    return [*whole, lines[-1]] if lines[-1] else whole


def first_line(error: object) -> str:
    """The first line of what an error says; its kind if it says nothing."""
    return next((line.strip() for line in str(error).split("\n") if line.strip()), type(error).__name__)


def as_csv(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table as CSV with a line of names; a value that a row lacks is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()

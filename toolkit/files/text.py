"""Lines of text, split at newline characters only, and text as people see it.

`str.splitlines` also splits at U+0085, U+2028, form feeds and others, which texts may hold. A test forbids it everywhere.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import InputError

# Characters that are not seen but change what is, as signs: control characters, whose bytes end some readers' pages or change
# what a terminal shows, and those that turn the direction of all that follows (U+202E and its like).
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
TURNING = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
VISIBLE |= dict.fromkeys((*range(128, 160), *TURNING), 0xFFFD)


def visible(text: str) -> str:
    """Text of a model, a prompt or a user for a page, a figure or a terminal."""
    return text.translate(VISIBLE)


def lines_of(text: str, keep_ends: bool = False) -> list[str]:
    """The lines of a text; no empty one after the last newline."""
    lines = text.split("\n")
    whole = [f"{line}\n" if keep_ends else line for line in lines[:-1]]
    return [*whole, lines[-1]] if lines[-1] else whole


def first_line(error: object) -> str:
    """The first line of what an error says; its kind if it says nothing."""
    return next((line.strip() for line in str(error).split("\n") if line.strip()), type(error).__name__)


def or_of_file(text: str, name: str) -> str:
    """A text, or the content of the file that it names. Raises InputError for a file that is no text; name: of the setting."""
    if not os.path.isfile(text):  # so it is of texts that are no paths, as too long ones
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: expected UTF-8 text in {text}: {error}") from None


def as_csv(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table as CSV with a line of names; a value that a row lacks is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def shown(source: Path | str) -> str:
    """A model or file as a card names it: a hub name as it is, of a path on this machine its last two parts."""
    path = Path(source)
    return "/".join(path.parts[-2:]) if path.is_absolute() or path.exists() else str(source)

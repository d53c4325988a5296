"""Tables: written as Parquet (exact) and CSV (readable), rendered as Markdown."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from toolkit.errors import InputError
from toolkit.files import journal
from toolkit.files.atomic import write_atomic
from toolkit.files.text import first_line

BREAKS = re.compile(r"[\r\n\v\f\x85\u2028\u2029]+")  # what some reader takes for the end of a line


def save_table(frame: pd.DataFrame, folder: Path, name: str) -> None:
    """Write <folder>/<name>.parquet and .csv; lists become JSON in the CSV."""
    write_parquet(frame, folder / f"{name}.parquet")
    flat = frame.copy()
    for column in flat.columns:
        if flat[column].map(_is_list).any():
            flat[column] = flat[column].map(
                lambda value: json.dumps(np.asarray(value).tolist()) if _is_list(value) else value
            )
    write_atomic(folder / f"{name}.csv", lambda path: flat.to_csv(path, index=False))


def read_table(folder: Path | str, name: str) -> pd.DataFrame:
    """Read <folder>/<name>.parquet. Raises InputError if it is missing or broken."""
    path = Path(folder) / f"{name}.parquet"
    if not path.exists():
        raise InputError(f"expected a table at {path}, found none")
    return read_parquet(path)


def write_parquet(frame: pd.DataFrame, path: Path) -> Path:
    """One Parquet file, whole or not at all. Written through a file object: a path could be taken for an address."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            frame.to_parquet(file, index=False, write_page_checksum=True)

    return write_atomic(path, write)


def read_parquet(path: Path | str, mend: str = "delete it and run the command that made it again") -> pd.DataFrame:
    """A Parquet file. Raises InputError if it is missing, empty, cut short or not what was written."""
    path = Path(path)
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path} is empty: expected a table; {mend}")
        journal.check(path, mend)
        with open(path, "rb") as file:
            return pd.read_parquet(file, page_checksum_verification=True)
    except FileNotFoundError:
        raise InputError(f"expected a table at {path}, found none") from None
    except InputError:
        raise
    except Exception as error:  # Arrow has its own for what is not a Parquet file
        raise InputError(f"{path} is not a whole Parquet file ({first_line(error)}); {mend}") from error


def markdown(frame: pd.DataFrame) -> str:
    """A Markdown table; numbers are aligned right. Texts are shown as they are: no tag, link or column comes of them."""
    names = [as_markdown_text(str(name)) for name in frame.columns]
    rows = [[as_markdown_text(cell(value)) for value in row] for row in frame.itertuples(index=False)]
    rules = ["---:" if numeric else "---" for numeric in numeric_columns(rows, len(names))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (names, rules, *rows))


def with_interval(value: float, low: float, high: float) -> str:
    """ "0.823 [0.790, 0.853]": with the digits that the interval's width makes worth reading, at most four decimals.

    "" if there is no value; the value alone if it has no interval.
    """
    if np.isnan(value):
        return ""
    if np.isnan(low) or np.isnan(high):
        return f"{value:.3g}"
    decimals = 4 if high <= low else min(max(1 - math.floor(math.log10(high - low)), 0), 4)
    return f"{value:.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]"


def numeric_columns(rows: list[list[str]], width: int) -> list[bool]:
    """Which columns of text cells hold numbers, possibly with intervals, and nothing else."""
    columns = [[row[i] for row in rows if row[i]] for i in range(width)]
    return [bool(column) and all(re.match(r"[+-]?[\d.]", text) for text in column) for column in columns]


def cell(value: Any) -> str:
    """One cell as text: four significant digits, nothing for missing values, one line."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return BREAKS.sub(" ", str(value))


def as_markdown_text(text: str) -> str:
    """Text of a model, a prompt or a user for Markdown. It is shown, and never read as markup or as the end of a cell."""
    escaped = html.escape(text, quote=False)
    return BREAKS.sub(" ", escaped.replace("|", "\\|").replace("`", "\\`").replace("](", "]\\("))


def _is_list(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, str | bytes)

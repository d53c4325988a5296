"""Tables: written as Parquet (exact) and CSV (readable), rendered as Markdown."""

from __future__ import annotations

import html
import json
import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.tables.bootstrap import ENOUGH, brackets
from toolkit.errors import InputError
from toolkit.files import journal
from toolkit.files.atomic import write_atomic
from toolkit.files.terminal import print_table, width
from toolkit.files.text import first_line, lines_of, visible

BREAKS = re.compile(r"[\r\n\v\f\x85\u2028\u2029]+")  # what some reader takes for the end of a line
BAR = re.compile(r"(?<!\\)\|")  # between columns of Markdown
DEFINITIONS = {
    "throughput": "tokens per target time: produced tokens per time of a target forward pass, "
    "N / (c * draft calls + target calls), each summed over prompts first; plain decoding has 1",
    "N": "produced tokens, the end of text included; what follows it in an accepted run is discarded, not produced",
    "cost ratio c": "time of a draft forward pass / time of a target forward pass",
    "block efficiency": "N / target calls; the extra token (corrected or bonus) is included",
    "discard rate": "discarded tokens / N; every round discards drafted + 1 - produced tokens",
    "verification rate": "target calls / N",
    "setting": "per method the one of highest throughput on the dev prompts; every number is of the test prompts",
    "interval": "Student's t over prompts, standard error by bootstrap; ratios are paired (the same resampled prompts). "
    f"[a to b] is a range: of fewer than {ENOUGH} prompts or groups the least and the largest figure of a single one",
    "way to the oracle": "(throughput - best fixed K's) / (oracle's - best fixed K's)",
    "oracle": "a policy that never drafts a token that will be rejected; expected counts over the acceptance draws, "
    "given the target's own responses. Where drafting does not pay (c >= 1), it decodes autoregressively",
    "upper bound": "a policy that knows p and q at every position, on path and after rejections, but not the acceptance "
    "draws. It drafts on while the probability that the next token enters the text reaches a price chosen on dev. Where "
    "drafting does not pay, it decodes autoregressively",
    "way to the upper bound": "(throughput - best fixed K's) / (upper bound's - best fixed K's)",
    "fixed K per prompt": "the best fixed K of every test prompt, with hindsight: what knowing a prompt's difficulty is worth",
    "undominated": "no other lossless setting is as good in both discard and verification rate and better in one",
}


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


def read_parquet(path: Path | str) -> pd.DataFrame:
    """A Parquet file. Raises InputError if it is missing, empty, cut short or not what was written."""
    path, hint = Path(path), "delete it and run the command that made it again"
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path} is empty: expected a table; {hint}")
        journal.check(path, hint)
        with open(path, "rb") as file:
            return pd.read_parquet(file, page_checksum_verification=True)
    except FileNotFoundError:
        raise InputError(f"expected a table at {path}, found none") from None
    except InputError:
        raise
    except Exception as error:  # Arrow has its own for what is not a Parquet file
        raise InputError(f"{path} is not a whole Parquet file ({first_line(error)}); {hint}") from error


def markdown(frame: pd.DataFrame) -> str:
    """A Markdown table; numbers are aligned right. Texts are shown as they are: no tag, link or column comes of them."""
    names = [as_markdown_text(str(name)) for name in frame.columns]
    rows = [[as_markdown_text(cell(value)) for value in row] for row in frame.itertuples(index=False)]
    rules = ["---:" if numeric else "---" for numeric in numeric_columns(rows, len(names))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (names, rules, *rows))


def with_interval(value: float, low: float, high: float, number: int = ENOUGH) -> str:
    """ "0.823 [0.790, 0.853]", with the digits that the width makes worth reading; "" without a value.

    number  of prompts or groups: "0.823 [0.790 to 0.853]" is the range of few
    """
    if np.isnan(value):
        return ""
    if np.isnan(low) or np.isnan(high):
        return f"{value:.3g}"
    decimals = 4 if high <= low else min(max(1 - math.floor(math.log10(high - low)), 0), 4)
    return f"{value:.{decimals}f} " + brackets(f"{low:.{decimals}f}", f"{high:.{decimals}f}", number)


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
    escaped = html.escape(visible(BREAKS.sub(" ", text)), quote=False)
    return escaped.replace("|", "\\|").replace("`", "\\`").replace("](", "]\\(")


def _is_list(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, str | bytes)


def show(frame: pd.DataFrame, title: str, rest: Path | str | None = None, first: Sequence[str] = ()) -> None:
    """Print a table with the columns that fit, the `first` ones first. rest: the file that has all columns."""
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
            cells = (text.strip() for text in BAR.split(line)[1:-1])  # what `as_markdown_text` escaped, as it was
            table.append([html.unescape(re.sub(r"\\([|`(])", r"\1", text)) for text in cells])
            continue
        if table:
            names, _, *rows = table
            print_table("", names, rows, numeric_columns(rows, len(names)), path)
            table = []
        print(line)


def definitions_text() -> str:
    column = max(map(len, DEFINITIONS)) + 4
    lines = [f"  {term:<{column - 2}}{meaning}" for term, meaning in DEFINITIONS.items()]
    room = max(width(), 2 * column)
    return "\n".join(textwrap.fill(line, room, subsequent_indent=" " * column) for line in lines)

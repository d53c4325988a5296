"""Tables and pages of commands on the console, as wide as the terminal; whole tables are in files. And what numbers mean."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.tables.files import cell, numeric_columns
from toolkit.files.terminal import print_table, width
from toolkit.files.text import lines_of

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
    "interval": "Student's t over prompts, standard error by bootstrap; ratios are paired (the same resampled prompts)",
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
            cells = (text.strip() for text in BAR.split(line)[1:-1])  # what `as_markdown_text` escaped, as it was
            table.append([html.unescape(re.sub(r"\\([|`(])", r"\1", text)) for text in cells])
            continue
        if table:
            names, _, *rows = table
            print_table("", names, rows, numeric_columns(rows, len(names)), path)
            table = []
        print(line)


def definitions_markdown() -> str:
    """The definitions as a Markdown list."""
    return "\n".join(f"- **{term}**: {meaning}." for term, meaning in DEFINITIONS.items())


def definitions_text() -> str:
    """The definitions as lines for a terminal, as wide as it is."""
    column = max(map(len, DEFINITIONS)) + 4
    lines = [f"  {term:<{column - 2}}{meaning}" for term, meaning in DEFINITIONS.items()]
    room = max(width(), 2 * column)
    return "\n".join(textwrap.fill(line, room, subsequent_indent=" " * column) for line in lines)

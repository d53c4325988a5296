"""python -m benchmarks.pages: write the tables of documentation pages again, from the result files in docs/tables/.

A page holds a table NAME between `<!-- table: NAME -->` and `<!-- end -->`. Its figures are docs/tables/NAME.csv, in the order
of the page. `pages.toml` says where they come from and what each column shows. In a column's pattern, `{score:.3f}` is a value
of the row; what is not a number stands as it is. `|` parts the pattern, and a part without its values is left out. `rows` names
a function of the file's rows that gives those of the page.

Change a figure in its CSV file, from the output of the command that made it, then run this. A test compares pages with it.
"""

from __future__ import annotations

import csv
import re
import string
import tomllib
from collections.abc import Mapping
from pathlib import Path

from benchmarks.evidence import ROOT
from toolkit.drafts.kinds import named_object
from toolkit.errors import InputError, answer_signals
from toolkit.files.atomic import write_text

DOCS = ROOT / "docs"
FORMATS = Path(__file__).with_suffix(".toml")
TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)


class Value(str):
    """A value of a CSV file. With a format it is shown as a number where it is one, without the zero before a point."""

    def __format__(self, spec: str) -> str:
        try:
            return re.sub(r"^([+-]?)0(?=\.)", r"\1", format(float(self), spec)) if spec else str(self)
        except ValueError:
            return str(self)


def cell(pattern: str, row: Mapping[str, str]) -> str:
    """A row's text in a column, of those parts of the pattern that have all values."""
    parts = []
    for part in pattern.split("|"):
        names = [name for _, name, _, _ in string.Formatter().parse(part) if name]
        if all(row[name] for name in names):
            parts.append(part.format(**{name: Value(row[name]) for name in names}))
    return "".join(parts)


def table(name: str) -> str:
    """A table in Markdown. Raises InputError for a name without columns."""
    formats = tomllib.loads(FORMATS.read_text("utf-8"))
    if name not in formats:
        raise InputError(f"{FORMATS.name}: expected a table {name}, for a page names it; got {', '.join(formats)}")
    headers, patterns = zip(*formats[name]["columns"], strict=True)
    with (DOCS / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        values = list(csv.DictReader(file))
    if "rows" in formats[name]:
        values = named_object(formats[name]["rows"])(values)
    rows = [[cell(pattern, row) for pattern in patterns] for row in values]
    lines = ["|" + "".join(f" {text} |" if text else " |" for text in cells) for cells in (headers, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(headers), *lines[1:]])


def written(text: str) -> str:
    """A page's text with all of its tables written again."""
    return TABLE.sub(lambda part: part[1] + table(part[2]) + part[3], text)


def main() -> None:
    """Write all pages that hold tables."""
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text("utf-8")
        if TABLE.search(text):
            write_text(page, written(text))
            print(f"output: {page}")


if __name__ == "__main__":
    answer_signals()
    main()

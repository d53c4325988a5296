"""The sentence that each page of docs/evidence opens with: `python -m benchmarks.evidence --openings` puts them in front.

The sentences are written by hand in conclusions.toml. Every number of a sentence has to stand in the page's figures. A page
that is made again with other figures loses its sentence until the sentence is mended. This program and a test say so.
"""

from __future__ import annotations

import re
import sys
import tomllib
from inspect import cleandoc
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "docs" / "evidence"
COMMAND = "`python -m benchmarks.evidence"
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:e-?\d+)?%?")
SMALL = 10  # whole numbers below this are counted, not measured, and may be written out


def conclusions() -> dict[str, str]:
    """The sentences by page."""
    with (HERE / "conclusions.toml").open("rb") as file:
        return tomllib.load(file)


def missing_numbers(sentence: str, body: str) -> list[str]:
    """Numbers of a sentence that do not stand in a page: whole numbers below SMALL and names in backticks are left out."""
    told = re.sub(r"`[^`]*`|\(c = [\d.]+\)|temperature \d", "", sentence)
    there = {_value(number) for number in NUMBER.findall(body)}
    return [number for number in NUMBER.findall(told) if _counts(number) and _value(number) not in there]


def opening(name: str, about: str, body: str) -> str:
    """A page's first lines: title, conclusion, what it shows. The conclusion is left out if its numbers are others'."""
    sentence = conclusions().get(name)
    if sentence is None:
        print(f"{name}: no conclusion in {HERE.name}/conclusions.toml", file=sys.stderr)
    elif missing := missing_numbers(sentence, body):
        print(f"{name}: the conclusion speaks of {', '.join(missing)}, the page does not: mend it", file=sys.stderr)
        sentence = None
    return "\n\n".join([f"# {name}", *([sentence] if sentence else []), cleandoc(about)]) + "\n\n"


def _value(number: str) -> float:
    return abs(float(number.replace(",", "").removesuffix("%")))


def _counts(number: str) -> bool:
    return not (number.isdigit() and int(number) < SMALL)

"""Ranges of numbers, written once, beside the type: `threshold: Annotated[float, Probability] = 0.4`.

The command line's check reads them without importing the class; the class itself asks for them with
`toolkit.config.arguments.check_ranges`.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union


@dataclass(frozen=True)
class Interval:
    """The numbers from `low` to `high`; `ends` are the brackets, "(" and ")" leave the end itself out."""

    low: float
    high: float
    ends: str = "[]"
    what: str = "a number"

    def __contains__(self, value: Any) -> bool:
        above = value > self.low if self.ends[0] == "(" else value >= self.low
        return above and (value < self.high if self.ends[1] == ")" else value <= self.high)

    def __str__(self) -> str:
        """As a message says it: "at least 0", "a number above 0", "a number in [0, 1]"."""
        if math.isinf(self.high):
            return f"{'a number above' if self.ends[0] == '(' else 'at least'} {self.low:g}"
        return f"{self.what} {self.brackets}"

    @property
    def clause(self) -> str:
        """Behind "a number": "of at least 0", "above 0", "in [0, 1]"."""
        if math.isinf(self.high):
            return f"{'above' if self.ends[0] == '(' else 'of at least'} {self.low:g}"
        return self.brackets

    @property
    def brackets(self) -> str:
        """As a table says it: "in [0, 1]", "> 0", ">= 0"."""
        if math.isinf(self.high):
            return f"{'>' if self.ends[0] == '(' else '>='} {self.low:g}"
        return f"in {self.ends[0]}{self.low:g}, {self.high:g}{self.ends[1]}"


def Between(low: float, high: float, ends: str = "[]") -> Interval:
    """From `low` to `high`; with ends="(]" without `low` itself, and so on."""
    return Interval(low, high, ends)


def AtLeast(low: float) -> Interval:
    """`low` or more, and finite."""
    return Interval(low, math.inf, "[)")


def Above(low: float) -> Interval:
    """More than `low`, and finite."""
    return Interval(low, math.inf, "()")


Probability = Interval(0, 1, what="a probability")


def intervals(annotation: Any) -> Iterator[Interval]:
    """The ranges that an annotation puts on a number, also within a union."""
    if typing.get_origin(annotation) is Annotated:
        yield from (note for note in annotation.__metadata__ if isinstance(note, Interval))
    elif typing.get_origin(annotation) in (Union, types.UnionType):
        for option in typing.get_args(annotation):
            yield from intervals(option)

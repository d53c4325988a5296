"""Notes beside a type: the range of a number, the names of a choice, what a file's content means for the result.

    threshold: Annotated[float, Probability, "drafting stops below it"] = 0.4

The command line's check and `--help` read a note from the class (`toolkit.config.classes`), which asks for the ranges with
`toolkit.config.values.check_ranges`. A text among the notes is the key's meaning.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Union

UNIONS = (Union, types.UnionType)


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
        return self._worded(f"{self.what} in", "a number above", "at least")

    @property
    def clause(self) -> str:
        """After "a number": "of at least 0", "above 0", "in [0, 1]"."""
        return self._worded("in", "above", "of at least")

    @property
    def brackets(self) -> str:
        """As a table says it: "in [0, 1]", "> 0", ">= 0"."""
        return self._worded("in", ">", ">=")

    def _worded(self, within: str, above: str, at_least: str) -> str:
        if math.isinf(self.high):
            return f"{above if self.ends[0] == '(' else at_least} {self.low:g}"
        return f"{within} {self.ends[0]}{self.low:g}, {self.high:.12g}{self.ends[1]}"


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


@dataclass(frozen=True)
class Choice:
    """The name of a file in a config group, the user's own included; `kind`: how messages call it."""

    group: str
    kind: str

    def __contains__(self, value: object) -> bool:
        return value in self.names()

    def names(self) -> list[str]:
        from toolkit.config.files import choices

        return choices(self.group)


@dataclass(frozen=True)
class Like:
    """A pattern of the whole text; `what`: how messages call it."""

    pattern: str
    what: str

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None


@dataclass(frozen=True)
class Called:
    """How messages call what is expected."""

    text: str


@dataclass(frozen=True)
class ConfigGroup:
    """A key that is chosen in `conf/<name>/`. `built`: a class with its arguments; `nullable`: or nothing.

    Without a name there is nothing to choose from: the class stands in the command's own yaml.
    """

    name: str = ""
    built: bool = True
    nullable: bool = False


# -- what is read: its content determines the result, and the place where it is stored does not ------------------------


@dataclass(frozen=True)
class File:
    """A file, files by a pattern (DIR/*.jsonl), an output folder, or any other folder with all that is below it."""


@dataclass(frozen=True)
class Head:
    """A folder of an acceptance head, or a run's with one in head/."""


@dataclass(frozen=True)
class Model:
    """Weights: a folder, toy/target, toy/draft, or a name on the hub with the revision that the key `revision` holds."""

    revision: str = "revision"
    kind: ClassVar[str] = "model"


@dataclass(frozen=True)
class HubData:
    """A folder, or a name on the hub at the revision that `revision` holds; `instead`: keys of files that are read for it."""

    instead: tuple[str, ...] = ()
    kind: str = "dataset"
    revision: ClassVar[str] = "revision"


@dataclass(frozen=True)
class Assumed:
    """What null stands for, if nothing better is measured: null and this value name the same output folder."""

    value: float


@dataclass(frozen=True)
class Neutral:
    """The value at which a key that is younger than some output folders changes nothing: these have no such key."""

    value: Any


CONTENTS = (File, Head, Model, HubData)


@dataclass(frozen=True)
class Internal:
    """What the command itself fills in: `--help` does not list it."""


# -- keys -------------------------------------------------------------------------------------------------------------

REQUIRED = object()  # instead of a default


@dataclass(frozen=True)
class Key:
    """One key: its type (a typing object, with notes), what it means in a sentence, its default if it has one."""

    name: str
    annotation: Any = Any
    meaning: str = ""
    default: Any = REQUIRED


@dataclass(frozen=True)
class Keys:
    """The keys of one class, function or command.

    takes_any  further keys go through to something else (**kwargs)
    no_blanks  an empty text is no value: keys of commands name folders and choices
    """

    keys: Mapping[str, Key] = field(default_factory=dict)
    takes_any: bool = False
    no_blanks: bool = False


def notes(annotation: Any) -> list[Any]:
    """The notes of an annotation and of the options of a union; of nested ones, the outer one's come last."""
    if typing.get_origin(annotation) is Annotated:
        return [*notes(typing.get_args(annotation)[0]), *annotation.__metadata__]
    union = typing.get_origin(annotation) in UNIONS
    return [note for option in typing.get_args(annotation) for note in notes(option)] if union else []


def meaning_of(annotation: Any) -> str:
    """The text among the notes; of several the last one."""
    return next((note for note in reversed(notes(annotation)) if isinstance(note, str)), "")

"""What is known of a key: its type, meaning and default; and what a docstring says of keys."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.files.text import lines_of

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


def meanings_in(docstring: str, names: Iterable[str]) -> dict[str, str]:
    """What a docstring says of names.

    It is read from lines "name  meaning" (or "a, b  meaning"), which go on in deeper lines. For the other names it is
    read from "name: meaning", up to a semicolon.
    """
    one = "|".join(map(re.escape, names)) or "(?!)"
    start = re.compile(rf"^(\s*)((?:{one})(?:, (?:{one}))*)(?:  +|: +)(\S.*)$")
    inside = re.compile(rf"(?<=[.;,] )({one}): ([^;]+)")
    meanings: dict[str, str] = {}
    also: dict[str, str] = {}
    open_names: list[str] = []
    indent = 0
    for line in lines_of(textwrap.dedent(docstring)):
        also |= {match[1]: match[2] for match in inside.finditer(line)}
        if match := start.match(line):
            open_names, indent = match[2].split(", "), len(match[1])
            meanings |= dict.fromkeys(open_names, match[3])
        elif line.strip() and len(line) - len(line.lstrip()) > indent:
            meanings |= {name: f"{meanings[name]} {line.strip()}" for name in open_names}
        else:
            open_names = []
    cut = re.compile(rf"; (?:{one}): .*")
    return {name: cut.sub("", meaning).rstrip("; .") for name, meaning in (also | meanings).items()}

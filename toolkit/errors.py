"""Errors a user can fix.

InputError            what was expected, what came, how to fix it: one line
+-- StaleError        an output folder was made with another configuration or from other inputs
+-- DecodingError     some prompts could not be decoded; the others are in `.generations`
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from typing import Any, NoReturn

INTERRUPTED = 128 + 2  # the exit code that shells give a process that SIGINT has ended
NOT_NUMBERS = "the models' distributions hold values that are not numbers"
LONGEST = 80  # characters of a name that messages quote


class InputError(ValueError):
    """Bad input: the message is one line that says what was expected, what came and how to fix it."""


class StaleError(InputError):
    """An output folder holds work made with another configuration or from other inputs."""


class DecodingError(InputError):
    """Some rows failed while others finished. `generations` holds every row, failed ones with `.error` set."""

    def __init__(self, message: str, generations: list[Any]):
        super().__init__(message)
        self.generations = generations


def unknown_name(kind: str, name: str, names: Iterable[str], where: str = "") -> InputError:
    """The error for a name that resolves to nothing, with the nearest names that would. where: "in <place>"."""
    names = sorted(names)
    name = name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return InputError(f"unknown {kind} {name!r}{where and ' ' + where}: {hint}")


def warn(message: str) -> None:
    """Warn of something that a user can change, where it is called."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def interrupted() -> NoReturn:
    """End the process after Ctrl-C: one line says how to go on, the exit code is the shell's 130."""
    print("interrupted: what is finished is kept; run the same line again to go on", file=sys.stderr)
    sys.exit(INTERRUPTED)


def merged(old: str, new: str) -> NoReturn:
    """End the process of a command that became part of another one: one line names the successor, the exit code is 2."""
    print(f"error: {old} is part of another command now: python -m {new}", file=sys.stderr)
    sys.exit(2)

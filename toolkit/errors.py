"""Errors a user can fix.

InputError            what was expected, what came, how to fix it: one line
+-- StaleError        an output folder was made with another configuration or from other inputs
+-- DecodingError     some prompts could not be decoded; the others are in `.generations`
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable
from typing import Any, NoReturn

NOT_NUMBERS = "the models' distributions hold values that are not numbers"
LONGEST = 80  # characters of a name that messages quote
# Modules of the packages that pyproject.toml has in the extras `train` and `analysis`.
ANY = {"pandas", "pyarrow", "sklearn", "matplotlib", "wandb", "requests", "rich", "httpx"}
EXTRAS = {
    "train": {*ANY, "pytorch_lightning", "lightning_fabric", "torchmetrics", "datasets"},
    "analysis": {*ANY, "scipy", "textalloc", "altair", "vl_convert", "prometheus_client"},
}


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


def missing_package(error: ModuleNotFoundError, importer: str) -> str | None:
    """The line for a package of an extra that is not installed; None for any other.

    importer  dotted name of the module that needs it; of two extras that have the package its own is named
    """
    package = str(error.name).partition(".")[0]
    for extra in (importer.partition(".")[0], *EXTRAS):
        if package in EXTRAS.get(extra, ()):
            return f"{package} is not installed: pip install 'acceptance-toolkit[{extra}]'"
    return None


def warn(message: str) -> None:
    """Warn of something that a user can change, where it is called."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


class Terminated(KeyboardInterrupt):
    """SIGTERM (kill, Slurm, make): a command ends as after Ctrl-C."""


def answer_signals() -> None:
    """End this process, a command, with one line after Ctrl-C or SIGTERM, at any moment: 130 or 143.

    An InputError that nobody handles is one line, too, and ends it with 1.
    """
    usual = sys.excepthook, sys.unraisablehook

    def terminate(*_: Any) -> None:
        raise Terminated

    def uncaught(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if isinstance(error, KeyboardInterrupt):
            interrupted(error)
        if isinstance(error, InputError):
            print(f"error: {error}", file=sys.stderr)
        else:
            usual[0](kind, error, traceback)

    def lost(unraisable: sys.UnraisableHookArgs) -> None:
        """Send the signal again: no exception gets out of a finalizer or a weak reference's callback."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            threading.Timer(0.05, os.kill, (os.getpid(), signal_of(unraisable.exc_value))).start()
        else:
            usual[1](unraisable)

    signal.signal(signal.SIGTERM, terminate)
    sys.excepthook, sys.unraisablehook = uncaught, lost


def signal_of(interrupt: KeyboardInterrupt) -> signal.Signals:
    return signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT


def interrupted(interrupt: KeyboardInterrupt) -> NoReturn:
    """End the process: one line says how to go on, the exit code is the one that shells give to the signal."""
    number = signal_of(interrupt)
    signal.signal(number, signal.SIG_DFL)  # one more ends it at once
    word = "terminated" if number == signal.SIGTERM else "interrupted"
    print(f"{word}: what is finished is kept; run the same line again to go on", file=sys.stderr)
    sys.exit(exit_code(number))


def exit_code(number: int) -> int:
    """The exit code that shells give a process that a signal has ended."""
    return 128 + number

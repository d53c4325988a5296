"""Judging somebody else's Python: the program in one confined process, its tests in another, the verdict out of reach of both.

    tests' process  -- calls: names and literal arguments -->  program's process
                    <-- literal results, or exceptions -----
         |
         +-- verdict --> here

The program gets two pipes and nothing else: it can answer calls, so its answers count, and only they. The tests (code of a data
set) run behind the same walls (`confinement`). Both have limits of CPU time, memory, processes (none), files (none
written) and open files, set in the kernel. They are killed when the time is up.

This does not keep a program from learning what it is asked, or from answering by more than the arguments (it may count
calls). Nor does it hide the processor's caches or withstand a fault of the kernel. Use a virtual machine where that
matters.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO

from analysis.quality.confinement import Confined, Confinement, chosen, pipe
from analysis.quality.confinement.inside import frames
from toolkit.errors import InputError

PASSED, FAILED, UNSUPPORTED = "passed", "failed", "unsupported"


@dataclass(frozen=True)
class Limits:
    """seconds of wall clock (and, rounded up, of CPU), memory in MiB of each of the two processes."""

    seconds: float = 10.0
    memory: int = 512

    def __post_init__(self) -> None:
        if not self.seconds > 0 or self.memory < 64:
            raise InputError(
                f"expected seconds above 0 and memory of at least 64 MiB, got {self.seconds} and {self.memory}"
            )

    def for_kernel(self) -> dict[str, int]:
        """Names of `resource` with their values."""
        return {
            "RLIMIT_CPU": int(self.seconds) + 1,
            "RLIMIT_AS": self.memory * 2**20,
            "RLIMIT_FSIZE": 0,
            "RLIMIT_NOFILE": 32,
            "RLIMIT_CORE": 0,
            "RLIMIT_NPROC": 0,
        }


@dataclass(frozen=True)
class Tests:
    """What judges a program: code that passes if it runs to its end.

    code         calls the program's names: stand-ins that ask the program's process
    question     the data set's own code before it (imports and helpers); its names are never the program's
    entry_point  the function under test, if one is named
    """

    __test__ = False  # not for pytest

    code: str
    question: str = ""
    entry_point: str | None = None


@dataclass(frozen=True)
class Verdict:
    """kind: passed, failed, or unsupported: the tests cannot be run like this, whatever the program. reason: why not passed."""

    kind: str
    reason: str = ""


def run(program: str, tests: Tests, limits: Limits, confinement: Confinement | None = None) -> Verdict:
    """Run a program against its tests. Raises InputError if nothing can be confined or started here."""
    walls, bounds = confinement or chosen(), limits.for_kernel()
    payload = {"question": tests.question, "tests": tests.code, "entry_point": tests.entry_point}
    with ExitStack() as stack:
        (asked, ask), (answered, answer), (told, tell) = (pipe(stack) for _ in range(3))
        candidate = stack.enter_context(
            Confined("program", program.encode("utf-8", "replace").decode(), (asked, answer), bounds, walls)
        )
        judge = stack.enter_context(Confined("judge", payload, (ask, answered, tell), bounds, walls))
        for process in (candidate, judge):
            if why := process.ready():
                raise InputError(f"could not confine a process to run code ({walls}): {why}")
        if not frames.readable(told.fileno(), limits.seconds):
            return Verdict(FAILED, f"killed after {limits.seconds:g} s")
        kind, *reason = _read(told)
        if kind == "ended":
            return Verdict(FAILED, f"ended too soon, {candidate.how()}")
        return Verdict(kind, "".join(reason) or ("" if kind == PASSED else f"the tests ended too soon, {judge.how()}"))


def check(limits: Limits) -> Confinement:
    """The confinement in use. Raises InputError if there is none, or not even an empty program passes with these limits."""
    walls = chosen()
    verdict = run("def same(x): return x", Tests("assert same((1.5, [None])) == (1.5, [None])"), limits, walls)
    if verdict.kind != PASSED:
        raise InputError(
            f"an empty program does not pass with these limits ({verdict.reason}): give more seconds or memory"
        )
    return walls


def _read(told: FileIO) -> list[str]:
    """What the tests' process wrote; ["failed"] if it ended without a word."""
    text = told.read(2**16)
    return [str(word) for word in json.loads(text)] if text else [FAILED]

"""Running what a model wrote: a program and its tests in two confined processes, an SQL query in a third kind.

    tests' process  -- calls: names and literal arguments -->  program's process
                    <-- literal results, or exceptions -----
         |
         +-- verdict, with a nonce that this process alone is told --> here

Walls: bubblewrap if it is installed, else namespaces of our own (`namespaces`), else nothing is run. Inside are
Python's standard library and the system's shared libraries, read-only, and nothing else: no other file, no place to write, no
network, no other process, no environment. The kernel limits CPU time, memory and open files, and refuses new processes and
threads. Output is thrown away, answers are limited in length, and everything is killed when the time is up.

What this does not stop: faults of the kernel, the C library or SQLite; side channels (time, caches, load); the use of
memory and CPU within the limits; a program that learns the questions put to it, or answers by more than the arguments (it may
count calls). Tests that call the program in `__getitem__`, `__len__` or `__del__` of a class of their own can be skipped by an
exception that the interpreter swallows. Use a virtual machine where that matters.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from analysis.quality import inside
from toolkit.errors import InputError

PASSED, FAILED, UNSUPPORTED = "passed", "failed", "unsupported"
BUBBLEWRAP, NAMESPACES = "bubblewrap", "namespaces"
STARTING = 30.0  # seconds a process may take to be ready
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
BWRAP = "--unshare-all --unshare-user --die-with-parent --cap-drop ALL --uid 65534 --gid 65534".split()  # noqa: SIM905
TRIAL = """
import os, socket
def trial(path, pid):
    tries = {"a file": lambda: open(path), "writing": lambda: open("/written", "w"), "processes": os.fork}
    tries["the network"] = lambda: socket.socket(type=socket.SOCK_DGRAM).connect(("192.0.2.1", 9))
    tries["other processes"] = lambda: os.kill(pid, 0)
    for name, action in tries.items():
        try: action()
        except OSError: continue
        return name
"""


@dataclass(frozen=True)
class Limits:
    """seconds of wall clock (and, rounded up, of CPU), memory in MiB of each process."""

    seconds: float = 10.0
    memory: int = 512

    def __post_init__(self) -> None:
        if not self.seconds > 0 or self.memory < 64:
            raise InputError(
                f"expected seconds above 0 and memory of at least 64 MiB, got {self.seconds} and {self.memory}"
            )

    def for_kernel(self) -> dict[str, int]:
        """Names of `resource` with their values."""
        sizes = {"RLIMIT_AS": self.memory * 2**20, "RLIMIT_FSIZE": 64 * 2**20, "RLIMIT_CORE": 0}
        return {"RLIMIT_CPU": int(self.seconds) + 1, "RLIMIT_NOFILE": 32, "RLIMIT_NPROC": 0, **sizes}


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
class ProgramVerdict:
    """kind: passed, failed, or unsupported: the tests cannot be run like this, whatever the program. reason: why not passed."""

    kind: str
    reason: str = ""


class Confined:
    """A process behind walls, as a context that ends it.

    job    of `inside`, with its arguments
    pipes  to read from and to write into
    files  that it may read besides Python
    """

    def __init__(
        self, job: str, arguments: Sequence[Any], limits: Limits, walls: str,
        pipes: Sequence[int] = (), files: Sequence[str] = (),
    ):  # fmt: skip
        self.walls, self._output = walls, tempfile.TemporaryFile()  # noqa: SIM115, closed on leaving
        python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        library = os.path.dirname(os.path.dirname(os.__file__))
        paths = [path for path in dict.fromkeys((python, library, *LIBRARIES, *files)) if os.path.exists(path)]
        if walls == BUBBLEWRAP:
            before = [shutil.which("bwrap") or "bwrap", *BWRAP]
            before += [word for path in paths for word in ("--ro-bind", path, path)]
            before += ["--remount-ro", "/", "--chdir", "/"]
        else:
            before = [python, "-I", "-S", "-B", str(Path(__file__).with_name("namespaces.py")), *paths]
        command = [*before, "--", python, "-I", "-S", "-B", "-c", Path(inside.__file__).read_text("utf-8")]
        task = {"job": job, "arguments": arguments, "limits": limits.for_kernel(), "pipes": pipes}
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(task).encode("ascii"))
            file.seek(0)
            try:
                self.process = subprocess.Popen(
                    command, stdin=file, stdout=subprocess.DEVNULL, stderr=self._output,
                    cwd="/", env={"LANG": "C.UTF-8"}, pass_fds=pipes, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise InputError(f"could not start {before[0]} to run code: {error.strerror}") from None

    def output(self, seconds: float) -> str | None:
        """What it has written when it ends; None: it is late. Raises InputError if it could not be confined."""
        late = False
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
        self._output.seek(0)
        first, _, text = self._output.read().decode("utf-8", "replace").partition("\n")
        if first != inside.READY:
            words = " ".join([first, *text.split()])[-300:] or f"exit code {self.process.poll()}"
            raise InputError(f"could not confine a process to run code ({self.walls}): {words}")
        return None if late else text

    def __enter__(self) -> Confined:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._output.close()


def run(program: str, tests: Tests, limits: Limits, confinement: str | None = None) -> ProgramVerdict:
    """Run a program against its tests. Raises InputError if nothing can be confined or started here."""
    walls, nonce = confinement or chosen(), secrets.token_hex()
    source = program.encode("utf-8", "replace").decode()
    arguments = [nonce, limits.seconds, tests.question, tests.code, tests.entry_point]
    read_question, write_question = os.pipe()
    read_answer, write_answer = os.pipe()
    with ExitStack() as stack:
        try:
            candidate = stack.enter_context(Confined("program", [source], limits, walls, (read_question, write_answer)))
            judge = stack.enter_context(Confined("tests", arguments, limits, walls, (read_answer, write_question)))
        finally:
            for pipe in (read_question, write_question, read_answer, write_answer):
                os.close(pipe)
        text = judge.output(limits.seconds + STARTING)
        candidate.output(0)
    if text is None:
        return ProgramVerdict(FAILED, f"killed after {limits.seconds:g} s")
    if not text.startswith(f'["{nonce}"'):
        return ProgramVerdict(FAILED, "the tests ended too soon")
    return ProgramVerdict(*json.loads(text)[1:])


def problem(walls: str) -> str:
    """Why walls cannot be used here: they cannot be built, or let a program through; "" if they hold."""
    with tempfile.NamedTemporaryFile(prefix="forbidden-") as forbidden:
        os.chmod(forbidden.name, 0o666)  # the rights of files should not be what stops it
        code = f"reached = trial({forbidden.name!r}, {os.getpid()})\nassert reached is None, reached"
        try:
            verdict = run(TRIAL, Tests(code), Limits(STARTING), walls)
        except InputError as error:
            return str(error)
    reached = verdict.reason.removeprefix("AssertionError: ")
    return "" if verdict.kind == PASSED else f"{walls} let a program reach {reached}"


@cache
def chosen() -> str:
    """The walls that are used here. Raises InputError, in one line, if none hold."""
    if not sys.platform.startswith("linux"):
        raise InputError(f"running code that a model wrote needs Linux, this is {sys.platform}: use a container")
    problems = []
    for walls in (BUBBLEWRAP, NAMESPACES):
        problems.append(problem(walls))
        if not problems[-1]:
            return walls
    raise InputError(
        f"no confinement works here to run code that a model wrote in ({'; '.join(problems)}): install bubblewrap, or "
        "allow user namespaces (sysctl user.max_user_namespaces, kernel 5.12 or newer)"
    )


def check(limits: Limits) -> str:
    """The walls in use. Raises InputError if there are none, or not even an empty program passes with these limits."""
    walls = chosen()
    verdict = run("def same(x): return x", Tests("assert same((1.5, [None])) == (1.5, [None])"), limits, walls)
    if verdict.kind != PASSED:
        raise InputError(
            f"an empty program does not pass with these limits ({verdict.reason}): give more seconds or memory"
        )
    return walls

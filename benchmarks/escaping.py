"""python -m benchmarks.evidence sandbox: every program of `escapes`, against every confinement that works here.

A target to attack is built (`Arena`): a secret file, a folder, listening sockets. A program has been stopped if its
verdict is "failed" for the reason expected and nothing in the arena has changed. Besides, there must be no connection
and no process left.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import string
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from unittest import mock

from analysis.quality.confinement import Confinement, launch, mechanisms
from analysis.quality.confinement.inside.asking import CANNOT_CROSS
from analysis.quality.sandbox import FAILED, PASSED, Limits, Tests, Verdict, run
from benchmarks import query_escapes
from benchmarks.escapes import EXHAUSTING, FORGING, LATE, Escape
from benchmarks.outside_escapes import OUTSIDE, REAL

ALL = (*FORGING, *EXHAUSTING, *OUTSIDE)
LIMITS = Limits(seconds=2.0, memory=256)  # of programs that only the clock can stop
PATIENT = Limits(seconds=60.0, memory=256)  # of the others: a busy machine must not stop them before the wall does
PATIENCE = 10.0  # seconds for killed processes to be gone
COMBINATIONS = (
    Confinement(("bubblewrap", "landlock", "seccomp")),
    Confinement(("namespaces", "landlock", "seccomp")),
    Confinement(("landlock", "seccomp")),
)


class Arena:
    """What programs try to reach. `changes` says what they reached."""

    def __init__(self, folder: Path):
        self.folder, self.content = folder, secrets.token_hex(16)
        self.secret = folder / "secret.txt"
        self.secret.write_text(self.content)
        folder.chmod(0o777)  # what stops programs should not be the rights of files
        self.secret.chmod(0o666)
        self.abstract = f"arena-{secrets.token_hex(8)}"
        self.listening = [socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        places: list[Any] = [("127.0.0.1", 0), str(folder / "socket"), "\0" + self.abstract]
        for one, place in zip(self.listening, places, strict=True):
            one.bind(place)
            one.listen()
            one.setblocking(False)
        (folder / "socket").chmod(0o777)
        self.port = self.listening[0].getsockname()[1]
        self.datagrams.bind(("127.0.0.1", self.port))
        self.datagrams.setblocking(False)
        self.processes: list[int] = []
        self.before = self._state()

    def fill(self, text: str) -> str:
        """A program's text with the paths and ports of this arena."""
        known = {"secret": str(self.secret), "content": self.content, "folder": str(self.folder), "pid": os.getpid()}
        known |= {"port": self.port, "abstract": self.abstract, "here": __file__}
        pattern = "|".join(known)
        return re.sub(rf"\{{({pattern})(!r)?\}}", lambda m: repr(known[m[1]]) if m[2] else str(known[m[1]]), text)

    def changes(self) -> list[str]:
        """What has happened here that should not have; empty: nothing."""
        found = [] if self._state() == self.before else ["files have changed"]
        for one, name in zip(self.listening, ("TCP", "unix", "abstract unix"), strict=True):
            if _arrived(lambda one=one: one.accept()):  # type: ignore[misc]
                found.append(f"somebody connected by {name}")
        if _arrived(lambda: self.datagrams.recv(9)):
            found.append("a datagram came")
        deadline = monotonic() + PATIENCE
        while (remaining := left(self.processes)) and monotonic() < deadline:
            sleep(0.01)  # the killed are not gone at once
        return [*found, *(f"process {number} is left" for number in remaining)]

    def close(self) -> None:
        """Stop listening."""
        for one in (*self.listening, self.datagrams):
            one.close()

    def _state(self) -> Any:
        files = sorted((path.name, path.lstat().st_mode) for path in self.folder.iterdir())
        written = Path("/tmp/written-by-a-program").exists()
        return files, self.secret.read_text() if self.secret.exists() else None, written


def _arrived(receive: Any) -> bool:
    try:
        receive()
    except BlockingIOError:
        return False
    return True


def left(sessions: Sequence[int]) -> list[int]:
    """Processes of these sessions that still run: (state, parent, group, session) follow the name in parentheses."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) in sessions and state not in "ZX":
            found.append(int(path.parent.name))
    return found


@contextmanager
def arena() -> Iterator[Arena]:
    """A target to attack, whose secret is also in the environment. It remembers the processes that are started."""
    with ExitStack() as stack:
        place = Arena(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="arena-"))))
        stack.callback(place.close)
        stack.enter_context(mock.patch.dict(os.environ, {"SECRET": place.content}))
        begin = launch.subprocess.Popen

        def remember(*words: Any, **options: Any) -> Any:
            started = begin(*words, **options)
            place.processes.append(started.pid)
            return started

        stack.enter_context(mock.patch.object(launch.subprocess, "Popen", remember))
        yield place


def attempt(escape: Escape, walls: Confinement, place: Arena) -> tuple[Verdict, list[str]]:
    """The verdict on an attempt, and what it has reached."""
    tests = Tests(place.fill(escape.tests), entry_point="candidate")
    limits = LIMITS if escape.stopped == LATE else PATIENT
    return run(place.fill(escape.program), tests, limits, walls), place.changes()


def stopped(escape: Escape, verdict: Verdict, changes: list[str]) -> bool:
    """Whether an attempt failed, as it should, and left no trace."""
    return verdict.kind == FAILED and re.match(escape.reason, verdict.reason) is not None and not changes


def working() -> list[Confinement]:
    """The confinements that work here, strongest first."""
    return [walls for walls in COMBINATIONS if not mechanisms.problem(walls, mechanisms.STOPPED)]


def sandbox() -> str:
    """Programs that try to forge their verdict or to get out of the sandbox, and queries likewise: what stopped each."""
    walls = working()
    lines = [
        f"Confinements that work on this machine (as {'root' if os.geteuid() == 0 else 'an ordinary user'}): "
        f"{'; '.join(map(str, walls))}. In use: {mechanisms.chosen()}. Every program ran behind each of them, against tests "
        "that pass only if the attempt works. Out means: judged right, or something outside was read, changed, reached "
        "or left. Without walls: some harmless ones ran with nothing but limits, to see that they do work.",
        "",
        "| program | stopped by | verdict | without walls | out |",
        "|---|---|---|---|---|",
    ]
    out = 0
    for escape in ALL:
        with arena() as place:
            found = [attempt(escape, one, place) for one in walls]
        escaped = sum(not stopped(escape, *one) for one in found)
        out += escaped
        said = " / ".join(dict.fromkeys(_line(verdict, place) for verdict, _ in found))
        alone = bare(escape) if escape.name in REAL else ""
        lines.append(f"| {escape.name} | {escape.stopped} | {said} | {alone} | {escaped or 'no'} |")
    lines += ["", f"{len(ALL)} programs, {len(ALL) * len(walls)} runs, {out} out.", ""]
    return "\n".join([*lines, *query_escapes.table(walls)])


def bare(escape: Escape) -> str:
    """What comes of an attempt behind no wall at all; for harmless ones."""
    with arena() as place:
        verdict, _ = attempt(escape, Confinement(()), place)
    return "works" if verdict.kind == PASSED else f"fails: {_line(verdict, place)}"


def _line(verdict: Verdict, place: Arena) -> str:
    """A verdict's reason for a table, without the names of this run's paths and ports."""
    text = verdict.reason if verdict.kind == FAILED else f"{verdict.kind.upper()}: {verdict.reason}"
    for word in (str(place.folder), __file__, sys.base_prefix):
        text = text.replace(word, "...")
    text = re.sub(r"(?<=/proc/)\d+", "N", text.replace(f": {CANNOT_CROSS}", ""))
    return "".join(" " if c in "\n|" else c for c in text if c in string.printable)[:100].strip(" :")

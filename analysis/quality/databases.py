"""The process that runs SQL, seen from outside: started once, asked query by query, killed with what it does when it is late.

Every query has two limits. SQLite is interrupted between two steps after `seconds`. GRACE later the process is killed, and a
new one replaces it. The rows are packed when SQLite is done: they have PACKING seconds of their own.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from time import monotonic
from typing import Any

from analysis.quality.confinement import Confined, Confinement, chosen, pipe
from analysis.quality.confinement.inside import frames, queries, values
from toolkit.errors import InputError

GRACE = 0.5  # seconds after which a query that SQLite could not interrupt is killed
PACKING = 30.0  # seconds in which the rows of a query that is done must come
MEMORY = 1024  # MiB
LIFETIME = 600  # seconds of CPU a process may use in all: it is replaced then
KERNEL = {
    "RLIMIT_CPU": LIFETIME, "RLIMIT_AS": MEMORY * 2**20, "RLIMIT_FSIZE": 0, "RLIMIT_NOFILE": 32, "RLIMIT_CORE": 0,
    "RLIMIT_NPROC": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """The rows of a query, or why there are none."""

    rows: list[tuple[Any, ...]] | None
    reason: str = ""


class Databases:
    """Queries on the databases of a folder: DB_ID/DB_ID.sqlite. Raises InputError if nothing can be confined here."""

    def __init__(self, folder: Path, confinement: Confinement | None = None):
        self.folder, self.walls = folder.resolve(), confinement or chosen()
        self._running = ExitStack()
        self._process: tuple[Confined, FileIO, FileIO] | None = None
        weakref.finalize(self, self._running.close)

    def path(self, name: str) -> Path:
        """The file of a database. Raises InputError for a name that leads out of the folder, and if there is no such file."""
        path = self.folder / name / f"{name}.sqlite"
        where = "quality metric execution, databases=FOLDER"
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise InputError(f"expected db_id to be the plain name of a folder, got {name[:80]!r}: {where}")
        if not path.is_file():
            raise InputError(f"expected an SQLite database at {path}, found none: {where}")
        if not path.resolve().is_relative_to(self.folder):
            raise InputError(f"expected the database {name} inside {self.folder}, got a link out of it: {where}")
        for ending in ("-wal", "-journal"):
            beside = path.with_name(path.name + ending)
            if beside.exists() and beside.stat().st_size:
                raise InputError(f"expected a database at rest, found {beside}: close what writes to it")
        return path.resolve()

    def ask(self, name: str, query: str, seconds: float, max_rows: int) -> Result:
        """The rows of one query, which changes nothing. Raises InputError as `path` does."""
        question = values.dumps((str(self.path(name)), query, float(seconds), max_rows))
        if len(question) > frames.LONGEST:
            return Result(None, f"failed: a query of more than {frames.LONGEST // 2**20} MiB")
        for last in (self._process is None, True):
            try:
                return self._ask(question, seconds)
            except frames.Ended:
                how = self._process[0].how() if self._process else ""
                self.end()
                if last:
                    return Result(None, f"ended, {how}")
        raise AssertionError("a fresh process is the last one asked")

    def end(self) -> None:
        """Kill the process, if there is one."""
        self._process = None
        self._running.close()

    def _ask(self, question: bytes, seconds: float) -> Result:
        _, ask, answered = self._process or self._start()
        frames.send(ask.fileno(), question)
        try:
            done = frames.receive(answered.fileno(), len(queries.DONE), monotonic() + seconds + GRACE)
        except frames.Late:
            self.end()
            return Result(None, f"killed after {seconds:g} s")
        try:
            text = frames.receive(answered.fileno(), queries.MOST_BYTES, monotonic() + PACKING)
        except frames.Late:
            self.end()
            return Result(None, f"killed: its rows did not come within {PACKING:g} s")
        try:
            if done != queries.DONE:
                raise values.Malformed("rows before their time")
            return _result(values.loads(text, most=2 * queries.MOST_VALUES))
        except values.Malformed:
            self.end()
            return Result(None, "failed: an answer that is none")

    def _start(self) -> tuple[Confined, FileIO, FileIO]:
        with ExitStack() as stack:
            (asked, ask), (answered, answer) = pipe(stack), pipe(stack)
            job = Confined("queries", None, (asked, answer), KERNEL, self.walls, (str(self.folder),))
            stack.enter_context(job)
            if why := job.ready():
                raise InputError(f"could not confine a process to run SQL ({self.walls}): {why}")
            self._process = job, ask, answered
            self._running.push(stack.pop_all())
        return self._process


def _result(found: Any) -> Result:
    """An answer, if it has the shape of one."""
    match found:
        case ([*rows], "") if all(type(row) is tuple for row in rows):
            return Result(list(rows))
        case (None, str(reason)):
            return Result(None, reason[:500])
    raise values.Malformed("no result")

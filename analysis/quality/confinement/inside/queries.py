"""The job of the process that runs SQL: one SQLite database per question, opened read-only, and its rows as literal data.

Nothing but reading is authorised (no ATTACH, no PRAGMA, no recursion, no extensions). The time of all steps, the number of rows
and the lengths of values are limited. A single step that takes longer is ended from outside, with this process.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from time import monotonic
from typing import Any
from urllib.parse import quote

from analysis.quality.confinement.inside import frames, values

ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
FORBIDDEN_FUNCTIONS = ("load_extension", "fts3_tokenizer")
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 200_000,  # bytes of a value
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
STEPS = 1000  # of SQLite's machine between looks at the clock
MOST_BYTES, MOST_VALUES = 64 * 2**20, 5_000_000  # of a result
DONE = b"done"  # the clock of the query stops; packing its rows is no time of SQLite's
Answer = tuple[list[tuple[Any, ...]] | None, str]


def run(_: Any, questions: int, answers: int) -> None:
    """Answer (path, query, seconds, max_rows) by DONE as soon as SQLite is, then by (rows or None, why there are none)."""
    while True:
        try:
            path, query, seconds, max_rows = values.loads(frames.receive(questions))
        except frames.Ended:
            return
        found = ask(path, query, seconds, max_rows)
        frames.send(answers, DONE)
        try:
            frames.send(answers, values.dumps(found, most=MOST_VALUES), MOST_BYTES)
        except (values.TooMuch, ValueError, MemoryError) as error:
            frames.send(answers, values.dumps((None, f"a result of {error or 'too many bytes'}")))


def ask(path: str, query: str, seconds: float, max_rows: int) -> Answer:
    """The rows of one query on one SQLite file, which stays as it is; or None and why."""
    started = monotonic()

    def late() -> bool:
        return monotonic() - started > seconds

    try:
        with closing(_connect(path, late)) as connection:
            cursor = connection.execute(query)
            if cursor.description is None:
                return None, "not a query"
            rows = cursor.fetchmany(max_rows + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        return None, _explain(error, late(), seconds)
    return (rows, "") if len(rows) <= max_rows else (None, f"more than {max_rows} rows")


def _connect(path: str, late: Callable[[], bool]) -> sqlite3.Connection:
    """A connection that can only read, and stops when it is late."""
    connection = sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True, isolation_level=None)
    connection.execute("PRAGMA temp_store = MEMORY")  # sorting: nothing can be written here
    for limit, value in LIMITS.items():
        connection.setlimit(limit, value)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")  # some of Spider's texts are not UTF-8
    connection.set_progress_handler(late, STEPS)
    connection.set_authorizer(_authorise)
    return connection


def _authorise(action: int, _: str | None, name: str | None, *__: str | None) -> int:
    """SQLite asks this for everything a statement would do, before it does anything."""
    if action not in ALLOWED or (action == sqlite3.SQLITE_FUNCTION and str(name).lower() in FORBIDDEN_FUNCTIONS):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _explain(error: Exception, late: bool, seconds: float) -> str:
    text = (str(error).strip() or type(error).__name__).split("\n")[0]
    if "interrupted" in text and late:
        return f"killed after {seconds:g} s"
    if "authoriz" in text or "prohibited" in text:
        return f"refused, only reading is allowed: {text}"
    return f"failed: {text}"

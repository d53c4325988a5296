"""Execution accuracy of SQL: does the written query return what the reference returns? For Spider, through SQLite.

Data: Spider (arXiv:1809.08887); metric of its successors (execution match, arXiv:2010.02840), on one database each.
Deviation: columns count in the order they are asked for, and numbers as equal that agree in 10 digits.

Queries are text of a model: the database is opened read-only, nothing but reading is authorised (no ATTACH, no PRAGMA, no
recursion, no extensions), time, rows and lengths of values are limited. What is refused or killed scores 0 with a reason.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import quote

from analysis.quality.base import Score, TextMetric, fenced
from toolkit.errors import InputError
from toolkit.prompts import Prompt

ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
FORBIDDEN_FUNCTIONS = ("load_extension", "fts3_tokenizer")
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 200_000,  # bytes of a value: one huge value could outlast every time limit
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
STEPS = 1000  # of SQLite's machine between looks at the clock
QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`")
INNERMOST = re.compile(r"\([^()]*\)")
ORDERED = re.compile(r"\border\s+by\b", re.IGNORECASE)


@dataclass(frozen=True)
class Result:
    """The rows of a query, or why there are none."""

    rows: list[tuple[Any, ...]] | None
    reason: str = ""


class Execution(TextMetric):
    """Share of responses whose query returns the reference's result.

    databases  folder with DB_ID/DB_ID.sqlite, as Spider's `database`
    seconds    a query may take
    max_rows   it may return
    A prompt's `answer` is the reference query, its `db_id` names the database.
    """

    label = "execution accuracy"

    def __init__(self, databases: str | Path | None = None, seconds: float = 5.0, max_rows: int = 100_000):
        if databases is None or not Path(databases).is_dir():
            got = "none" if databases is None else f"{databases}, which is no folder"
            raise InputError(f"execution: expected databases=FOLDER with DB_ID/DB_ID.sqlite inside, got {got}")
        if not seconds > 0 or max_rows < 1:
            raise InputError(f"execution: expected seconds and max_rows above 0, got {seconds} and {max_rows}")
        self.databases, self.seconds, self.max_rows = Path(databases), seconds, max_rows
        self._known: dict[tuple[Path, str], Result] = {}

    def score(self, text: str, prompt: Prompt) -> Score:
        """1 or 0; None if the prompt has no reference, or the reference itself fails. Raises InputError: no database."""
        name = prompt.extra.get("db_id")
        if prompt.answer is None or name is None:
            return Score(None, "no reference query is known")
        path = self.databases / str(name) / f"{name}.sqlite"
        expected = self._reference(path, prompt.answer)
        if expected.rows is None:
            return Score(None, f"the reference fails: {expected.reason}")
        found = run(path, first_statement(text), self.seconds, self.max_rows)
        if found.rows is None:
            return Score.of(0, found.reason)
        return Score.of(same(found.rows, expected.rows, is_ordered(prompt.answer)))

    def _reference(self, path: Path, query: str) -> Result:
        if (path, query) not in self._known:
            self._known[path, query] = run(path, query, self.seconds, self.max_rows)
        return self._known[path, query]


def run(path: Path, query: str, seconds: float, max_rows: int) -> Result:
    """The rows of one query on one SQLite file, which stays as it is. Raises InputError if there is no such file."""
    if not path.is_file():
        raise InputError(
            f"expected an SQLite database at {path}, found none: quality metric execution, databases=FOLDER"
        )
    started = monotonic()

    def late() -> bool:
        return monotonic() - started > seconds

    try:
        with closing(_connect(path, late)) as connection:
            cursor = connection.execute(query)
            if cursor.description is None:
                return Result(None, "not a query")
            rows = cursor.fetchmany(max_rows + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        return Result(None, _explain(error, late(), seconds))
    return Result(rows) if len(rows) <= max_rows else Result(None, f"more than {max_rows} rows")


def first_statement(text: str) -> str:
    """The query in a response: its first code fence, or else its first paragraph, up to the first semicolon."""
    found = fenced(text)
    text = text.strip().split("\n\n", 1)[0] if found is None else found.strip()
    for match in re.finditer(";", text):
        if sqlite3.complete_statement(text[: match.end()]):  # not one inside a string
            return text[: match.end()]
    return text


def is_ordered(query: str) -> bool:
    """Whether the order of a query's rows means something: ORDER BY outside of strings and parentheses."""
    outer, before = QUOTED.sub(" ", query), ""
    while outer != before:
        outer, before = INNERMOST.sub(" ", outer), outer
    return ORDERED.search(outer) is not None


def same(rows: list[tuple[Any, ...]], others: list[tuple[Any, ...]], ordered: bool) -> bool:
    """Whether two results are equal: as lists, or as multisets."""
    ours, theirs = [_rounded(row) for row in rows], [_rounded(row) for row in others]
    return ours == theirs if ordered else Counter(ours) == Counter(theirs)


# -- inside -----------------------------------------------------------------------------------------------------------


def _connect(path: Path, late: Callable[[], bool]) -> sqlite3.Connection:
    """A connection that can only read, and stops when it is late."""
    connection = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True, isolation_level=None)
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


def _rounded(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(float(f"{value:.10g}") if isinstance(value, float) else value for value in row)

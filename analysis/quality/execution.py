"""Execution accuracy of SQL: does the written query return what the reference returns? For Spider, through SQLite.

Data: Spider (arXiv:1809.08887); metric of its successors (execution match, arXiv:2010.02840), on one database each.
Deviation: columns count in the order they are asked for, and numbers as equal that agree in 10 digits.

Queries are text of a model: they run confined in a process of their own (`databases`), where only reading is
authorised. Time, memory, rows and lengths of values are limited. What is refused or killed scores 0 with a reason. Off
unless asked for.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from analysis.quality.base import Score, TextMetric, fenced
from analysis.quality.databases import Databases, Result
from toolkit.config.notes import File
from toolkit.errors import InputError
from toolkit.prompts import Prompt

QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`")
INNERMOST = re.compile(r"\([^()]*\)")
ORDERED = re.compile(r"\border\s+by\b", re.IGNORECASE)


class Execution(TextMetric):
    """Share of responses whose query returns the reference's result.

    databases  folder with DB_ID/DB_ID.sqlite, as Spider's `database`
    seconds    a query may take
    max_rows   it may return
    A prompt's `answer` is the reference query, its `db_id` names the database.
    """

    label = "execution accuracy"

    def __init__(
        self, databases: Annotated[str | Path | None, File()] = None, seconds: float = 5.0, max_rows: int = 100_000
    ):
        if databases is None or not Path(databases).is_dir():
            got = "none" if databases is None else f"{databases}, which is no folder"
            raise InputError(f"execution: expected databases=FOLDER with DB_ID/DB_ID.sqlite inside, got {got}")
        if not seconds > 0 or max_rows < 1:
            raise InputError(f"execution: expected seconds and max_rows above 0, got {seconds} and {max_rows}")
        self.databases, self.seconds, self.max_rows = Databases(Path(databases)), seconds, max_rows
        self.about = f"SQL confined by {self.databases.walls}"
        self._known: dict[tuple[str, str], Result] = {}

    def score(self, text: str, prompt: Prompt) -> Score:
        """1 or 0; None if the prompt has no reference, or the reference itself fails. Raises InputError: no database."""
        name = prompt.extra.get("db_id")
        if prompt.answer is None or name is None:
            return Score(None, "no reference query is known")
        expected = self._reference(str(name), prompt.answer)
        if expected.rows is None:
            return Score(None, f"the reference fails: {expected.reason}")
        found = self.databases.ask(str(name), first_statement(text), self.seconds, self.max_rows)
        if found.rows is None:
            return Score.of(0, found.reason)
        return Score.of(same(found.rows, expected.rows, is_ordered(prompt.answer)))

    def _reference(self, name: str, query: str) -> Result:
        if (name, query) not in self._known:
            self._known[name, query] = self.databases.ask(name, query, self.seconds, self.max_rows)
        return self._known[name, query]


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


def _rounded(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(float(f"{value:.10g}") if isinstance(value, float) else value for value in row)

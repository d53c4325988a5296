"""Execution accuracy of SQL: does the written query return what the reference returns? For Spider, through SQLite.

Data: Spider (arXiv:1809.08887); metric of its successors (execution match, arXiv:2010.02840), on one database each.
Deviation: columns count in the order they are asked for, and numbers as equal that agree in 10 digits.

Queries are text of a model: each runs confined in a process of its own (`sandbox`), which can read that database and
nothing else, and where only reading is authorised. Time, memory, rows and lengths of values are limited. What is refused
or killed scores 0 with a reason. Off unless asked for.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from analysis.quality import sandbox
from analysis.quality.base import Score, TextMetric, fenced
from analysis.quality.inside import unpack
from toolkit.config.notes import File
from toolkit.errors import InputError
from toolkit.models.prompts import Prompt

QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`")
INNERMOST = re.compile(r"\([^()]*\)")
ORDERED = re.compile(r"\border\s+by\b", re.IGNORECASE)
GRACE = 10.0  # seconds for starting the process, and for the rows of a query that is done
PACKING = 2.0  # seconds of CPU beyond the query's


@dataclass(frozen=True)
class Result:
    rows: list[tuple[Any, ...]] | None
    reason: str = ""


class Execution(TextMetric):
    """Share of responses whose query returns the reference's result.

    databases  folder with DB_ID/DB_ID.sqlite, as Spider's `database`
    seconds    a query may take
    max_rows   it may return
    A prompt's `answer` is the reference query, its `db_id` names the database.
    """

    name = "execution"
    label = "execution accuracy"
    scale = "probability"

    def __init__(
        self, databases: Annotated[str | Path | None, File()] = None, seconds: float = 5, max_rows: int = 100_000
    ):
        if databases is None or not Path(databases).is_dir():
            got = "none" if databases is None else f"{databases}, which is not a folder"
            raise InputError(f"execution: expected databases=FOLDER with DB_ID/DB_ID.sqlite inside, got {got}")
        if not seconds > 0 or max_rows < 1:
            raise InputError(f"execution: expected seconds and max_rows above 0, got {seconds} and {max_rows}")
        self.folder, self.seconds, self.max_rows = Path(databases).resolve(), seconds, max_rows
        self.provenance = f"SQL confined by {sandbox.chosen()}"
        self._references: dict[tuple[str, str], Result] = {}

    def score(self, text: str, prompt: Prompt) -> Score:
        """1 or 0; None if the prompt has no reference, or the reference itself fails. Raises InputError: no database."""
        name = prompt.extra.get("db_id")
        if prompt.answer is None or name is None:
            return Score(None, "no reference query is known")
        key = str(name), prompt.answer
        if key not in self._references:
            self._references[key] = self.ask(*key)
        expected = self._references[key]
        if expected.rows is None:
            return Score(None, f"the reference fails: {expected.reason}")
        result = self.ask(str(name), first_statement(text))
        if result.rows is None:
            return Score.of(0, result.reason)
        return Score.of(same(result.rows, expected.rows, is_ordered(prompt.answer)))

    def path(self, name: str) -> str:
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
        return str(path.resolve())

    def ask(self, name: str, query: str) -> Result:
        """The rows of one query, which changes nothing. Raises InputError as `path` does."""
        path, limits = self.path(name), sandbox.Limits(self.seconds + PACKING, memory=1024)
        arguments = [path, query, self.seconds, self.max_rows]
        with sandbox.Confined("query", arguments, limits, sandbox.chosen(), files=[path]) as process:
            answer = process.output(self.seconds + GRACE)
        try:
            return Result(*unpack(json.loads(answer or "")))
        except Exception:  # it ended before its rows came
            return Result(None, f"killed: more than {self.seconds:g} s, or too much memory")


def first_statement(text: str) -> str:
    """The query in a response: its first code fence, or else its first paragraph, up to the first semicolon."""
    block = fenced(text)
    text = text.strip().split("\n\n", 1)[0] if block is None else block.strip()
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
    ours, theirs = [_rounded(row) for row in rows], [_rounded(row) for row in others]
    return ours == theirs if ordered else Counter(ours) == Counter(theirs)


def _rounded(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(float(f"{value:.10g}") if isinstance(value, float) else value for value in row)

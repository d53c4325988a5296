"""Queries that try to change or reach something, or to outlast their limit: part of `benchmarks.evidence sandbox`."""

from __future__ import annotations

import hashlib
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from analysis.quality.confinement import Confinement
from analysis.quality.databases import GRACE, Databases
from toolkit.errors import InputError

SECONDS = 1.0
AUTHORISER, CLOCK, LENGTHS, KILLED, NAMES = (
    "authorizer", "progress handler", "size limits", "the process is killed", "names of databases are checked",
)  # fmt: skip
JOINED = "many a, many b, many c, many d, many e"
QUERIES = {
    "DROP TABLE many": AUTHORISER,
    "DELETE FROM many": AUTHORISER,
    "CREATE TABLE other (x)": AUTHORISER,
    "ATTACH DATABASE 'FOLDER/other/other.sqlite' AS other": AUTHORISER,
    "ATTACH DATABASE 'file:FOLDER/shop/shop.sqlite?mode=rwc' AS other": AUTHORISER,
    "VACUUM INTO 'FOLDER/stolen.sqlite'": AUTHORISER,
    "PRAGMA writable_schema = ON": AUTHORISER,
    "SELECT * FROM pragma_database_list": AUTHORISER,
    "SELECT load_extension('FOLDER/evil.so')": AUTHORISER,
    "SELECT readfile('/etc/passwd')": "no such function",
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c": AUTHORISER,
    f"SELECT count(*) FROM {JOINED}": CLOCK,
    f"SELECT a.n FROM {JOINED} ORDER BY random()": CLOCK + ", limit on memory",
    "SELECT printf('%.*c', 2147483647, 'x')": KILLED,
    "SELECT hex(zeroblob(2000000000))": LENGTHS,
    f"SELECT group_concat(hex(zeroblob(90000))) FROM {JOINED}": LENGTHS,
    f"SELECT a.n FROM {JOINED}": "limit on rows",
}
OTHER_PLACES = ("/etc", "../shop", "FOLDER/shop", "shop/../shop", "..", "", "linked", "shop\0")


def make(folder: Path) -> Path:
    """A folder of databases with one database, and a link that leads out of it."""
    databases, outside = folder / "databases", folder / "outside"
    for place in (databases / "shop", outside):
        place.mkdir(parents=True)
        connection = sqlite3.connect(place / f"{'shop' if place.name == 'shop' else 'linked'}.sqlite")
        connection.execute("CREATE TABLE many (n INTEGER)")
        connection.executemany("INSERT INTO many VALUES (?)", [(i,) for i in range(400)])
        connection.commit()
        connection.close()
    (databases / "linked").symlink_to(outside)
    return databases


def state(folder: Path) -> dict[str, str]:
    """Every file with its digest."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def table(walls: Sequence[Confinement]) -> list[str]:
    """What came of every query and every name of a database, as Markdown."""
    lines = ["| query | stopped by | result | seconds of 1 |", "|---|---|---|---|"]
    out = 0
    with tempfile.TemporaryDirectory(prefix="queries-") as scratch:
        folder = make(Path(scratch))
        before = state(Path(scratch))
        processes = [Databases(folder, one) for one in walls]
        for query, by in QUERIES.items():
            text, found, longest = query.replace("FOLDER", str(folder)), [], 0.0
            for process in processes:
                process.ask("shop", "SELECT 1", SECONDS, 10)  # started before the clock
                started = perf_counter()
                found.append(process.ask("shop", text, SECONDS, 1000))
                longest = max(longest, perf_counter() - started)
            escaped = sum(one.rows is not None for one in found) + (longest > SECONDS + 2 * GRACE)
            out += escaped
            said = " / ".join(dict.fromkeys(one.reason.replace(str(folder), "...")[:80] for one in found))
            lines.append(f"| `{query}` | {by} | {'OUT: ' * bool(escaped)}{said} | {longest:.1f} |")
        for name in OTHER_PLACES:
            text = name.replace("FOLDER", str(folder))
            try:
                processes[0].ask(text, "SELECT 1", SECONDS, 10)
                out, said = out + 1, "OUT"
            except InputError as error:
                said = str(error).replace(str(folder), "...").partition(":")[0]
            lines.append(f"| `db_id` {name!r} | {NAMES} | {said} | |")
        for process in processes:
            process.end()
        out += state(Path(scratch)) != before
    count = len(QUERIES) * len(walls) + len(OTHER_PLACES)
    return [*lines, "", f"{len(QUERIES)} queries and {len(OTHER_PLACES)} names, {count} runs, {out} out."]

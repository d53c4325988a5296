"""SQL: results are compared as they should be; whatever writes, hangs or looks elsewhere is refused, and nothing changes."""

import hashlib
import sqlite3
import sys
from pathlib import Path

import pytest

from analysis.quality import inside
from analysis.quality.base import reasons, table
from analysis.quality.execution import Execution, first_statement, is_ordered
from toolkit.errors import InputError
from toolkit.models.prompts import Prompt
from toolkit.types import Generation

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement is Linux's")


@pytest.fixture
def folder(tmp_path):
    """A folder of databases as Spider's."""
    (tmp_path / "shop").mkdir()
    connection = sqlite3.connect(tmp_path / "shop" / "shop.sqlite")
    connection.executescript(
        "CREATE TABLE item (id INTEGER, name TEXT, price REAL);"
        "INSERT INTO item VALUES (1, 'pen', 2.5), (2, 'lamp', 30), (3, 'pen', 2.5), (4, NULL, 7), (5, 'a;b', 1);"
        "CREATE TABLE many (n INTEGER);"
    )
    connection.executemany("INSERT INTO many VALUES (?)", [(i,) for i in range(400)])
    connection.execute("INSERT INTO item VALUES (6, CAST(x'ff6f6b' AS TEXT), 0)")  # not UTF-8
    connection.commit()
    connection.close()
    return tmp_path


def ask(gold, **extra):
    return Prompt("spider-test-00000", "Question:", gold, extra={"db_id": "shop", **extra})


@pytest.mark.parametrize("gold, text, right", [
    ("SELECT count(*) FROM item", " select COUNT(id) from item;\n\nQuestion: more; DROP TABLE item", 1),
    ("SELECT count(*) FROM item", "SELECT count(name) FROM item", 0),
    ("SELECT name FROM item", "SELECT name FROM item ORDER BY id DESC", 1),  # a multiset
    ("SELECT name FROM item", "SELECT DISTINCT name FROM item", 0),  # not a set
    ("SELECT name FROM item ORDER BY id", "SELECT name FROM item ORDER BY id DESC", 0),
    ("SELECT name FROM item ORDER BY id", "SELECT i.name FROM item AS i ORDER BY i.id ASC;", 1),
    ("SELECT id FROM item WHERE price = (SELECT price FROM item ORDER BY price LIMIT 1)",
     "SELECT id FROM item ORDER BY price LIMIT 1", 1),
    ("SELECT avg(price) FROM item", "SELECT sum(price) / count(*) FROM item", 1),
    ("SELECT 0.1 + 0.2", "SELECT 0.3", 1),
    ("SELECT name, id FROM item", "SELECT id, name FROM item", 0),
    ("SELECT id FROM item WHERE name = 'a;b'", "SELECT id FROM item WHERE name = 'a;b'; SELECT 1", 1),
    ("SELECT 1 UNION ALL SELECT 1 UNION ALL SELECT 2", "SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 2", 0),
    ("SELECT NULL, x'78'", "SELECT name, x'78' FROM item WHERE id = 4", 1),
    ("SELECT id FROM item WHERE id < 2", "```sql\nSELECT id\nFROM item\nWHERE id < 2;\n```\nThat is it.", 1),
])  # fmt: skip
def test_results_are_compared(folder, gold, text, right):
    assert Execution(folder).score(text, ask(gold)).counts == (right, 1)


@pytest.mark.parametrize("text, reason", [
    ("SELEC count(*) FROM item", 'failed: near "SELEC": syntax error'),
    ("", "not a query"),
    ("SELECT 1 \x00", "failed: "),
    ("SELECT '\ud800'", "failed: "),
    ("SELECT a.n FROM many a, many b", "more than 1000 rows"),
    ("SELECT hex(zeroblob(100000000))", "failed: string or blob too big"),
])  # fmt: skip
def test_failures_score_zero_with_a_reason(folder, text, reason):
    score = Execution(folder, max_rows=1000).score(text, ask("SELECT count(*) FROM item"))
    assert score.counts == (0, 1) and score.reason.startswith(reason), score


ATTACKS = {
    "delete": "DELETE FROM item",
    "update": "UPDATE item SET price = 0",
    "create elsewhere": "CREATE TEMP TABLE other AS SELECT * FROM item",
    "attach": "ATTACH DATABASE 'FOLDER/stolen.sqlite' AS stolen",
    "attach by uri": "ATTACH DATABASE 'file:FOLDER/shop/shop.sqlite?mode=rwc' AS writable",
    "copy": "VACUUM INTO 'FOLDER/stolen.sqlite'",
    "writable schema": "PRAGMA writable_schema = ON",
    "pragma as a table": "SELECT * FROM pragma_journal_mode('delete')",
    "extension": "SELECT load_extension('FOLDER/evil.so')",
}
COUNTING = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c{}) SELECT count(*) FROM c"


def test_a_recursive_query_reads_and_an_endless_one_is_killed(folder):
    metric = Execution(folder, seconds=1)
    assert metric.score(COUNTING.format(" WHERE x < 9"), ask("SELECT 9")).counts == (1, 1)
    assert metric.score(COUNTING.format(""), ask("SELECT 9")).reason == "killed after 1 s"


@pytest.mark.parametrize("query", ATTACKS.values(), ids=ATTACKS.keys())
def test_all_but_reading_is_refused_and_nothing_changes(folder, query):
    path = folder / "shop" / "shop.sqlite"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    metric = Execution(folder, seconds=2)
    score = metric.score(query.replace("FOLDER", str(folder)), ask("SELECT count(*) FROM item"))
    assert score.counts == (0, 1) and score.reason.startswith("refused, only reading is allowed: "), score
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert sorted(path_left.name for path_left in folder.rglob("*")) == ["shop", "shop.sqlite"]
    assert metric.score("SELECT count(*) FROM item", ask("SELECT 6")).counts == (1, 1)  # the run goes on


HANGING = "SELECT count(*) FROM many a, many b, many c, many d, many e WHERE a.n + b.n + c.n + d.n = -1"
# SQLite looks at no clock in a function: seconds each, up to the memory that it may take
LONG_STEPS = "SELECT " + " + ".join(["length(printf('%.*c', 2147483647, 'x'))"] * 6)


@pytest.mark.parametrize("hanging", [HANGING, LONG_STEPS], ids=["rows", "steps"])
def test_a_query_that_hangs_is_killed_and_the_run_goes_on(folder, hanging):
    prompts, texts = [ask("SELECT 6")] * 2, [hanging, "SELECT count(*) FROM item"]
    metric = Execution(folder, seconds=0.2)
    scores = metric.measure(prompts, [Generation(i, [1], [2], text) for i, text in enumerate(texts)])
    assert metric.value(table(metric, scores).sum(0)) == pytest.approx(1 / 2)
    assert [reason[:6] for reason in reasons(scores)] == ["killed"]


def test_memory_and_results_are_limited(folder):
    assert len(Execution(folder).ask("shop", "SELECT a.n, b.n FROM many a, many b LIMIT 50000").rows) == 50_000
    for query in (
        "SELECT a.n, b.n, hex(zeroblob(90000)) AS c FROM many a, many b ORDER BY c",
        "SELECT hex(zeroblob(50000)) FROM many a, many b LIMIT 700",
    ):
        result = Execution(folder, seconds=20, max_rows=10**6).ask("shop", query)
        assert result.rows is None and result.reason.startswith(("failed: ", "killed: ")), result


def test_a_query_reads_its_database_alone(folder, monkeypatch):
    """Behind the walls nothing else is there, even for an SQLite that authorises all."""
    other = folder / "other" / "other.sqlite"
    other.parent.mkdir()
    sqlite3.connect(other).execute("CREATE TABLE secret (x)").connection.close()
    text = folder / "inside.txt"
    source = Path(inside.__file__).read_text().replace("set_authorizer(authorise)", "set_authorizer(None)")
    text.write_text(source.replace("_ATTACHED: 0", "_ATTACHED: 5"))
    monkeypatch.setattr(inside, "__file__", str(text))
    shop = folder / "shop" / "shop.sqlite"
    before = hashlib.sha256(shop.read_bytes()).hexdigest()
    metric = Execution(folder)
    for query, reason in (
        (f"ATTACH DATABASE '{other}' AS other", "failed: unable to open database"),
        ("DROP TABLE item", "failed: attempt to write a readonly database"),
    ):
        assert metric.ask("shop", query).reason.startswith(reason)
    assert hashlib.sha256(shop.read_bytes()).hexdigest() == before


@pytest.mark.parametrize("name", ["..", "", "shop/../shop", "x\0"])
def test_a_name_leads_nowhere_else(folder, name):
    with pytest.raises(InputError, match="expected db_id to be the plain name of a folder") as caught:
        Execution(folder).score("SELECT 1", ask("SELECT 1", db_id=name))
    assert "\n" not in str(caught.value)
    absolute = str(folder / "shop")
    with pytest.raises(InputError, match="expected db_id to be the plain name"):
        Execution(folder).score("SELECT 1", ask("SELECT 1", db_id=absolute))


def test_links_out_of_the_folder_are_refused_and_those_inside_work(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    sqlite3.connect(outside / "linked.sqlite").close()
    (folder / "linked").symlink_to(outside)
    (folder / "again").mkdir()
    (folder / "again" / "again.sqlite").symlink_to(folder / "shop" / "shop.sqlite")
    with pytest.raises(InputError, match="expected the database linked inside .*, got a link out of it"):
        Execution(folder).score("SELECT 1", ask("SELECT 1", db_id="linked"))
    assert Execution(folder).score("SELECT 6", ask("SELECT count(*) FROM item", db_id="again")).counts == (1, 1)


def test_a_database_that_is_being_written_is_refused(folder):
    (folder / "shop" / "shop.sqlite-wal").write_bytes(b"x")
    with pytest.raises(InputError, match="expected a database at rest, found .*-wal"):
        Execution(folder).score("SELECT 1", ask("SELECT 1"))


def test_references_that_fail_are_no_fault_of_the_response(folder):
    metric = Execution(folder)
    assert metric.score("SELECT 1", ask("SELECT unknown")).counts is None
    assert (
        metric.score("SELECT 1", ask("SELECT unknown")).reason == "the reference fails: failed: no such column: unknown"
    )
    assert metric.score("SELECT 1", ask(None)).reason == "no reference query is known"
    assert metric.score("SELECT 1", Prompt("1", "Q", "SELECT 1")).counts is None


def test_bad_input_is_said_in_one_line(folder):
    for make, message in (
        (lambda: Execution(), "expected databases=FOLDER with DB_ID/DB_ID.sqlite inside, got none"),
        (lambda: Execution(folder).score("SELECT 1", ask("SELECT 1", db_id="zoo")), "zoo.sqlite, found none"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_strange_text_in_a_database_is_read(folder):
    assert Execution(folder).ask("shop", "SELECT name FROM item WHERE id = 6").rows == [("\ufffdok",)]


@pytest.mark.parametrize("query, ordered", [
    ("select a from t order\nby a limit 3", True),
    ("SELECT a FROM (SELECT a FROM t ORDER BY (b)) WHERE (a IN (1, 2))", False),
    ("SELECT 'order by' FROM t WHERE a = \"x ORDER BY y\"", False),
    ("SELECT ')' FROM t WHERE a IN (SELECT b FROM u ORDER BY c) ORDER BY a", True),
])  # fmt: skip
def test_order_matters_where_the_reference_asks_for_it(query, ordered):
    assert is_ordered(query) == ordered


@pytest.mark.parametrize("text, query", [
    (" SELECT 1; SELECT 2", "SELECT 1;"),
    ("SELECT ';' FROM t; x", "SELECT ';' FROM t;"),
    ("SELECT 1\n\nQuestion: x; y", "SELECT 1"),
    ("SELECT 1\n```\nThat is it.", "SELECT 1"),
    ("```sql\nSELECT 1,\n\n2; SELECT 3\n```", "SELECT 1,\n\n2;"),
])  # fmt: skip
def test_the_query_in_a_response(text, query):
    assert first_statement(text) == query

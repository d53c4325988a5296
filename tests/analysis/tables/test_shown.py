"""Numbers as people read them."""

import numpy as np
import pandas as pd
import pytest

from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import DEFINITIONS, definitions_text, markdown, show, show_page, with_interval
from analysis.tables.rows import acceptance_positions, bound_notes, length_table, round_lengths
from toolkit.types import Round

NAN = float("nan")


@pytest.mark.parametrize(("numbers", "text"), [
    ((0.8233, 0.79, 0.8533), "0.823 [0.790, 0.853]"),
    ((1001.4, 912.2, 1105.7), "1001 [912, 1106]"),
    ((1.03123, 1.02874, 1.0335), "1.0312 [1.0287, 1.0335]"),
    ((2.0, 2.0, 2.0), "2.0000 [2.0000, 2.0000]"),
    ((12.34, 9.0, 19.0), "12 [9, 19]"),
    ((0.5, NAN, NAN), "0.5"),
    ((NAN, NAN, NAN), ""),
    ((1.31, 1.05, 1.62, 3), "1.31 [1.05 to 1.62]"),
])  # fmt: skip
def test_an_interval_says_how_many_digits_are_worth_reading(numbers, text):
    assert with_interval(*numbers) == text


# -- frames and pages on the console ----------------------------------------------------------------------------------


FRAME = pd.DataFrame({
    "dataset": ["a|b", "math"], "prompts": [128, 64], "seconds_of_all_forwards": [0.123456, 12345.6],
    "throughput": [1.54321, float("nan")],
})  # fmt: skip


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")


def test_the_most_important_columns_come_first(capsys, narrow):
    show(FRAME, "title", "all.csv", ("dataset", "throughput"))
    said = capsys.readouterr().out
    assert said.index("dataset") < said.index("throughput")
    assert "1.543" in said and "seconds" not in said and "1 of 4 columns do not fit; all of them: all.csv" in said


def test_a_page_is_shown_with_tables_that_fit(capsys, narrow, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{markdown(FRAME)}\n\nWhat follows, {'word ' * 20}\n")
    show_page(page)
    said = capsys.readouterr().out
    assert "# Page" in said and said.count("word") == 20 and "a|b" in said and "---" not in said
    assert f"columns do not fit; all of them: {page}" in said


def test_a_page_that_ends_with_its_table(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "120")
    page = tmp_path / "page.md"
    page.write_text(markdown(FRAME) + "\n")
    show_page(page)
    said = capsys.readouterr().out
    assert "12,346" in said and "do not fit" not in said


@pytest.mark.parametrize("width", [60, 100, 200])
def test_definitions_are_as_wide_as_the_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    text = definitions_text()
    assert max(map(len, text.split("\n"))) <= width
    for term, meaning in DEFINITIONS.items():
        assert f"{term} {meaning}" in " ".join(text.split())


# -- acceptance by position: counted from the rounds themselves -------------------------------------------------------


def rows_of(sequences, chains=True):
    about = {"dataset": "d", "split": "test", "method": "svip", "setting": "h=0.5"}
    rounds = [[Round(k, k, n, n + 1, n == k) for k, n in text] for text in sequences]
    return pd.DataFrame([{**about, **round_lengths(text, chains)} for text in rounds])


def test_positions_and_lengths_are_those_of_the_rounds():
    generator = np.random.default_rng(0)
    sequences = [[(k, int(generator.integers(k + 1))) for k in generator.integers(0, 5, size=20)] for _ in range(7)]
    table = acceptance_positions(rows_of(sequences), Bootstrap(200)).set_index("position")
    rounds = [pair for text in sequences for pair in text]
    for k in range(1, 5):
        assert table.reached[k] == sum(n >= k - 1 and drafted >= k for drafted, n in rounds)
        assert table.accepted[k] == sum(n >= k for _, n in rounds)
        assert table.rate_low[k] <= table.rate[k] == table.accepted[k] / table.reached[k] <= table.rate_high[k]
    lengths = length_table(rows_of(sequences)).set_index("length")
    assert [lengths.drafted[n] for n in range(5)] == [sum(k == n for k, _ in rounds) for n in range(5)]
    assert lengths.accepted.sum() == lengths.drafted.sum() == len(rounds)


def test_rounds_that_are_no_chains_have_no_positions():
    table = acceptance_positions(rows_of([[(6, 2), (6, 3)]], chains=False))
    assert table.empty and list(table.columns)[-1] == "rate"
    assert length_table(rows_of([[(0, 0)]])).empty, "plain decoding drafts nothing"


def test_the_bound_is_named_where_it_ends_rounds():
    """Of each method's best setting: a rule that would draft on is held up by the bound, a fixed K is not."""
    about = {"dataset": "d", "split": "s"}
    drafted = {("rate", "c=.1"): [0, 6, 2, 2], ("rate", "c=.9"): [9, 1, 0, 0], ("speculative", "K=3"): [0, 0, 0, 10]}
    drafted["tail", "t=.5"] = [50, 49, 1, 0]
    drafted["autoregressive", ""] = [9, 1, 0, 5]  # forced by a grammar
    lengths = pd.DataFrame([
        {**about, "method": method, "setting": setting, "length": n, "drafted": count, "accepted": 0}
        for (method, setting), counts in drafted.items() for n, count in enumerate(counts)
    ])  # fmt: skip
    settings = pd.DataFrame([{"method": m, "setting": s, "throughput": 2.0 - (s == "c=.9")} for m, s in drafted])
    (line,) = bound_notes(lengths, settings, bound=3)
    assert line.startswith("rate c=.1: the bound of 3 drafted tokens ended 20% of its rounds")


def test_signs_that_would_turn_or_hide_others_are_shown_as_signs(capsys):
    """On the console and in Markdown: names of a user, texts of a model."""
    frame = pd.DataFrame({"a\u202eb": ["\x1b[31mred\u2067", "עברית"]})
    show(frame, "title\u202e")
    for text in (capsys.readouterr().out, markdown(frame)):
        assert "a\ufffdb" in text and "␛[31mred\ufffd" in text and "עברית" in text
        assert not {"\x1b", "\u202e", "\u2067"} & {*text}

"""Frames and pages on the console."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.tables.files import DEFINITIONS, definitions_text, markdown, show, show_page

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

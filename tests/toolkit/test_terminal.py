"""Tables on the console: what fits is shown, the first columns first, and no number is cut."""

from __future__ import annotations

import io
import os
import re

import pytest

from toolkit.files import terminal

NAMES = ["method", "setting", "throughput", "discarded_tokens_per_target_forward", "interval"]
ROWS = [
    ["speculative", "policy.num_drafted=3,policy.threshold=0.25", "1.543", "0.4583", "0.823 [0.790, 0.853]"],
    ["rate", "cost_ratio=0.2", "12,345", "1e-05", "-0.1 [-0.2, +0.1]"],
]
NUMERIC = [False, False, True, True, True]
NUMBER = re.compile(r"[+-]?\d[\d.,]*(?:e-?\d+)?")


@pytest.fixture
def printed(capsys, monkeypatch):
    def output(width, rest="summary.csv", rows=ROWS):
        monkeypatch.setenv("COLUMNS", str(width))
        terminal.print_table("title", NAMES, rows, NUMERIC, rest)
        return capsys.readouterr().out

    return output


def test_lines_fit_what_is_left_out_is_said_and_no_number_is_cut(printed):
    whole = {number for row in ROWS for text in row for number in NUMBER.findall(text)}
    for width in range(11, 140):
        *table, note = printed(width).strip("\n").split("\n")
        assert max(map(len, table)) <= max(width, 20), width
        assert set(NUMBER.findall("\n".join(table))) <= whole, width
        if width < 80:
            assert re.fullmatch(r"\d of 5 columns do not fit; all of them: summary.csv", note)
    said = printed(200)
    assert "do not fit" not in said and all(text in said for row in ROWS for text in row)


def test_the_first_columns_come_before_later_ones_and_one_that_is_too_wide_is_passed_over(printed):
    said = printed(60)
    assert "throughput" in said and "interval" not in said and "speculative" in said
    said = printed(80, rows=[[first, "x" * 90, *others] for first, _, *others in ROWS])
    assert "x" * 10 not in said and "throughput" in said and "1 of 5 columns do not fit" in said
    assert "y" * 50 in printed(30, rows=[["y" * 50, *others] for _, *others in ROWS]), "the first column is whole"
    assert "COLUMNS=200 shows more" in printed(40, rest=None), "without a file"


def test_headings_are_broken_between_words_and_wide_characters_take_two_cells(printed, capsys, monkeypatch):
    words = re.findall(r"[a-z_]+", printed(80))
    assert {"discarded_", "forward"} <= set(words) and "".join(words).count("discarded") == 1
    monkeypatch.setenv("COLUMNS", "12")
    terminal.print_table("", ["a", "b"], [["漢字漢", "12345"]], [False, True], "f.csv")
    assert "1 of 2 columns" in capsys.readouterr().out


def test_the_width_of_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        isatty = lambda self: True

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert terminal.width() == 120
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: os.terminal_size((91, 24)))
    assert terminal.width() == 91

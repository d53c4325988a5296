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


def printed(capsys, width, monkeypatch, rest="summary.csv", rows=ROWS):
    monkeypatch.setenv("COLUMNS", str(width))
    terminal.print_table("title", NAMES, rows, NUMERIC, rest)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100])
def test_lines_fit_and_what_is_left_out_is_said(width, capsys, monkeypatch):
    said = printed(capsys, width, monkeypatch)
    *table, note = said.strip("\n").split("\n")
    assert max(map(len, table)) <= width
    if width < 80:
        assert re.fullmatch(r"\d of 5 columns do not fit; all of them: summary.csv", note)
    assert "speculative" in said


def test_a_wide_terminal_shows_all_columns_and_no_note(capsys, monkeypatch):
    said = printed(capsys, 200, monkeypatch)
    assert "do not fit" not in said
    assert all(text in said for row in ROWS for text in row)


@pytest.mark.parametrize("width", range(11, 140))
def test_no_number_is_cut(width, capsys, monkeypatch):
    whole = {number for row in ROWS for text in row for number in NUMBER.findall(text)}
    found = set(NUMBER.findall(printed(capsys, width, monkeypatch, rest="").split("columns do not fit")[0]))
    assert {number for number in found if number not in ("1", "2", "3", "4", "5")} <= whole | set("12345")


def test_the_first_columns_come_before_later_ones(capsys, monkeypatch):
    said = printed(capsys, 60, monkeypatch)
    assert "throughput" in said and "interval" not in said


def test_a_column_that_is_too_wide_is_passed_over(capsys, monkeypatch):
    rows = [[first, "x" * 90, *others] for first, _, *others in ROWS]
    said = printed(capsys, 80, monkeypatch, rows=rows)
    assert "x" * 10 not in said and "throughput" in said and "1 of 5 columns do not fit" in said


def test_a_first_column_wider_than_the_terminal_is_whole(capsys, monkeypatch):
    rows = [["y" * 50, *others] for _, *others in ROWS]
    assert "y" * 50 in printed(capsys, 30, monkeypatch, rows=rows)


def test_without_a_file_the_note_says_how_to_see_more(capsys, monkeypatch):
    assert "COLUMNS=200 shows more" in printed(capsys, 40, monkeypatch, rest=None)


def test_headings_are_broken_between_words_alone(capsys, monkeypatch):
    said = printed(capsys, 80, monkeypatch)
    assert "discarded_tokens" not in said
    words = re.findall(r"[a-z_]+", said)
    assert {"discarded_", "forward"} <= set(words) and "".join(words).count("discarded") == 1


def test_wide_characters_take_two_cells(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    terminal.print_table("", ["a", "b"], [["漢字漢", "12345"]], [False, True], "f.csv")
    assert "1 of 2 columns" in capsys.readouterr().out


def test_the_width_without_a_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert terminal.width() == 120
    monkeypatch.setenv("COLUMNS", "77")
    assert terminal.width() == 77


def test_the_width_of_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: os.terminal_size((91, 24)))
    assert terminal.width() == 91

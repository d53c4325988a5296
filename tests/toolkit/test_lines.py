"""Lines end at newline characters, and nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from toolkit.files.text import first_line, lines_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("toolkit", "data_gen", "analysis", "benchmarks")
ODD = ["\u0085", "\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"]


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_splits_text_at_other_characters(package):
    """str.splitlines, anywhere: a text that holds U+2028 would fall into two lines."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "splitlines"
    ]
    assert not found


@pytest.mark.parametrize("odd", ODD)
def test_lines_are_split_at_newlines_only(odd):
    assert lines_of(f"a{odd}b\nc") == [f"a{odd}b", "c"]
    assert lines_of("a\nb\n") == ["a", "b"] == lines_of("a\nb")
    assert lines_of("a\n\n", keep_ends=True) == ["a\n", "\n"]
    assert lines_of("") == []
    assert first_line(f"\n a{odd}b \nc") == f"a{odd}b"
    assert first_line(ValueError()) == "ValueError"

"""Names: those of tests are the same in every process, those in code are the field's words (the table of CONTRIBUTING)."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = ("toolkit", "data_gen", "analysis", "benchmarks", "hydra_plugins", "tests")


@pytest.mark.slow  # pytest-xdist compares them, and sets are ordered by every process
def test_names_do_not_depend_on_hashing():
    listed = []
    for seed in ("1", "2"):
        words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
        finished = subprocess.run(
            words, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        listed.append([line for line in finished.stdout.split("\n") if "::" in line])
    assert listed[0] and listed[0] == listed[1]


# -- words ----------------------------------------------------------------------------------------------------------------

# What CONTRIBUTING's table of words forbids, as parts of names in code, and the config keys that keep such a name.
FORBIDDEN = {"yardstick", "yardsticks", "likeliest", "served", "asked", "judged", "judging", "contender", "contenders", "mend",
             "outlook", "workbench", "chance", "chances"}  # fmt: skip
WHOLE = {"mine", "here", "there", "found"}  # as whole names; `text_here` says where a text is
KEYS = {"served", "asked", "judged", "judged_by"}  # of configs, manifests and hashes


def names_in(tree):
    """Every name that a module gives: variables, arguments, functions, classes, attributes that it sets."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def words_of(name):
    """The words of a name: of snake_case and of CamelCase."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def is_wrong(name):
    """Whether a name is, or has among its words, a forbidden one; a test's own name is a sentence, and servers are asked."""
    forbidden = words_of(name) & FORBIDDEN - ({"asked", "served"} if name.startswith("test_") else set())
    return (bool(forbidden) and name not in KEYS) or name.lower() in WHOLE


def test_names_in_code_are_the_fields_words():
    """Library and tests."""
    paths = sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    names = ((path, name) for path in paths for name in names_in(ast.parse(path.read_text(encoding="utf-8"))))
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in names if is_wrong(name)] == []


def test_the_check_of_names_sees_them():
    tree = ast.parse(
        "likeliest = 1\nclass JudgedLengths:\n    def mend_it(self, asked_for, mine): self.outlook, text_here = 2, 3"
    )
    wrong = {name for name in names_in(tree) if is_wrong(name)}
    assert wrong == {"likeliest", "JudgedLengths", "mend_it", "asked_for", "mine", "outlook"}


@pytest.mark.parametrize("word", ["yardstick", "likeliest"])
def test_pages_and_comments_say_baseline_and_top_k(word):
    """Everything but the table of words itself, what changed, and the log of what was measured."""
    kept = {"CONTRIBUTING.md", "CHANGELOG.md", "docs/log.md", "tests/test_names.py"}
    files = [path for pattern in ("*.py", "*.md", "*.yaml") for folder in (*CODE, "conf", "docs")
             for path in (ROOT / folder).rglob(pattern)]  # fmt: skip
    named = {str(path.relative_to(ROOT)) for path in (*files, *ROOT.glob("*.md")) if word in path.read_text().lower()}
    assert named <= kept

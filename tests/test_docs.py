"""The documentation's examples run as they stand; its commands compose; links and lengths hold."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from toolkit.lines import lines_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Language, title and text of every block of code."""
    return [(found[1], found[2] or "", found[3]) for found in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def test_the_examples_of_extending_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known, namespace = set(sys.modules), {}
    for language, title, text in blocks(DOCS / "extending.md"):
        if title:
            (tmp_path / title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / title).write_text(text)
        elif language == "python":
            exec(compile(text, "docs/extending.md", "exec"), namespace)
    for name in set(sys.modules) - known:
        if name.startswith("my_"):
            del sys.modules[name]
    assert "metric" in namespace and "method" in namespace


def test_the_readmes_python_runs():
    (text,) = [text for language, _, text in blocks(ROOT / "README.md") if language == "python"]
    namespace = {}
    exec(compile(text, "README.md", "exec"), namespace)
    assert namespace["generation"].counts.num_generated > 0


def test_the_readme_is_short():
    assert len(lines_of((ROOT / "README.md").read_text(encoding="utf-8"))) <= 130


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_to_files(page):
    for found in LINK.finditer(page.read_text(encoding="utf-8")):
        if "://" not in found[1]:
            assert (page.parent / found[1]).exists(), found[1]

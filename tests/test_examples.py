"""The examples are short, and run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.run_notebook import execute
from toolkit.files.text import lines_of

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py")) + sorted((ROOT / "examples").glob("*.sh"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_fits_on_a_page_and_is_listed(path):
    assert len(lines_of(path.read_text(encoding="utf-8"))) <= 62  # sixty, with what the formatter adds
    assert f"({path.name})" in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    namespace = execute(ROOT / "examples" / "first_look.ipynb")
    assert len(namespace["table"]) == 4 and len(namespace["curve"]) == 5


@pytest.mark.slow
def test_custom_generate_gives_the_texts_of_transformers(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / "custom_generate.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("the same texts: True") == 2

"""Tests have the same names in every process: pytest-xdist compares them, and sets are ordered by every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_names_do_not_depend_on_hashing():
    listed = []
    for seed in ("1", "2"):
        words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
        found = subprocess.run(
            words, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        listed.append([line for line in found.stdout.split("\n") if "::" in line])
    assert listed[0] and listed[0] == listed[1]

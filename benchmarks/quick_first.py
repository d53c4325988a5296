"""A plugin of pytest for `benchmarks.mutants`: the quickest tests come first, so that most mutants are noticed in a moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

STATS = Path("mutmut-stats.json")  # written by mutmut where its tests run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by the time that each test took on the code as it is; modules' and sessions' fixtures may be made more than once."""
    if not STATS.is_file():
        return
    seconds = json.loads(STATS.read_text(encoding="utf-8")).get("duration_by_test", {})
    items.sort(key=lambda item: seconds.get(item.nodeid, 0.0))

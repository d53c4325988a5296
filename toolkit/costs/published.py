"""Cost tables that others published, of mixtures of experts: costs=published/NAME:C, C the cost of a draft forward pass.

They time the target's forward pass at batch size 1 over some numbers of tokens. More tokens reach more experts, so the first
one beyond the next is the dearest. Kernels move such a table by a factor of 2: none of them stands for another model, engine or
device. The draft was not timed: C is a share of a target forward pass over one token. Every table has its source and date.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, unknown_name

PREFIX = "published/"
TABLES = Path(__file__).parents[1] / "assets" / "published_costs.json"


def published(words: str) -> tuple[dict[float, float], float, dict[str, Any]]:
    """The target's times by tokens, the draft's time, and where they are from, of published/NAME:C. Raises InputError."""
    name, _, ratio = words.removeprefix(PREFIX).partition(":")
    if name not in _tables():
        raise unknown_name("published cost table", name, _tables())
    try:
        cost = float(ratio)
    except ValueError:
        cost = 0.0
    if not 0 < cost < float("inf"):
        raise InputError(
            f"costs={words}: expected {PREFIX}{name}:C, C the cost of a draft forward pass in target forward passes, as the "
            "target alone was timed"
        )
    table = _tables()[name]
    target = {float(width): float(seconds) for width, seconds in table["target"].items()}
    return target, cost * target[1.0], table


def names() -> list[str]:
    """What tables there are."""
    return list(_tables())


@cache
def _tables() -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(TABLES.read_text(encoding="utf-8"))
    return tables

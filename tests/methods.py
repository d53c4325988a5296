"""Which methods stand for others in `make test`; `make test-slow` has the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import pytest

from toolkit import config


@cache
def one_of_each() -> frozenset[str]:
    """One method of every proposer, scheme and rule: the first that reads the draft's states row by row, else the first."""
    reading, others = [], []
    for name in sorted(config.choices("method")):
        method = config.method(name)
        first = method.policy.reads_states and not method.couples_rows
        (reading if first else others).append((name, method))
    chosen: dict[tuple[type, Any, type], str] = {}
    for name, method in [*reading, *others]:
        chosen.setdefault((type(method.proposer), method.proposer.scheme, type(method.rule)), name)
    return frozenset(chosen.values())


def at_temperatures(names: Sequence[str]) -> list[Any]:
    """Parameters (name, temperature): every name at 1, as `others_slow` marks them, and `one_of_each` at 0, which is slow."""
    cold = [pytest.param(name, 0.0, marks=pytest.mark.slow) for name in names if name in one_of_each()]
    warm = [pytest.param(name, 1.0, marks=[] if name in one_of_each() else pytest.mark.slow) for name in names]
    return warm + cold


def others_slow(names: Sequence[str], kept: Collection[str] | None = None) -> list[Any]:
    """Parameters of a test: names that are not kept are slow; kept: None: `one_of_each`."""
    kept = one_of_each() if kept is None else kept
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]

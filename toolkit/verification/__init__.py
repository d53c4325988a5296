"""Rules that decide acceptance; `get` finds them by the name they declare."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from typing import Any

from toolkit.errors import unknown_name
from toolkit.verification import rules
from toolkit.verification.base import PathRule, Rule, SelectionRule, TextRule
from toolkit.verification.layer import LayerRule, Outcome

__all__ = ["LayerRule", "Outcome", "PathRule", "Rule", "SelectionRule", "TextRule", "get", "names"]


def names() -> list[str]:
    """Every rule's name."""
    return sorted(_rules())


def get(name: str, **params: Any) -> Any:
    """The rule `name`, built with `params`. Raises InputError with the nearest names if there is none."""
    classes = _rules()
    if name not in classes:
        raise unknown_name("rule", name, classes)
    return classes[name](**params)


@cache
def _rules() -> dict[str, type[Rule]]:
    """The rule that each file of `rules/` declares. Raises TypeError unless it is one, named like its file."""
    classes: dict[str, type[Rule]] = {}
    for info in pkgutil.iter_modules(rules.__path__):
        module = importlib.import_module(f"{rules.__name__}.{info.name}")
        own = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
        declared = [c for c in own if issubclass(c, Rule) and "name" in vars(c)]
        if [c.name for c in declared] != [info.name]:
            raise TypeError(f"{module.__name__}: expected one rule with name = {info.name!r}, got {declared}")
        classes[info.name] = declared[0]
    return classes

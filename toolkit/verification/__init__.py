"""Rules that decide acceptance, one per file; `get` finds them by the name of their file."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from typing import Any

from toolkit.errors import unknown_name
from toolkit.verification.base import PathRule, Rule, SelectionRule, TextRule
from toolkit.verification.layer import LayerRule, Outcome

__all__ = ["LayerRule", "Outcome", "PathRule", "Rule", "SelectionRule", "TextRule", "get", "names"]


def names() -> list[str]:
    """Every rule's name: the modules of this folder that define one."""
    return sorted(_rules())


def get(name: str, **params: Any) -> Any:
    """The rule `name`, built with `params`. Raises InputError with the nearest names if there is none."""
    rules = _rules()
    if name not in rules:
        raise unknown_name("rule", name, rules)
    return rules[name](**params)


@cache
def _rules() -> dict[str, type[Rule]]:
    """The rule each module defines (its last one, if several); modules of helpers define none."""
    found = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        own = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
        rules = [c for c in own if issubclass(c, Rule) and c is not Rule and not inspect.isabstract(c)]
        if rules:
            found[info.name] = rules[-1]
    return found

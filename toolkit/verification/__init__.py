"""Rules that decide acceptance; `get` finds them by the name they declare."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from toolkit.config.parts import classes_in
from toolkit.errors import unknown_name
from toolkit.verification.base import PathRule, Rule, SelectionRule, TextRule, TreeRule
from toolkit.verification.layer import LayerRule, Outcome

__all__ = ["LayerRule", "Outcome", "PathRule", "Rule", "SelectionRule", "TextRule", "TreeRule", "get", "names"]


def names() -> list[str]:
    """Every rule's name."""
    return sorted(classes_in("rule"))


def get(name: str, **params: Any) -> Any:
    """The rule `name`, built with `params`. Raises InputError with the nearest names if there is none."""
    if name not in names():
        raise unknown_name("rule", name, names())
    module, class_name = classes_in("rule")[name]
    return getattr(import_module(module), class_name)(**params)

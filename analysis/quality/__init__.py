"""Quality of texts; each metric declares its name. Scoring belongs outside timed windows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from analysis.quality.base import Metric, Score, TextMetric, reasons, references, table
from toolkit.config import choice, choices, instantiate
from toolkit.errors import InputError, unknown_name

__all__ = [
    "Metric", "Score", "TextMetric", "build", "config_of", "configs", "get", "names", "reasons", "references", "table",
]  # fmt: skip


def names() -> list[str]:
    return choices("quality")


def config_of(name: str, **options: Any) -> dict[str, Any]:
    """The metric's class and its options, some of them changed. Raises InputError for unknown names."""
    if name not in names():
        raise unknown_name("quality metric", name, names())
    config = choice("quality", name)
    for option in options:
        if option not in config or option == "_target_":
            raise unknown_name(f"option of the quality metric {name}", option, set(config) - {"_target_"})
    return {**config, **options}


def get(name: str, **options: Any) -> Metric:
    """The metric of this name, with some of its options changed. Raises InputError for unknown names."""
    metric: Metric = instantiate(config_of(name, **options))
    return metric


def configs(entries: Iterable[str | Mapping[str, Mapping[str, Any] | None]]) -> dict[str, dict[str, Any]]:
    """Metrics by name from a config's list: names, or {name: {option: value}}; each with its class and all options."""
    configs: dict[str, dict[str, Any]] = {}
    for entry in entries:
        for name, options in ({entry: None} if isinstance(entry, str) else entry).items():
            if name in configs:
                raise InputError(f"quality: expected every metric once, got {name} twice")
            configs[name] = config_of(name, **(options or {}))
    return configs


def build(entries: Iterable[str | Mapping[str, Mapping[str, Any] | None]]) -> dict[str, Metric]:
    return {name: instantiate(config) for name, config in configs(entries).items()}

"""How good texts are. One metric per file, one yaml per metric in `conf/quality/`. Scoring belongs outside timed windows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from analysis.quality.base import Metric, Score, TextMetric, reasons, references, table
from toolkit.config import choices, find, instantiate, plain
from toolkit.errors import InputError, unknown_name

__all__ = ["Metric", "Score", "TextMetric", "build", "get", "names", "reasons", "references", "table"]


def names() -> list[str]:
    """The metrics there are."""
    return choices("quality")


def get(name: str, **options: Any) -> Metric:
    """The metric `conf/quality/<name>.yaml`, with some of its options changed. Raises InputError for unknown names."""
    from omegaconf import OmegaConf

    if name not in names():
        raise unknown_name("quality metric", name, names())
    config = plain(OmegaConf.load(find("quality", name)))
    for option in options:
        if option not in config or option == "_target_":
            raise unknown_name(f"option of the quality metric {name}", option, set(config) - {"_target_"})
    return instantiate({**config, **options})


def build(wanted: Iterable[str | Mapping[str, Mapping[str, Any] | None]]) -> dict[str, Metric]:
    """Metrics by name from a config's list: names, or {name: {option: value}}."""
    metrics: dict[str, Metric] = {}
    for entry in wanted:
        for name, options in ({entry: None} if isinstance(entry, str) else entry).items():
            if name in metrics:
                raise InputError(f"quality: expected every metric once, got {name} twice")
            metrics[name] = get(name, **(options or {}))
    return metrics

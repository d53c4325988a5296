"""The panels of a group of folders: the result, read from saved tables. What is not there is shown as missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from analysis.reporting import charts
from analysis.reporting.folders import Folder
from analysis.reporting.tables import TableView, frame_view


@dataclass(frozen=True)
class Panel:
    """One panel: its charts, or why there is none. `logged` are the keys under which W&B runs hold the same."""

    name: str
    title: str
    missing: str = ""
    charts: Sequence[tuple[str, dict[str, Any]]] = field(default_factory=list)
    table: TableView | None = None
    folders: Sequence[Folder] = field(default_factory=list)
    logged: Sequence[str] = field(default_factory=list)


def panels(folders: Sequence[Folder]) -> list[Panel]:
    """Frontier, throughput over c, acceptance by position, calibration, comparison."""
    return [_frontier(folders), _costs(folders), _positions(folders), _calibration(folders), _comparison(folders)]


Draw = Callable[[pd.DataFrame, str], dict[str, Any]]


def _held(
    folders: Sequence[Folder], stages: Sequence[str], name: str, needs: Sequence[str]
) -> Iterator[tuple[Folder, pd.DataFrame]]:
    """Tables of this name that have these columns and a line."""
    for folder in folders:
        table = folder.table(name) if folder.stage in stages else None
        if table is not None and len(table) and set(needs) <= set(table.columns):
            yield folder, table


def _frontier(folders: Sequence[Folder]) -> Panel:
    needs = ("method", "setting", "discard_rate", "verification_rate", "undominated")
    held = list(_held(folders, ("frontier",), "settings", needs)) or list(_held(folders, ("sweep",), "summary", needs))
    drawn = [*_by_dataset(held, charts.frontier_chart)]
    logged = [f"frontier/pareto-{name}" if folder.stage == "frontier" else "sweep/pareto" for folder, name, _ in drawn]
    return _panel(
        "frontier", "Frontier: discard rate against verification rate", "a frontier or a sweep", drawn, logged
    )


def _costs(folders: Sequence[Folder]) -> Panel:
    drawn = [
        *_by_dataset(_held(folders, ("frontier",), "costs", ("method", "cost_ratio", "throughput")), charts.costs_chart)
    ]
    return _panel(
        "costs",
        "Throughput over the cost ratio",
        "a frontier",
        drawn,
        [f"frontier/costs-{name}" for _, name, _ in drawn],
    )


def _positions(folders: Sequence[Folder]) -> Panel:
    held = [
        (folder, charts.few_settings(table, folder.table("summary")))
        for folder, table in _held(folders, ("sweep",), "positions", ("position", "reached", "accepted", "rate"))
    ]
    drawn = [*_by_dataset([(f, t) for f, t in held if (t.reached >= 10).any()], charts.positions_chart)]
    return _panel(
        "positions",
        "Acceptance by position in the round",
        "a sweep with chains",
        drawn,
        ["sweep/positions"] * len(drawn),
    )


def _calibration(folders: Sequence[Folder]) -> Panel:
    needs = ("scores", "count", "mean_prob", "mean_label")
    held = _held(folders, ("train", "calibration"), "reliability", needs)
    drawn = [
        (folder, folder.path.name, charts.reliability_chart(table, f"reliability of {folder.path.name}"))
        for folder, table in held
    ]
    return _panel("calibration", "Calibration of heads", "a trained head", drawn, ["val/reliability"] * len(drawn))


def _comparison(folders: Sequence[Folder]) -> Panel:
    for stage, name in (("compare", "comparison"), ("frontier", "results"), ("sweep", "summary")):
        for folder, table in _held(folders, (stage,), name, ("method",)):
            key = {"comparison": "compare/table", "results": "frontier/frontier", "summary": "sweep/summary"}[name]
            return Panel("comparison", "Comparison", table=frame_view(name, table), folders=[folder], logged=[key])
    return Panel("comparison", "Comparison", "Missing: none of the folders is a comparison, a frontier or a sweep.")


def _by_dataset(held: Any, draw: Draw) -> Iterator[tuple[Folder, str, dict[str, Any]]]:
    """One chart per folder and data set."""
    for folder, table in held:
        parts = table.groupby("dataset", sort=False) if "dataset" in table else [("", table)]
        for dataset, part in parts:
            split = f" {part.split.iloc[0]}" if "split" in part and pd.notna(part.split.iloc[0]) else ""
            yield folder, str(dataset), draw(part, f"{dataset}{split}, {folder.path.name}")


def _panel(
    name: str, title: str, needed: str, drawn: Sequence[tuple[Folder, str, dict[str, Any]]], logged: Sequence[str]
) -> Panel:
    if not drawn:
        return Panel(name, title, f"Missing: none of the folders is {needed} with such a table.")
    folders = list({folder.path: folder for folder, _, _ in drawn}.values())
    return Panel(
        name,
        title,
        charts=[(spec["description"], spec) for _, _, spec in drawn],
        folders=folders,
        logged=list(dict.fromkeys(logged)),
    )

"""A paper's figure from the tables of runs: one panel per data set, one line (or cloud of points) per method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.looks import MARKERS, METHODS, Look, look
from analysis.figures.scatter import undominated
from analysis.papers.cells import Runs, column_of
from analysis.papers.spec import AXES, Figure, check_source, source_of
from toolkit.figure_style import PALETTE, figure


def draw(told: Figure, runs: Runs, item: str, path: Path) -> pd.DataFrame:
    """Draw to `path`; returns what is shown: panel, curve, x, y. Panels without a run, or not measured, are left out."""
    common = {axis: getattr(told, axis) for axis in AXES}
    axes_of = {name: {axis: (at or {}).get(axis, common[axis]) for axis in AXES} for name, at in told.panels.items()}
    parts = []
    for panel, at in told.panels.items():
        check_source({key: value for key, value in (at or {}).items() if key not in AXES}, item)
        for name, curve in told.curves.items():
            check_source(curve, item)
            source = source_of(at or {}, curve or {})
            if source.get("run") in runs.folders:
                lines = runs.lines(source, f"{item}, {panel}, {name}")
                parts.append(
                    _points(lines, axes_of[panel], item).assign(panel=panel, curve=name, method=_method(lines, name))
                )
    columns = ["panel", "curve", "method", "x", "y"]
    shown = pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)
    panels = [name for name in told.panels if (shown.panel == name).any()]
    looks = _looks(shown)
    with figure(path, "page", 0.5 if len(panels) > 1 else 0.62, columns=max(1, len(panels))) as (axes,):
        for axis, panel in zip(axes, panels, strict=False):
            for name, part in shown[shown.panel == panel].groupby("curve", sort=False):
                _draw_curve(axis, part, str(name), looks[str(name)], told.points, axes_of[panel]["better"])
            axis.set_title(panel, fontweight="normal")
        if panels:
            _label(axes, [axes_of[panel] for panel in panels])
            entries = dict(zip(*(axes[0].get_legend_handles_labels()[::-1]), strict=True))
            axes[0].figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=3)
    return shown


def _points(lines: pd.DataFrame, axes: Mapping[str, Any], item: str) -> pd.DataFrame:
    """x and y of some lines of a table, by x, which may be text; those that were not measured are left out."""
    x, y = (column_of(axes[axis], lines.columns, f"{item}: column") for axis in ("x", "y"))
    across = lines[x] if lines[x].map(type).eq(str).any() else lines[x].astype(float)
    return pd.DataFrame({"x": across, "y": lines[y].astype(float)}).dropna().sort_values("x")


def _draw_curve(axis: Any, part: pd.DataFrame, name: str, seen: Look, points: bool, better: str | None) -> None:
    """Markers, and a line through all of them or through those that no other one beats; none with `points`."""
    about = {"color": seen.color, "marker": seen.marker, "label": name, "markersize": 4, "linewidth": 1.3}
    axis.plot(part.x, part.y, linestyle="none" if points or better else "-", **about)
    if better:
        best = part[undominated(part.x.to_numpy(), part.y.to_numpy(), ("more x" in better, "more y" in better))]
        axis.plot(best.x, best.y, color=seen.color, linewidth=1.3)


def _label(axes: Any, told: Sequence[Mapping[str, Any]]) -> None:
    """Labels once if all panels have the same ones, else each its own."""
    for kind, place in (("x", len(told) // 2), ("y", 0)):
        shared = len({one[f"{kind}_label"] for one in told}) == 1
        for number, (axis, one) in enumerate(zip(axes, told, strict=False)):
            if not shared or number == place:
                getattr(axis, f"set_{kind}label")(one[f"{kind}_label"])


def _looks(shown: pd.DataFrame) -> dict[str, Look]:
    """By curve: its method's look where every curve is another known method, else colours and markers in order."""
    methods = shown[["curve", "method"]].drop_duplicates()
    if methods.method.is_unique and methods.method.isin(METHODS).all():
        return {str(line.curve): look(str(line.method)) for line in methods.itertuples()}
    names = list(dict.fromkeys(map(str, shown.curve)))
    return {
        name: Look(PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]) for place, name in enumerate(names)
    }


def _method(lines: pd.DataFrame, name: str) -> str:
    """Whose colour a curve has: its method's if it shows one, else its own."""
    methods = lines["method"].unique() if "method" in lines else []
    return str(methods[0]) if len(methods) == 1 else name

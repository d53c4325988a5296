"""A paper's figure from the tables of runs: one panel per data set, one line (or cloud of points) per method.

x, y        columns, or several: the first one that the table has
x_label, y_label
better      "more x, less y": lines connect the settings that no other one of their curve beats
points      markers alone: settings that no line connects
panels      {NAME: source (`analysis.papers.table`), and x, y, labels, better where a panel has its own}
curves      {NAME: source}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.method_styles import MARKERS, METHODS, Look, look
from analysis.figures.scatter import undominated
from analysis.papers.table import Runs, check_keys, expanded, first_column, merged
from toolkit.errors import unknown_name
from toolkit.runs.figure_style import PALETTE, figure

AXES = ("x", "y", "x_label", "y_label", "better")
COLUMNS = ["panel", "curve", "method", "x", "y"]


def draw(layout: Mapping[str, Any], runs: Runs, item: str, path: Path) -> pd.DataFrame:
    """Draw to `path`; returns the points: panel, curve, x, y. Panels without a run, or not measured, are left out."""
    keys = (*AXES, "panels", "curves", "points")
    if unknown := [key for key in layout if key not in keys]:
        raise unknown_name("table.figure: key", unknown[0], keys)
    panels = {name: {**{key: layout.get(key) for key in AXES}, **at} for name, at in expanded(layout["panels"]).items()}
    curves = expanded(layout["curves"])
    for source in (*panels.values(), *curves.values()):
        check_keys(source, f"figure of {item}", str(layout), AXES)
    parts = [pd.DataFrame(columns=COLUMNS)]
    for panel, at in panels.items():
        for name, curve in curves.items():
            source = merged(at, curve)
            if source.get("run") in runs.folders:
                lines = runs.lines(source, f"{item}, {panel}, {name}")
                methods = lines["method"].unique() if "method" in lines else []
                method = str(methods[0]) if len(methods) == 1 else name  # whose colour a curve has: its own, if several
                x, y = (first_column(at[axis], lines.columns, f"{item}: column") for axis in ("x", "y"))
                across = lines[x] if lines[x].map(type).eq(str).any() else lines[x].astype(float)  # by x, maybe text
                part = pd.DataFrame({"x": across, "y": lines[y].astype(float)}).dropna().sort_values("x")
                parts.append(part.assign(panel=panel, curve=name, method=method))
    points = pd.concat(parts[1:] or parts, ignore_index=True)[COLUMNS]
    panels = {name: at for name, at in panels.items() if (points.panel == name).any()}
    looks = _looks(points)
    with figure(path, "page", 0.5 if len(panels) > 1 else 0.62, columns=max(1, len(panels))) as (axes,):
        for number, (axis, (panel, at)) in enumerate(zip(axes, panels.items(), strict=False)):
            for name, part in points[points.panel == panel].groupby("curve", sort=False):
                style = {"color": looks[str(name)].color, "marker": looks[str(name)].marker, "linewidth": 1.3}
                line = "none" if layout.get("points") or at["better"] else "-"
                axis.plot(part.x, part.y, linestyle=line, label=str(name), markersize=4, **style)
                if at["better"]:  # a line through the points that no other one beats
                    more = ("more x" in at["better"], "more y" in at["better"])
                    best = part[undominated(part.x.to_numpy(), part.y.to_numpy(), more)]
                    axis.plot(best.x, best.y, color=style["color"], linewidth=1.3)
            axis.set_title(panel, fontweight="normal")
            for kind, middle in (("x", len(panels) // 2), ("y", 0)):  # once, if all panels have the same label
                labels = {other[f"{kind}_label"] for other in panels.values()}
                if number == middle or len(labels) > 1:
                    getattr(axis, f"set_{kind}label")(at[f"{kind}_label"])
        if panels:
            entries = dict(zip(*(axes[0].get_legend_handles_labels()[::-1]), strict=True))
            axes[0].figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=3)
    return points


def _looks(points: pd.DataFrame) -> dict[str, Look]:
    """Looks by curve: its method's where every curve is another known method, else colours and markers in order."""
    methods = points[["curve", "method"]].drop_duplicates()
    if methods.method.is_unique and methods.method.isin(METHODS).all():
        return {str(line.curve): look(str(line.method)) for line in methods.itertuples()}
    names = enumerate(dict.fromkeys(map(str, points.curve)))
    return {name: Look(PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]) for number, name in names}

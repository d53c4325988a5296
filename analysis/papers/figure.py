"""A paper's figure from the tables of runs: one panel per data set, one line (or cloud of points) per method."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis.figures.looks import MARKERS, METHODS, Look, look
from analysis.papers.cells import Runs
from analysis.papers.spec import Figure, check_source, source_of
from toolkit.errors import unknown_name
from toolkit.figure_style import PALETTE, figure


def draw(told: Figure, runs: Runs, item: str, path: Path) -> pd.DataFrame:
    """Draw to `path`; returns what is shown: panel, curve, x, y. Panels whose run was not made are left out."""
    parts = []
    for panel, at in told.panels.items():
        check_source(at, item)
        for name, curve in told.curves.items():
            check_source(curve, item)
            source = source_of(at or {}, curve or {})
            if source.get("run") not in runs.folders:
                continue
            lines = runs.lines(source, f"{item}, {panel}, {name}")
            for column in (told.x, told.y):
                if column not in lines:
                    raise unknown_name(f"{item}: column of {source['table']}", column, lines.columns)
            parts.append(pd.DataFrame({
                "panel": panel, "curve": name, "method": _method(lines, name), "x": lines[told.x], "y": lines[told.y],
            }).sort_values("x"))  # fmt: skip
    shown = (
        pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["panel", "curve", "method", "x", "y"])
    )
    panels = [name for name in told.panels if (shown.panel == name).any()]
    looks = _looks(shown)
    with figure(path, "page", 0.5 if len(panels) > 1 else 0.62, columns=max(1, len(panels))) as (axes,):
        for axis, panel in zip(axes, panels, strict=False):
            for name, part in shown[shown.panel == panel].groupby("curve", sort=False):
                seen = looks[str(name)]
                about = {"color": seen.color, "marker": seen.marker, "label": str(name), "markersize": 4}
                axis.plot(part.x, part.y, linestyle="none" if told.points else "-", linewidth=1.3, **about)
            axis.set_title(panel, fontweight="normal")
        if panels:
            axes[0].set_ylabel(told.y_label)
            axes[len(panels) // 2].set_xlabel(told.x_label)
            entries = dict(zip(*(axes[0].get_legend_handles_labels()[::-1]), strict=True))
            axes[0].figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=3)
    return shown


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

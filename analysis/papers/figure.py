"""A paper's figure from the tables of runs: one panel per data set, one line (or cloud of points) per method."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis.figures.looks import look
from analysis.papers.cells import Runs
from analysis.papers.spec import Figure, check_source, merged
from toolkit.errors import unknown_name
from toolkit.figure_style import figure


def draw(told: Figure, runs: Runs, item: str, path: Path) -> pd.DataFrame:
    """Draw to `path`; returns what is shown: panel, curve, x, y. Panels whose run was not made are left out."""
    parts = []
    for panel, at in told.panels.items():
        check_source(at, item)
        for name, curve in told.curves.items():
            check_source(curve, item)
            source = merged(at or {}, curve or {})
            if source.get("run") not in runs.folders:
                continue
            lines = runs.lines(source, f"{item}, {panel}, {name}")
            for column in (told.x, told.y):
                if column not in lines:
                    raise unknown_name(f"{item}: column of {source['table']}", column, lines.columns)
            parts.append(pd.DataFrame({
                "panel": panel, "curve": name, "method": _method(lines, name), "x": lines[told.x], "y": lines[told.y],
            }).sort_values("x"))  # fmt: skip
    shown = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["panel", "curve", "method", "x", "y"])
    panels = [name for name in told.panels if (shown.panel == name).any()]
    methods = shown[["curve", "method"]].drop_duplicates()
    colours = methods.set_index("curve").method if methods.method.is_unique else dict.fromkeys(methods.curve)
    with figure(path, "page", 0.45 if len(panels) > 1 else 0.62, columns=max(1, len(panels))) as (axes,):
        for axis, panel in zip(axes, panels, strict=False):
            for name, part in shown[shown.panel == panel].groupby("curve", sort=False):
                seen = look(str(colours[name] or name))
                about = {"color": seen.color, "marker": seen.marker, "label": str(name), "markersize": 4}
                axis.plot(part.x, part.y, linestyle="none" if told.points else "-", linewidth=1.3, **about)
            axis.set_title(panel, fontweight="normal")
            axis.set_xlabel(told.x_label)
        if panels:
            axes[0].set_ylabel(told.y_label)
            axes[0].legend()
    return shown


def _method(lines: pd.DataFrame, name: str) -> str:
    """Whose colour a curve has: its method's if it shows one, else its own."""
    methods = lines["method"].unique() if "method" in lines else []
    return str(methods[0]) if len(methods) == 1 else name

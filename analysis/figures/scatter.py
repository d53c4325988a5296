"""One figure against another, a point with its intervals per setting; and measured seconds against explained ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from analysis.figures.method_styles import label, look
from analysis.figures.texts import note
from toolkit.runs.figure_style import MUTED, PALETTE, Width, figure


def scatter(
    settings: pd.DataFrame,
    x: str,
    y: str,
    names: tuple[str, str],
    path: Path,
    title: str,
    more: tuple[bool, bool] | None = None,
    width: Width = "page",
) -> Path:
    """One figure against another, one point with its intervals per setting, a thin line through the settings of a method.

    settings  one line per setting: method, setting, and x and y with `_low` and `_high`
    more      whether more is better, on each axis: undominated settings are filled; None: all are
    """
    complete = settings[settings[[x, y]].notna().all(axis=1)]
    with figure(path, width, aspect=0.85 if width == "column" else 0.58) as ((axes,),):
        points = complete[x].to_numpy(), complete[y].to_numpy()
        best = [True] * len(complete) if more is None else undominated(*points, more)
        filled = dict(zip(complete.index, best, strict=True))
        for method, part in complete.groupby("method", sort=False):
            line, style = part.sort_values(x), look(str(method))
            axes.plot(line[x], line[y], color=style.color, linewidth=0.9, alpha=0.5)
            axes.plot([], [], style.marker, color=style.color, markersize=4.5, label=label(str(method)))
            for index, row in line.iterrows():
                spans = [[[row[v] - row[f"{v}_low"]], [row[f"{v}_high"] - row[v]]] for v in (x, y)]
                options = {"ecolor": style.color, "elinewidth": 0.6, "alpha": 0.45, "fmt": "none"}
                axes.errorbar(row[x], row[y], spans[1], spans[0], **options)
                face, size = (style.color, 5.5) if filled[index] else ("white", 4.5)
                axes.plot(row[x], row[y], style.marker, color=style.color, markerfacecolor=face, markersize=size)
        axes.set_xlabel(names[0])
        axes.set_ylabel(names[1])
        axes.set_title(title, pad=16 if width == "column" else 20)
        axes.margins(x=0.05, y=0.1)
        axes.figure.legend(loc="outside lower left" if width == "column" else "outside right center", ncols=1)
        if more is not None:
            sides = f"{'upper' if more[1] else 'lower'} {'right' if more[0] else 'left'}"
            note(axes, f"better: {sides}; filled: undominated")
    return path


def undominated(x: np.ndarray, y: np.ndarray, more: tuple[bool, bool]) -> list[bool]:
    """Whether no other point is at least as good on both axes and better on one."""
    a, b = (values if up else -values for values, up in zip((x, y), more, strict=True))
    return [not bool(((a >= a[i]) & (b >= b[i]) & ((a > a[i]) | (b > b[i]))).any()) for i in range(len(a))]


def explained(responses: pd.DataFrame, path: Path, width: Width = "column") -> Path:
    """Seconds of responses against what their counts explain. responses: way, seconds, explained (maybe missing)."""
    with figure(path, width, aspect=0.85) as ((axes,),):
        rows = responses[responses.explained.notna()]
        for number, (way, part) in enumerate(rows.groupby("way", sort=False)):
            axes.scatter(part.explained, part.seconds, s=9, color=PALETTE[number % 6], label=str(way))
        high = float(rows[["explained", "seconds"]].max().max())
        axes.plot([0, high], [0, high], color=MUTED, linewidth=1)
        axes.set_xlabel("t_draft x draft passes + t_target x target passes (s)")
        axes.set_ylabel("seconds of a response")
        axes.legend()
    return path

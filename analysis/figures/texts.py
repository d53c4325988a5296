"""Texts in figures, placed by textalloc where they cover neither points nor lines nor each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.collections import PathCollection
from matplotlib.lines import Line2D

from toolkit.runs.figure_style import MUTED

Text = tuple[float, float, str, str]  # x, y, what it says, colour


def place(axes: Any, texts: Sequence[Text], scale: float = 0.92, bold: bool = True) -> None:
    """Write texts beside their points (x, y), away from everything that is drawn; a thin line joins those far away.

    The axes must have their final limits. Works on linear and logarithmic scales.
    """
    import textalloc

    if not texts:
        return
    axes.figure.draw_without_rendering()  # fixes the layout
    x, y, words, colors = (list(values) for values in zip(*texts, strict=True))
    lines = [line.get_xydata() for line in axes.lines if line.get_transform().contains_branch(axes.transData)]
    lines = [line for line in lines if len(line) > 1]
    clouds = [drawn for drawn in axes.collections if isinstance(drawn, PathCollection)]  # no bands, no error bars
    points = [tuple(row) for cloud in clouds for row in np.asarray(cloud.get_offsets())]
    points += [tuple(row) for line in lines for row in line]
    spots = np.array(points) if points else np.array([x, y]).T
    size = axes.xaxis.label.get_size() * scale
    textalloc.allocate(
        axes, x, y, words, x_scatter=spots[:, 0], y_scatter=spots[:, 1],
        x_lines=[line[:, 0] for line in lines], y_lines=[line[:, 1] for line in lines],
        textsize=size, textcolor=colors, linecolor=colors, linewidth=0.6, fontweight="bold" if bold else "normal",
        margin=0.006, min_distance=0.02, max_distance=0.35, nbr_candidates=600, avoid_label_lines_overlap=True,
        clip_on=False,
    )  # fmt: skip


def legend(axes: Any, names: Sequence[str], **where: Any) -> None:
    """A legend of these lines, in this order, with their markers as large as in the figure."""
    lines = {line.get_label(): line for line in axes.lines}
    entries = [(name, lines[name]) for name in dict.fromkeys(names) if name in lines]
    handles = [
        Line2D([], [], color=line.get_color(), linestyle=line.get_linestyle(), marker=line.get_marker(), markersize=4)
        for _, line in entries
    ]
    axes.legend(handles, [name for name, _ in entries], **where)


def note(axes: Any, text: str) -> None:
    """A line between the title and the axes."""
    size = axes.xaxis.label.get_size() * 0.85
    written = axes.text(0, 1.012, text, transform=axes.transAxes, ha="left", va="bottom", fontsize=size, color=MUTED)
    written.set_in_layout(False)  # a long note must not squeeze the axes

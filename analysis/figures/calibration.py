"""Reliability diagrams per data set and scope: mean probability against mean label, with counts and the ECE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from toolkit.files.atomic import write_atomic
from toolkit.runs.figure_style import Width
from toolkit.training.export import draw_reliability

COLORS = {"raw": "#D55E00", "corrected": "#0072B2", "calibrated": "#2BA37C"}
FEWEST = 10  # samples of a bin that is drawn
MARKERS = {"raw": "s", "corrected": "D", "calibrated": "o"}


def diagrams(bins: pd.DataFrame, scores: pd.DataFrame, path: Path, title: str) -> Path:
    """One column per data set, a row for single tokens and one for products; below each the counts of its bins.

    bins    columns dataset, scope, version, from, to, count, mean_prob, mean_label
    scores  columns dataset, in_distribution, scope, version, ece
    """
    datasets, scopes = list(dict.fromkeys(scores.dataset)), ("position", "product")
    figure = Figure(figsize=(3.2 * len(datasets) + 0.6, 8.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(4, len(datasets), squeeze=False, sharex=True, height_ratios=(3, 1, 3, 1))
    for column, dataset in enumerate(datasets):
        for row, scope in enumerate(scopes):
            top, bottom = axes[2 * row][column], axes[2 * row + 1][column]
            chosen = scores[(scores.dataset == dataset) & (scores.scope == scope)]
            _panel(top, bottom, bins[(bins.dataset == dataset) & (bins.scope == scope)], chosen)
            origin = "in distribution" if bool(chosen.in_distribution.iloc[0]) else "out of distribution"
            what = "single tokens" if scope == "position" else "products"
            top.set_title(f"{dataset}, {what}\n({origin})", fontsize=9, loc="left")
        axes[-1][column].set_xlabel("predicted probability")
    for row in (0, 2):
        axes[row][0].set_ylabel("acceptance probability")
        axes[row + 1][0].set_ylabel("samples")
    figure.suptitle(title, fontsize=11)
    write_atomic(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
    return path


def reliability(bins: pd.DataFrame, path: Path, title: str = "", width: Width = "column") -> Path:
    """Share accepted over mean prediction per bin, above how many positions each bin holds.

    bins  scores (one line of the figure each), from, to, count, mean_prob, mean_label; mean_label_low and mean_label_high
          if there are intervals
    """
    return draw_reliability(bins.to_dict("records"), path, title, width)


def _panel(top: Axes, bottom: Axes, bins: pd.DataFrame, scores: pd.DataFrame) -> None:
    """One diagram above its counts."""
    bottom.set_yscale("log")
    top.plot([0, 1], [0, 1], color="#6E6E6E", linewidth=0.8)
    for version, color in COLORS.items():
        rows = bins[bins.version == version]
        dense = rows[rows["count"] >= FEWEST]
        ece = float(scores[scores.version == version].ece.iloc[0])
        style: dict[str, Any] = {"color": color, "marker": MARKERS[version], "markersize": 3.5, "linewidth": 1.2}
        top.plot(dense.mean_prob, dense.mean_label, label=f"{version}, ECE {ece:.3f}", **style)
        number = round(1 / float((rows["to"] - rows["from"]).iloc[0]))
        counts = np.zeros(number)  # of all bins, empty ones too
        counts[np.rint(rows["from"] * number).astype(int)] = rows["count"]
        bottom.stairs(counts, np.linspace(0, 1, number + 1), color=color)
    top.legend(fontsize=7, frameon=False, loc="upper left")
    bottom.set_ylim(bottom=FEWEST)
    bottom.minorticks_off()
    top.set_xlim(0, 1)
    top.set_ylim(0, 1)

"""The reliability diagram of a trained head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.runs.figure_style import MUTED, PALETTE, Width, figure

MARKERS = ("o", "s", "D", "^")


def draw_reliability(bins: Sequence[Mapping[str, Any]], path: Path, title: str = "", width: Width = "column") -> Path:
    """Share accepted over mean prediction per bin, above how many positions each bin holds.

    bins  scores (whose: one line of the figure each), from, to, count, mean_prob, mean_label; a band where there are
          mean_label_low and mean_label_high
    """
    names = list(dict.fromkeys(str(row["scores"]) for row in bins))
    with figure(path, width, 1.15, rows=2, sharex=True, height_ratios=(3, 1)) as ((top,), (bottom,)):
        top.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle="--")
        for number, name in enumerate(names):
            rows = [row for row in bins if str(row["scores"]) == name and row["count"] > 0]
            color, x = PALETTE[number % len(PALETTE)], [row["mean_prob"] for row in rows]
            style = {"marker": MARKERS[number % len(MARKERS)], "markersize": 3.5, "linewidth": 1.2}
            top.plot(x, [row["mean_label"] for row in rows], color=color, label=name, **style)
            if all("mean_label_low" in row for row in rows):
                ends = ([row[f"mean_label_{end}"] for row in rows] for end in ("low", "high"))
                top.fill_between(x, *ends, color=color, alpha=0.15, linewidth=0)
            edges = [*(row["from"] for row in rows), rows[-1]["to"]] if rows else []
            if rows:
                bottom.stairs([row["count"] for row in rows], edges, color=color, linewidth=1.2)
        top.set(xlim=(0, 1), ylim=(0, 1), ylabel="share accepted", title=title)
        top.legend(loc="upper left")
        bottom.set(xlabel="predicted P(accepted)", ylabel="positions")
    return path

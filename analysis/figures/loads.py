"""Speed-up over batch size, one line per method, the best marked."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from analysis.figures import plots
from analysis.tables.grid import PLAIN


def speedups(table: pd.DataFrame, path: Path, about: str) -> Path:
    """Draw the best setting of every method at every batch size (columns of `analysis.loads.choosing.choose`)."""
    best = table.loc[table.groupby(["method", "batch"]).dev_tokens_per_second.idxmax()]
    with plots.styled(path) as (_, axes):
        for method, part in best[best.method != PLAIN].groupby("method", sort=False):
            look = plots.look(str(method))
            part = part.sort_values("batch")
            axes.plot(part.batch, part.speedup, color=look.color, marker=look.marker, label=plots.label(str(method)))
            axes.fill_between(
                part.batch, part.speedup_low, part.speedup_high, color=look.color, alpha=0.12, linewidth=0
            )
        advised = table[table.advised]
        axes.scatter(
            advised.batch, advised.speedup, s=150, facecolors="none", edgecolors=plots.INK, label="advised", zorder=5
        )
        axes.axhline(1.0, color=plots.MUTED, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(set(table.batch)), [str(size) for size in sorted(set(table.batch))])
        axes.set_xlabel("batch size")
        axes.set_ylabel("tokens per second, times plain decoding")
        axes.set_title(about)
        axes.legend(fontsize=8, frameon=False)
    plt.close("all")
    return path

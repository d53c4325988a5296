"""Speed-up over batch size."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis.figures.method_styles import look, short
from analysis.figures.texts import legend, note
from analysis.tables.grid import PLAIN
from toolkit.runs.figure_style import INK, MUTED, Width, figure


def speedups(table: pd.DataFrame, path: Path, title: str, width: Width = "page") -> Path:
    """Tokens per second over autoregressive decoding's, one line per method, intervals as bands, the advised settings circled.

    table  columns of `analysis.loads.choosing.choose`; of several drafts the faster one is drawn
    """
    best = table.loc[table.groupby(["method", "batch"]).dev_times_plain.idxmax()]
    sizes = sorted(set(table.batch))
    with figure(path, width, aspect=0.72 if width == "column" else 0.58) as ((axes,),):
        axes.axhline(1.0, color=MUTED, linewidth=1.0)
        for method, part in best[best.method != PLAIN].groupby("method", sort=False):
            line, style = part.sort_values("batch"), look(str(method))
            options = {"color": style.color, "marker": style.marker, "markersize": 4, "label": short(str(method))}
            axes.plot(line.batch, line.speedup, linewidth=1.3, **options)
            axes.fill_between(
                line.batch, line.speedup_low, line.speedup_high, color=style.color, alpha=0.12, linewidth=0
            )
        advised = table[table.advised]
        axes.scatter(advised.batch, advised.speedup, s=110, facecolors="none", edgecolors=INK, linewidth=1.2, zorder=5)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("batch size (requests decoded side by side)")
        axes.set_ylabel("tokens per second / plain decoding's")
        axes.set_title(title, pad=16)
        legend(axes, [short(str(method)) for method in best.method.unique() if method != PLAIN], loc="upper right")
        note(axes, "circles: advised; bands: intervals over prompts; line at 1: plain decoding")
    return path


def over_plain(table: pd.DataFrame, path: Path, title: str, width: Width = "page") -> Path:
    """Tokens per second over autoregressive decoding's by load, the best setting of every method.

    table  kind ("users" or "requests/s"), amount, method, times_plain
    """
    kinds = list(dict.fromkeys(table.kind))
    with figure(path, width, aspect=0.58, columns=len(kinds)) as (row,):
        for axes, kind in zip(row, kinds, strict=True):
            part = table[(table.kind == kind) & (table.method != PLAIN)]
            axes.axhline(1.0, color=MUTED, linewidth=1.0)
            for method, lines in part.groupby("method", sort=False):
                best, style = lines.groupby("amount").times_plain.max(), look(str(method))
                options = {"color": style.color, "marker": style.marker, "markersize": 4, "label": short(str(method))}
                axes.plot(best.index, best, linewidth=1.3, **options)
            axes.set_xscale("log", base=2)
            amounts = sorted(set(part.amount))
            axes.set_xticks(amounts, [f"{amount:g}" for amount in amounts])
            axes.minorticks_off()
            axes.set_xlabel(kind)
            axes.set_title(title, pad=16)
            legend(axes, [short(str(method)) for method in part.method.unique()], loc="upper right")
        row[0].set_ylabel("tokens per second / plain decoding's")
    return path

"""Several candidates per position: acceptance over their number, and what a rule's arithmetic costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.looks import label, look
from toolkit.figure_style import INK, Width, figure


def acceptance(curves: pd.DataFrame, path: Path, title: str, width: Width = "page") -> Path:
    """Acceptance over the number of candidates, one line per method; dashed: the optimum. A panel per scheme.

    curves  method, scheme, K, acceptance, optimum; acceptance_low and acceptance_high if there are intervals
    """
    count = curves.scheme.nunique()
    rows, columns = (count, 1) if width == "column" else (1, count)
    panels: Any
    with figure(path, width, 0.8 * rows if width == "column" else 0.55, rows, columns, sharey=True) as panels:
        flat = [axes for row in panels for axes in row]
        for axes, (scheme, of_scheme) in zip(flat, curves.groupby("scheme", sort=False), strict=True):
            best = of_scheme.drop_duplicates("K").sort_values("K")
            axes.plot(best.K, best.optimum, color=INK, linewidth=1.2, linestyle="--", label="optimum")
            for method, curve in of_scheme.groupby("method", sort=False):
                line, style = curve.sort_values("K"), look(str(method))
                about = {"color": style.color, "marker": style.marker, "label": label(str(method))}
                axes.plot(line.K, line.acceptance, markersize=4, linewidth=1.3, **about)
                if "acceptance_low" in line:
                    ends = (line.acceptance_low, line.acceptance_high)
                    axes.fill_between(line.K, *ends, color=style.color, alpha=0.15, linewidth=0)
            axes.set_xticks(sorted(curves.K.unique()))
            axes.set_xlabel("candidates K")
            axes.set_title(str(scheme).replace("_", " "), fontweight="normal")
            axes.legend(loc="lower right")
            axes.label_outer()
        for row in panels:
            row[0].set_ylabel("acceptance probability")
        flat[0].figure.suptitle(title, x=0.01, ha="left", fontsize=flat[0].title.get_size(), fontweight="bold")
    return path


def rule_cost(table: pd.DataFrame, base: tuple[int, int], path: Path, width: Width = "page") -> Path:
    """CPU milliseconds of a tree node over the vocabulary's size and over the number of candidates, one line per rule.

    table  rule, vocab_size, num_candidates, cpu_ms, cpu_p10, cpu_p90
    base   the vocabulary and the number of candidates that are kept where the other one varies
    """
    rows, columns = (2, 1) if width == "column" else (1, 2)
    counts: Sequence[int] = sorted(table.num_candidates.unique())
    with figure(path, width, 1.5 if rows == 2 else 0.5, rows, columns, sharey=True) as panels:
        over_size, over_count = (axes for row in panels for axes in row)
        for name, lines in table.groupby("rule"):
            style = look(str(name))
            for axes, along, fixed, value in (
                (over_size, "vocab_size", "num_candidates", base[1]),
                (over_count, "num_candidates", "vocab_size", base[0]),
            ):
                line = lines[lines[fixed] == value].sort_values(along)
                about = {"color": style.color, "marker": style.marker, "label": label(str(name))}
                axes.plot(line[along], line.cpu_ms, markersize=4, linewidth=1.3, **about)
                axes.fill_between(line[along], line.cpu_p10, line.cpu_p90, color=style.color, alpha=0.15, linewidth=0)
        over_size.set(xscale="log", yscale="log", xlabel=f"vocabulary (tokens; K = {base[1]})")
        over_count.set(xscale="log", xlabel=f"candidates K (vocabulary of {base[0]:,} tokens)")
        over_count.set_xticks(counts, [str(k) for k in counts])
        over_count.minorticks_off()
        for axes in (over_size, over_count):
            axes.set_ylabel("CPU time per node (ms)")
            axes.label_outer() if rows == 1 else None
        over_count.figure.legend(
            *over_count.get_legend_handles_labels(), loc="outside lower left", ncols=4 if rows == 1 else 3
        )
    return path

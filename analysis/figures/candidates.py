"""Several candidates per position: acceptance over their number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.method_styles import label, look
from toolkit.runs.figure_style import INK, Width, figure


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
                options = {"color": style.color, "marker": style.marker, "label": label(str(method))}
                axes.plot(line.K, line.acceptance, markersize=4, linewidth=1.3, **options)
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

"""What happens within a round: acceptance by position, and how long rounds are; acceptance over the number of candidates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.method_styles import label, look, setting_name
from analysis.figures.texts import note
from toolkit.runs.figure_style import INK, MUTED, Width, figure


def acceptance_by_position(positions: pd.DataFrame, path: Path, title: str, width: Width = "page") -> Path:
    """Acceptance rate of the k-th drafted token, given that all before it were accepted; its interval as a band.

    positions  method, setting, position (from 1), reached, accepted, rate; rate_low and rate_high if there are intervals.
               Positions that fewer than 10 rounds reached are left out
    """
    frequent = positions[positions.reached >= 10]
    with figure(path, width, aspect=0.72 if width == "column" else 0.58) as ((axes,),):
        seen: list[tuple[Any, Any]] = []
        for (method, setting), part in frequent.groupby(["method", "setting"], sort=False):
            line, style = part.sort_values("position"), look(str(method))
            name = setting_name(str(method), str(setting))
            dash = ("-", "--", ":", "-.")[sum(entry == method for entry, _ in seen) % 4]
            seen.append((method, setting))
            options = {"color": style.color, "linestyle": dash, "marker": style.marker, "label": name}
            axes.plot(line.position, line.rate, markersize=3.5, linewidth=1.2, **options)
            if "rate_low" in line:
                axes.fill_between(
                    line.position, line.rate_low, line.rate_high, color=style.color, alpha=0.15, linewidth=0
                )
        if len(frequent):
            axes.set_ylim(max(frequent.rate.min() - 0.25, 0), 1.02)
        axes.set_xlabel("position in the round (k-th drafted token)")
        axes.set_ylabel("acceptance rate (accepted / reached)")
        axes.set_title(title, pad=16 if width == "column" else 20)
        _whole_ticks(axes, int(frequent.position.max()) if len(frequent) else 1)
        axes.legend(loc="lower left", ncols=1 if width == "column" else 2)
        note(axes, "given that all before it were accepted; bands: intervals")
    return path


def lengths(rounds: pd.DataFrame, path: Path, title: str, width: Width = "page") -> Path:
    """Shares of rounds that drafted, and that accepted, each number of tokens: a panel per setting.

    rounds  method, setting, length (from 0), drafted, accepted: numbers of rounds
    """
    settings = list(rounds.groupby(["method", "setting"], sort=False))
    columns = min(len(settings), 1 if width == "column" else 3)
    rows = -(-len(settings) // columns)
    panels: Sequence[Any]
    with figure(
        path, width, 0.42 * rows if columns > 1 else 0.6 * rows, rows, columns, sharex=True, sharey=True
    ) as panels:
        flat = [axes for row in panels for axes in row]
        for axes, ((method, setting), part) in zip(flat, settings, strict=False):
            total, style = max(part.drafted.sum(), 1), look(str(method))
            axes.bar(part.length - 0.2, part.drafted / total, 0.4, color="white", edgecolor=MUTED, label="drafted")
            axes.bar(part.length + 0.2, part.accepted / total, 0.4, color=style.color, label="accepted")
            axes.set_title(setting_name(str(method), str(setting)), fontweight="normal")
            if axes is flat[0]:
                axes.legend(loc="upper right")
        for axes in flat[len(settings) :]:
            axes.set_visible(False)
        for row in panels:
            row[0].set_ylabel("share of rounds")
        for axes in panels[-1]:
            axes.set_xlabel("tokens in a round")
            _whole_ticks(axes, int(rounds.length.max()) if len(rounds) else 1)
        size = flat[0].title.get_size()
        flat[0].figure.suptitle(title, x=0.01, ha="left", fontsize=size, fontweight="bold")
    return path


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


def _whole_ticks(axes: Any, most: int) -> None:
    axes.set_xticks(range(0, most + 1, 1 if most <= 10 else 5))

"""Discard rate over verification rate: what every method costs, and which settings no other one beats in both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.figures.method_styles import look, short
from analysis.figures.texts import Text, legend, note, place
from analysis.tables.grid import ORACLE, PLAIN, YARDSTICKS
from analysis.tables.selection import undominated
from toolkit.runs.figure_style import MUTED, REST, Width, figure

FEW = 5  # methods in colour, references not counted


def pareto(
    settings: pd.DataFrame, path: Path, title: str, highlight: Sequence[str] | None = None, width: Width = "page"
) -> Path:
    """Discard rate over verification rate, one curve per method; both are better when smaller.

    settings   one line per setting: method, setting, discard_rate, verification_rate, undominated; `throughput` if known;
               settings marked as `chosen` are named. Autoregressive decoding, always at (1, 0), is left out
    highlight  methods in colour, the others are grey; None: `highlighted`
    """
    drawn = settings[settings.method != PLAIN]
    chosen = highlighted(drawn) if highlight is None else list(highlight)
    with figure(path, width, aspect=0.72 if width == "column" else 0.58) as ((axes,),):
        curves = sorted(_shown_curves(drawn, width), key=lambda entry: entry[0] in (*chosen, *YARDSTICKS))
        for method, curve in curves:
            _draw_curve(axes, method, curve.sort_values("verification_rate"), method in (*chosen, *YARDSTICKS))
        axes.set_xlabel("verification rate (target forward passes per token)")
        axes.set_ylabel("discard rate (discarded per token)")
        axes.set_title(title, pad=16 if width == "column" else 20)
        beyond = _zoom(axes, drawn)
        many = len({method for method, _ in curves} & {*chosen, *YARDSTICKS}) > 3
        if many:
            legend(axes, [short(method) for method in (*chosen, *YARDSTICKS)], loc="upper right")
        place(axes, _texts(curves, chosen, width, axes, not many))
        rest = [short(method) for method in dict.fromkeys(drawn.method) if method not in (*chosen, *YARDSTICKS)]
        note(axes, "better: lower left; filled: undominated" + (f"; {beyond} beyond the edges" if beyond else ""))
        if rest:
            axes.figure.supxlabel(f"grey: {', '.join(rest)}", fontsize=axes.xaxis.label.get_size() * 0.85, color=MUTED)
    return path


def highlighted(settings: pd.DataFrame, most: int = FEW) -> list[str]:
    """The methods worth a colour: the fixed-K baseline, then those of highest throughput, or with most undominated settings."""
    own = settings[~settings.method.isin((*YARDSTICKS, PLAIN))]
    if "throughput" in own and own.throughput.notna().all():
        order = own.groupby("method", sort=False).throughput.max()
    else:
        order = own.groupby("method", sort=False).undominated.sum()
    ranked = list(order.sort_values(ascending=False, kind="stable").index)
    ranked.sort(key=lambda method: method != "speculative")
    return ranked[:most]


def few_settings(rows: pd.DataFrame, summary: pd.DataFrame | None) -> pd.DataFrame:
    """The rows of each method's best setting, few methods; all of them where no summary says which is best."""
    if summary is None or "throughput" not in summary:
        return rows
    best = summary.loc[summary.groupby("method", sort=False).throughput.idxmax()]
    best = best[best.method.isin(highlighted(summary))]
    chosen = set(zip(best.method, best.setting, strict=True))
    return rows[[key in chosen for key in zip(rows.method, rows.setting, strict=True)]]


def curves_of(settings: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The settings of each curve. A method is one curve along its parameter of most values, per value of the others."""
    for method, mine in settings.groupby("method", sort=False):
        parameters = [dict(part.split("=", 1) for part in setting.split()) for setting in mine.setting]
        names = sorted({name for parts in parameters for name in parts})
        distinct = {name: len({parts.get(name) for parts in parameters}) for name in names}
        swept = max(names, key=lambda name: distinct[name], default="")
        others = [name for name in names if name != swept and distinct[name] > 1]
        rest = [" ".join(f"{name}={parts[name]}" for name in others if name in parts) for parts in parameters]
        for name, curve in mine.groupby(np.array(rest), sort=False):
            curve.name = str(name)
            yield str(method), curve


def _shown_curves(settings: pd.DataFrame, width: Width) -> list[tuple[str, pd.DataFrame]]:
    """Curves as `curves_of` has them; where they are too many to be told apart, a method's best settings as one curve."""
    curves, most = list(curves_of(settings)), 3 if width == "page" else 1
    number = Counter(method for method, _ in curves)
    drawn = [(method, curve) for method, curve in curves if number[method] <= most]
    for method in [method for method in number if number[method] > most]:
        mine = settings[settings.method == method]
        best = mine[undominated(mine[["discard_rate", "verification_rate"]].to_numpy(dtype=float))]
        best.name = ""
        drawn.append((method, best))
    return drawn


def _zoom(axes: Any, settings: pd.DataFrame) -> int:
    """Limits that hold every undominated setting and the references; how many others lie outside."""
    x, y = settings.verification_rate, settings.discard_rate
    inside = settings.undominated.astype(bool) | settings.method.isin(YARDSTICKS)
    inside |= settings.chosen.astype(bool) if "chosen" in settings else False
    if settings.empty:  # of a sweep with autoregressive decoding alone, or where every other setting failed
        return 0
    inside = inside if inside.any() else inside | True
    low, right, top = x[inside].min(), x[inside].max(), y[inside].max()
    spans = max(right - low, 0.02), max(top, 0.02)
    axes.set_xlim(low - 0.06 * spans[0], right + 0.25 * spans[0])
    axes.set_ylim(-0.04 * spans[1], top + 0.12 * spans[1])
    return int(((x > axes.get_xlim()[1]) | (y > axes.get_ylim()[1])).sum())


def _draw_curve(axes: Any, method: str, along: pd.DataFrame, colored: bool) -> None:
    """A line through the settings; undominated ones are filled and larger."""
    style = look(method)
    color = style.color if colored else REST
    x, y = along.verification_rate.to_numpy(), along.discard_rate.to_numpy()
    dashed, level = "--" if method in YARDSTICKS else "-", 3 if colored else 2
    options = {"linewidth": 1.1 if colored else 0.7, "linestyle": dashed, "marker": style.marker, "markersize": 0}
    axes.plot(x, y, color=color, alpha=0.7, zorder=level, label=short(method), **options)
    best = along.undominated.to_numpy(dtype=bool) | (method == ORACLE)
    unit = axes.xaxis.label.get_size()
    sizes = np.where(best, 3.6, 1.8) * unit * (3 if method == ORACLE else 1 if colored else 0.7)
    faces = [color if flag else "white" for flag in best]
    options = {"edgecolors": color, "linewidths": 0.9, "zorder": level + 1}
    axes.scatter(x, y, s=sizes, marker=style.marker, c=faces, **options)


def _texts(
    curves: Sequence[tuple[str, pd.DataFrame]], chosen: Sequence[str], width: Width, axes: Any, names: bool
) -> list[Text]:
    """The chosen settings, and with `names` one name per coloured method; small families have their parameter named."""
    texts: list[Text] = []
    number = Counter(method for method, _ in curves)
    named: set[str] = set()
    for method, curve in curves:
        if method not in (*chosen, *YARDSTICKS):
            continue
        seen = (curve.verification_rate <= axes.get_xlim()[1]) & (curve.discard_rate <= axes.get_ylim()[1])
        along, color = curve[seen].sort_values("verification_rate"), look(method).color
        if along.empty:
            continue
        text = short(method)
        if 1 < number[method] <= 3 and width == "page":
            text = f"{text} {curve.name}".strip()
        if names and text not in named:
            named.add(text)
            turn = [*chosen, *YARDSTICKS].index(method)  # names take turns along their curves, so that they lie apart
            middle = along.iloc[min(int((0.15 + 0.7 * (turn * 0.618 % 1)) * len(along)), len(along) - 1)]
            texts.append((middle.verification_rate, middle.discard_rate, text, color))
        if "chosen" in along and method != ORACLE:
            for row in along[along.chosen.astype(bool)].itertuples():
                words = row.setting.split(" head=")[0]
                texts += [(row.verification_rate, row.discard_rate, words, color)] if words else []
    return texts

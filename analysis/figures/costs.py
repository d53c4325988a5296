"""Throughput over cost ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.figures.method_styles import look, short
from analysis.figures.pareto import FEW
from analysis.figures.texts import legend, note
from analysis.tables.grid import PLAIN, YARDSTICKS
from toolkit.runs.figure_style import MUTED, REST, Width, figure

TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


def costs(
    curves: pd.DataFrame,
    path: Path,
    title: str,
    marked: float | None = None,
    highlight: Sequence[str] | None = None,
    width: Width = "page",
) -> Path:
    """Throughput over cost ratios, one line per method, its interval as a band.

    curves     method, cost_ratio, throughput; throughput_low and throughput_high if there are intervals
    marked     the cost ratio that the tables are for
    highlight  methods in colour; None: the best ones at `marked`, or over all ratios
    """
    chosen = _best(curves, marked) if highlight is None else list(highlight)
    coloured = (*chosen, *YARDSTICKS, PLAIN)
    banded = "throughput_low" in curves and bool(curves.throughput_low.notna().any())
    with figure(path, width, aspect=0.72 if width == "column" else 0.58) as ((axes,),):
        for method, curve in sorted(curves.groupby("method", sort=False), key=lambda entry: entry[0] in coloured):
            line, name = curve.sort_values("cost_ratio"), str(method)
            color = look(name).color if name in coloured else REST
            dashed = "--" if name in (*YARDSTICKS, PLAIN) else "-"
            marks = {"marker": look(name).marker, "markevery": 0.12, "markersize": 3.5, "label": short(name)}
            options = {"color": color, "linewidth": 1.5 if name in chosen else 1.0, "linestyle": dashed, **marks}
            axes.plot(line.cost_ratio, line.throughput, **options)
            if banded and name in chosen:
                ends = line.throughput_low, line.throughput_high
                axes.fill_between(line.cost_ratio, *ends, color=color, alpha=0.15, linewidth=0)
        low, high = curves.cost_ratio.min(), curves.cost_ratio.max()
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        ticks = [c for c in TICKS if low * 0.999 <= c <= high * 1.001]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        if marked is not None and low <= marked <= high:
            axes.axvline(marked, color=MUTED, linewidth=0.9, linestyle=":")
        axes.set_xlabel("cost ratio c (draft forward pass / target forward pass)")
        axes.set_ylabel("tokens per target-forward time")
        axes.set_title(title, pad=16 if width == "column" else 20)
        legend(axes, [short(name) for name in (*chosen, *YARDSTICKS, PLAIN)], loc="upper right")
        rest = len(set(curves.method) - set(coloured))
        words = ["settings chosen again at every c", *(["bands: intervals over prompts"] if banded else [])]
        note(axes, "; ".join([*words, *([f"grey: {rest} others"] if rest else [])]))
    return path


def _best(curves: pd.DataFrame, marked: float | None) -> list[str]:
    """The baseline and the best methods, at most FEW."""
    own = curves[~curves.method.isin((*YARDSTICKS, PLAIN))]
    if marked is not None:
        gap = (own.cost_ratio - marked).abs()
        own = own[gap == gap.min()]
    ranked = list(own.groupby("method", sort=False).throughput.mean().sort_values(ascending=False, kind="stable").index)
    ranked.sort(key=lambda method: method != "speculative")
    return ranked[:FEW]

"""Figures, drawn from saved tables only. One look for all: light background, lines labelled where they end, the same
colour and marker for a method in every figure.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from analysis.tables.grid import ORACLE, PER_PROMPT, PLAIN, UPPER_BOUND, YARDSTICKS
from toolkit.io import write_atomic

# Pairwise distinct with normal sight, protanopia, deuteranopia and tritanopia; contrast to white above 3 (tested).
PALETTE = ("#0072B2", "#D55E00", "#2BA37C", "#B0266E", "#2E1A7A", "#5C4400")
INK, MUTED, GRID = "#1A1A1A", "#6E6E6E", "#E3E3E3"
MARKERS = ("o", "s", "D", "^")
# The order fixes colours and markers; methods that share many figures come first.
METHODS = (
    "speculative", "specdec_pp", "rate", "confidence", "block", "svip",
    "tail", "heuristic", "adaedl", "dynamic_confidence", "specinfer", "bild",
    "spectr", "mcsd", "mcsd_naive", "importance", "greedy_multi", "mtad",
    "mtjd", "beam_sampling", "speculative_beam", "dsbd", "dsbd_head", "mtad_head",
)  # fmt: skip
LABELS = {
    "speculative": "fixed K",
    "specdec_pp": "SpecDec++",
    "svip": "SVIP",
    "adaedl": "AdaEDL",
    "block": "block verification",
    "autoregressive": "plain decoding",
    "mtad": "MTAD",
    "mtjd": "MTJD",
    "mtjd_top": "MTJD, top W",
    "bild": "BiLD",
    "dsbd": "DSBD",
    "dsbd_head": "DSBD with heads",
    "dsbd_one_cache": "DSBD, one cache",
    "dsbd_published": "DSBD as published",
    "mtad_head": "MTAD with heads",
    PER_PROMPT: "fixed K per prompt",
    UPPER_BOUND: "upper bound: p and q known",
    ORACLE: "oracle: acceptance draws known",
}
SIZE, DPI = (6.4, 4.2), 160
STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
}


@dataclass(frozen=True)
class Look:
    """How a method is drawn."""

    color: str
    marker: str


def look(method: str) -> Look:
    """The same for a method in every figure; names outside the list get theirs from a hash."""
    if method == ORACLE:
        return Look(INK, "*")
    if method == UPPER_BOUND:
        return Look(INK, "P")
    if method == PLAIN:
        return Look(MUTED, "o")
    if method == PER_PROMPT:
        return Look(MUTED, "s")
    number = METHODS.index(method) if method in METHODS else zlib.crc32(method.encode())
    # Six colours and four markers repeat together every twelve methods; the shift makes 24 different looks.
    return Look(PALETTE[number % 6], MARKERS[(number + number // 12) % 4])


def label(method: str) -> str:
    """A method's name in figures and tables."""
    return LABELS.get(method, method.replace("_", " "))


def pareto(settings: pd.DataFrame, path: Path, title: str) -> Path:
    """Discard rate over verification rate, one curve per method; both are better when smaller.

    settings  one line per setting: method, setting, discard_rate, verification_rate, undominated; settings marked as
           `chosen` are named in the figure. Plain decoding, always at (1, 0), is left out.
    """
    with _figure(path) as axes:
        labels: list[tuple[float, float, str, str]] = []
        curves = list(_curves(settings[settings.method != PLAIN]))
        many = {method for method, number in Counter(method for method, _ in curves).items() if number > 3}
        for method, curve in curves:
            style, along = look(method), curve.sort_values("verification_rate")
            x, y = along.verification_rate.to_numpy(), along.discard_rate.to_numpy()
            dashed = "--" if method in YARDSTICKS else "-"
            axes.plot(x, y, color=style.color, linewidth=1.6, alpha=0.75, linestyle=dashed, zorder=2)
            size = 190 if method == ORACLE else 38
            fill = [style.color if flag or method == ORACLE else "white" for flag in along.undominated]
            axes.scatter(
                x,
                y,
                s=size,
                marker=style.marker,
                c=fill,
                edgecolors=style.color,
                linewidths=1.4,
                zorder=3,
                clip_on=False,
            )
            if "chosen" in along and method != ORACLE:
                for row in along[along.chosen].itertuples():
                    _name_point(
                        axes, row.verification_rate, row.discard_rate, row.setting.split(" head=")[0], style.color
                    )
            text = label(method) if method in many else f"{label(method)} {curve.name}".strip()
            if method not in many or all(text != other for _, _, other, _ in labels):
                labels.append((x[0], y[0], text, style.color))
        axes.set_xlabel("verification rate: target forwards per token")
        axes.set_ylabel("discard rate: discarded per token")
        axes.set_title(title, pad=20)
        axes.set_ylim(bottom=0)
        axes.margins(x=0.12)
        _write_labels(axes, labels, offset=(8, 9))
        _note(axes, "better: lower left. Filled: undominated.")
    return path


def costs(curves: pd.DataFrame, path: Path, title: str, marked: float | None = None) -> Path:
    """Throughput over cost ratios, one line per method.

    curves  method, cost_ratio, throughput
    marked  the cost ratio that the tables are for
    """
    with _figure(path) as axes:
        labels = []
        for method, curve in curves.groupby("method", sort=False):
            line = curve.sort_values("cost_ratio")
            style = look(str(method))
            dashed = "--" if method in (*YARDSTICKS, PLAIN) else "-"
            axes.plot(line.cost_ratio, line.throughput, color=style.color, linewidth=1.8, linestyle=dashed)
            labels.append((line.cost_ratio.iloc[0], line.throughput.iloc[0], label(str(method)), style.color))
        low, high = curves.cost_ratio.min(), curves.cost_ratio.max()
        axes.set_xscale("log")
        axes.set_xlim(low / (high / low) ** 0.36, high)  # room for the labels
        ticks = [c for c in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if low * 0.999 <= c <= high * 1.001]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        if marked is not None and low <= marked <= high:
            axes.axvline(marked, color=MUTED, linewidth=1, linestyle=":")
        axes.set_xlabel("cost ratio c: draft forward / target forward")
        axes.set_ylabel("tokens per target-forward time")
        axes.set_title(title, pad=12)
        _write_labels(axes, labels, offset=(-6, 0), align="right")
    return path


def scatter(
    settings: pd.DataFrame,
    x: str,
    y: str,
    names: tuple[str, str],
    path: Path,
    title: str,
    more: tuple[bool, bool] | None = None,
) -> Path:
    """One figure against another, one point with its intervals per setting, a thin line through the settings of a method.

    settings  one line per setting: method, setting, and x and y with `_low` and `_high`
    more   whether more is better, on each axis: undominated settings are filled; None: all are
    """
    known = settings[settings[[x, y]].notna().all(axis=1)]
    with _figure(path) as axes:
        best = [True] * len(known) if more is None else _undominated(known[x].to_numpy(), known[y].to_numpy(), more)
        filled = dict(zip(known.index, best, strict=True))
        for method, part in known.groupby("method", sort=False):
            line, style = part.sort_values(x), look(str(method))
            axes.plot(line[x], line[y], color=style.color, linewidth=0.9, alpha=0.5)
            axes.plot([], [], style.marker, color=style.color, markersize=5.5, label=label(str(method)))
            for index, row in line.iterrows():
                spans = [[[row[v] - row[f"{v}_low"]], [row[f"{v}_high"] - row[v]]] for v in (x, y)]
                axes.errorbar(
                    row[x], row[y], spans[1], spans[0], ecolor=style.color, elinewidth=0.6, alpha=0.45, fmt="none"
                )
                face = style.color if filled[index] else "white"
                axes.plot(row[x], row[y], style.marker, color=style.color, markerfacecolor=face, markersize=5.5)
        axes.set_xlabel(names[0])
        axes.set_ylabel(names[1])
        axes.set_title(title, pad=20)
        axes.margins(x=0.05, y=0.1)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
        if more is not None:
            _note(
                axes,
                f"better: {'upper' if more[1] else 'lower'} {'right' if more[0] else 'left'}. Filled: undominated.",
            )
    return path


def _undominated(x: np.ndarray, y: np.ndarray, more: tuple[bool, bool]) -> list[bool]:
    """Whether no other point is at least as good on both axes and better on one."""
    a, b = (values if up else -values for values, up in zip((x, y), more, strict=True))
    return [not bool(((a >= a[i]) & (b >= b[i]) & ((a > a[i]) | (b > b[i]))).any()) for i in range(len(a))]


def acceptance(curves: pd.DataFrame, path: Path, title: str) -> Path:
    """Acceptance over the number of candidates, one line per method; dashed: the optimum. A panel per scheme.

    curves  method, scheme, K, acceptance, optimum
    """
    with _panels(path, curves.scheme.nunique()) as panels:
        for axes, (scheme, of_scheme) in zip(panels, curves.groupby("scheme", sort=False), strict=True):
            best = of_scheme.drop_duplicates("K").sort_values("K")
            axes.plot(best.K, best.optimum, color=INK, linewidth=1.3, linestyle="--", label="optimum")
            for method, curve in of_scheme.groupby("method", sort=False):
                line, style = curve.sort_values("K"), look(str(method))
                about = {"color": style.color, "marker": style.marker, "label": label(str(method))}
                axes.plot(line.K, line.acceptance, markersize=4.5, linewidth=1.6, **about)
            axes.set_xticks(sorted(curves.K.unique()))
            axes.set_xlabel("candidates K")
            axes.set_title(str(scheme).replace("_", " "), fontweight="normal")
            axes.legend(frameon=False, loc="lower right", fontsize=9)
        low, high = curves.acceptance.min(), max(curves.optimum.max(), curves.acceptance.max())
        for axes in panels:
            axes.set_ylim(low - 0.08 * (high - low) - 0.005, high + 0.08 * (high - low) + 0.005)
        panels[0].set_ylabel("acceptance")
        panels[0].figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, fontweight="bold")
    return path


def explained(responses: pd.DataFrame, path: Path) -> Path:
    """Seconds of responses against what their counts explain. responses: way, seconds, explained (maybe missing)."""
    with _figure(path) as axes:
        known = responses[responses.explained.notna()]
        for number, (way, part) in enumerate(known.groupby("way", sort=False)):
            axes.scatter(part.explained, part.seconds, s=14, color=PALETTE[number % 6], label=str(way))
        high = float(known[["explained", "seconds"]].max().max())
        axes.plot([0, high], [0, high], color=MUTED, linewidth=1)
        axes.set_xlabel("t_draft x draft forwards + t_target x target forwards, s")
        axes.set_ylabel("seconds of a response")
        axes.legend(frameon=False, fontsize=9)
    return path


@contextmanager
def _figure(path: Path) -> Iterator[Any]:
    """Axes to draw on; saved to `path` at the end."""
    with _panels(path, 1) as (axes,):
        yield axes


@contextmanager
def _panels(path: Path, count: int) -> Iterator[Sequence[Any]]:
    """Axes beside each other; saved to `path` at the end. No display is needed, and no global setting stays changed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(SIZE[0] if count == 1 else 3.4 * count, SIZE[1]), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure.subplots(1, count, squeeze=False)[0]
        write_atomic(path, lambda temporary: figure.savefig(temporary, format="png", metadata={"Software": None}))


def _curves(settings: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
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


def _write_labels(
    axes: Any, labels: Sequence[tuple[float, float, str, str]], offset: tuple[float, float], align: str = "left"
) -> None:
    """Texts beside (x, y), in points of `offset`, moved apart vertically where they would overlap, not beyond the axes."""
    axes.figure.draw_without_rendering()  # fixes the scales
    step = 14 * axes.figure.dpi / 72
    labels = sorted(labels, key=lambda entry: entry[1])
    pixels = [axes.transData.transform((x, y))[1] for x, y, _, _ in labels]
    placed: list[float] = []
    for pixel in pixels:
        placed.append(max([pixel, *(before + step for before in placed if before + step > pixel)]))
    top = axes.bbox.y1 - offset[1] * axes.figure.dpi / 72
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], max(top, pixels[-1]) - (len(placed) - 1 - i) * step)
    for (x, y, text, color), pixel, height in zip(labels, pixels, placed, strict=True):
        shift = (height - pixel) * 72 / axes.figure.dpi
        axes.annotate(
            text, (x, y), xytext=(offset[0], offset[1] + shift), textcoords="offset points",
            ha=align, va="center", color=color, fontweight="bold", annotation_clip=False,
        )  # fmt: skip


def _name_point(axes: Any, x: float, y: float, text: str, color: str) -> None:
    axes.annotate(text, (x, y), xytext=(6, 5), textcoords="offset points", fontsize=9, color=color)


def _note(axes: Any, text: str) -> None:
    """A line between the title and the axes."""
    axes.text(0, 1.015, text, transform=axes.transAxes, ha="left", va="bottom", fontsize=8.5, color=MUTED)

"""Every figure in one module. Each takes a table (pandas) and a path, and writes PNG, PDF and SVG: usable from a notebook.

One look for all: a method has the same colour and marker in every figure. Undominated settings are filled, intervals
are bands, few methods are in colour and the rest grey. `width` is "column" or "page": one or two columns of a paper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.collections import PathCollection
from matplotlib.lines import Line2D

from analysis.figures.method_styles import LABELS, METHODS, Look, label, look, setting_name, short
from analysis.tables.grid import ORACLE, PLAIN, REFERENCES
from analysis.tables.rows import undominated
from toolkit.files.text import visible
from toolkit.runs.figure_style import INK, MUTED, PALETTE, REST, Width, figure, fonts_for, make_legible

__all__ = [
    "INK", "LABELS", "METHODS", "MUTED", "PALETTE", "acceptance", "acceptance_by_position", "costs", "explained", "label",
    "lengths", "look", "pareto", "scatter",
]  # fmt: skip
Text = tuple[float, float, str, str]  # x, y, what it says, colour
TIMES_PLAIN = "tokens per second / plain decoding's"
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
FEW = 5  # methods in colour, references not counted


def place(axes: Any, texts: Sequence[Text], scale: float = 0.92, bold: bool = True) -> None:
    """Write texts beside their points (x, y), away from all that is drawn. The axes must have their final limits."""
    import textalloc

    if not texts:
        return
    make_legible(axes.figure)  # before anything is measured
    axes.figure.draw_without_rendering()  # fixes the layout
    x, y, words, colors = (list(values) for values in zip(*texts, strict=True))
    words = [visible(word) for word in words]
    lines = [line.get_xydata() for line in axes.lines if line.get_transform().contains_branch(axes.transData)]
    lines = [line for line in lines if len(line) > 1]
    clouds = [drawn for drawn in axes.collections if isinstance(drawn, PathCollection)]  # no bands, no error bars
    points = [tuple(row) for cloud in clouds for row in np.asarray(cloud.get_offsets())]
    points += [tuple(row) for line in lines for row in line]
    spots = np.array(points) if points else np.array([x, y]).T
    size = axes.xaxis.label.get_size() * scale
    textalloc.allocate(
        axes, x, y, words, x_scatter=spots[:, 0], y_scatter=spots[:, 1],
        x_lines=[line[:, 0] for line in lines], y_lines=[line[:, 1] for line in lines],
        textsize=size, textcolor=colors, linecolor=colors, linewidth=0.6, fontweight="bold" if bold else "normal",
        fontfamily=[*rcParams["font.family"], *fonts_for(words)], margin=0.006, min_distance=0.02, max_distance=0.35,
        nbr_candidates=600, avoid_label_lines_overlap=True, clip_on=False,
    )  # fmt: skip


def legend(axes: Any, names: Sequence[str], **where: Any) -> None:
    """A legend of these lines, in this order, with their markers as large as in the figure."""
    lines = {line.get_label(): line for line in axes.lines}
    entries = [(name, lines[name]) for name in dict.fromkeys(names) if name in lines]
    handles = [
        Line2D([], [], color=line.get_color(), linestyle=line.get_linestyle(), marker=line.get_marker(), markersize=4)
        for _, line in entries
    ]
    axes.legend(handles, [name for name, _ in entries], **where)


def note(axes: Any, text: str) -> None:
    size = axes.xaxis.label.get_size() * 0.85
    written = axes.text(0, 1.012, text, transform=axes.transAxes, ha="left", va="bottom", fontsize=size, color=MUTED)
    written.set_in_layout(False)  # a long note must not squeeze the axes


def _titled(axes: Any, title: str, x: str, y: str, width: Width = "column") -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, pad=16 if width == "column" else 20)


def _curve(axes: Any, line: pd.DataFrame, x: str, y: str, name: str, style: Look, **options: Any) -> None:
    """A line with markers and, if there are intervals, their band."""
    options = {"color": style.color, "marker": style.marker, "markersize": 4, "linewidth": 1.3, "label": name} | options
    axes.plot(line[x], line[y], **options)
    if f"{y}_low" in line:
        axes.fill_between(line[x], line[f"{y}_low"], line[f"{y}_high"], color=style.color, alpha=0.15, linewidth=0)


def costs(
    curves: pd.DataFrame,
    path: Path,
    title: str,
    marked: float | None = None,
    width: Width = "page",
) -> Path:
    """Throughput over cost ratios, one line per method. curves: method, cost_ratio, throughput; maybe throughput_low, _high.

    marked: the cost ratio that the tables are for; the methods that are best there are in colour
    """
    gap = curves.cost_ratio if marked is None else (curves.cost_ratio - marked).abs()
    near = curves if marked is None else curves[gap == gap.min()]
    means = near.groupby("method", sort=False, as_index=False).throughput.mean()
    chosen = highlighted(means)
    coloured = (*chosen, *REFERENCES, PLAIN)
    banded = "throughput_low" in curves and bool(curves.throughput_low.notna().any())
    with figure(path, width, aspect=0.72 if width == "column" else 0.58) as ((axes,),):
        for method, curve in sorted(curves.groupby("method", sort=False), key=lambda entry: entry[0] in coloured):
            line, name = curve.sort_values("cost_ratio"), str(method)
            style = Look(look(name).color if name in coloured else REST, look(name).marker)
            options: dict[str, Any] = {"linestyle": "--" if name in (*REFERENCES, PLAIN) else "-", "markevery": 0.12}
            options |= {"markersize": 3.5, "linewidth": 1.5 if name in chosen else 1.0}
            line = line if name in chosen else line[["cost_ratio", "throughput"]]  # without a band
            _curve(axes, line, "cost_ratio", "throughput", short(name), style, **options)
        low, high = curves.cost_ratio.min(), curves.cost_ratio.max()
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        ticks = [c for c in TICKS if low * 0.999 <= c <= high * 1.001]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        if marked is not None and low <= marked <= high:
            axes.axvline(marked, color=MUTED, linewidth=0.9, linestyle=":")
        x = "cost ratio c (draft forward pass / target forward pass)"
        _titled(axes, title, x, "tokens per target-forward time", width)
        legend(axes, [short(name) for name in (*chosen, *REFERENCES, PLAIN)], loc="upper right")
        rest = len(set(curves.method) - set(coloured))
        words = ["settings chosen again at every c", *(["bands: spread over prompts"] if banded else [])]
        note(axes, "; ".join([*words, *([f"grey: {rest} others"] if rest else [])]))
    return path


def pareto(settings: pd.DataFrame, path: Path, title: str, width: Width = "page") -> Path:
    """Discard rate over verification rate, one curve per method; both are better when smaller.

    settings  method, setting, discard_rate, verification_rate, undominated, maybe throughput; `chosen` ones are named
    """
    drawn = settings[settings.method != PLAIN]
    chosen = highlighted(drawn)
    with figure(path, width, aspect=0.72 if width == "column" else 0.58) as ((axes,),):
        curves = sorted(_shown_curves(drawn, width), key=lambda entry: entry[0] in (*chosen, *REFERENCES))
        for method, curve in curves:
            _draw_curve(axes, method, curve.sort_values("verification_rate"), method in (*chosen, *REFERENCES))
        x = "verification rate (target forward passes per token)"
        _titled(axes, title, x, "discard rate (discarded per token)", width)
        beyond = _zoom(axes, drawn)
        legend(axes, [short(method) for method in (*chosen, *REFERENCES)], loc="upper right")
        place(axes, _texts(curves, chosen, axes))
        rest = [short(method) for method in dict.fromkeys(drawn.method) if method not in (*chosen, *REFERENCES)]
        note(axes, "better: lower left; filled: undominated" + (f"; {beyond} beyond the edges" if beyond else ""))
        if rest:
            axes.figure.supxlabel(f"grey: {', '.join(rest)}", fontsize=axes.xaxis.label.get_size() * 0.85, color=MUTED)
    return path


def highlighted(settings: pd.DataFrame, most: int = FEW) -> list[str]:
    """The methods worth a colour: the fixed-K baseline, then those of highest throughput, or with most undominated settings."""
    own = settings[~settings.method.isin((*REFERENCES, PLAIN))]
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
    for method, of_method in settings.groupby("method", sort=False):
        parameters = [dict(part.split("=", 1) for part in setting.split()) for setting in of_method.setting]
        names = sorted({name for parts in parameters for name in parts})
        distinct = {name: len({parts.get(name) for parts in parameters}) for name in names}
        swept = max(names, key=lambda name: distinct[name], default="")
        others = [name for name in names if name != swept and distinct[name] > 1]
        rest = [" ".join(f"{name}={parts[name]}" for name in others if name in parts) for parts in parameters]
        for name, curve in of_method.groupby(np.array(rest), sort=False):
            curve.name = str(name)
            yield str(method), curve


def _shown_curves(settings: pd.DataFrame, width: Width) -> list[tuple[str, pd.DataFrame]]:
    """Curves as `curves_of` has them; where they are too many to be told apart, a method's best settings as one curve."""
    curves, most = list(curves_of(settings)), 3 if width == "page" else 1
    number = Counter(method for method, _ in curves)
    drawn = [(method, curve) for method, curve in curves if number[method] <= most]
    for method in [method for method in number if number[method] > most]:
        of_method = settings[settings.method == method]
        best = of_method[undominated(of_method[["discard_rate", "verification_rate"]].to_numpy(dtype=float))]
        best.name = ""
        drawn.append((method, best))
    return drawn


def _zoom(axes: Any, settings: pd.DataFrame) -> int:
    """Limits that hold every undominated setting and the references; how many others lie outside."""
    x, y = settings.verification_rate, settings.discard_rate
    inside = settings.undominated.astype(bool) | settings.method.isin(REFERENCES)
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
    style = look(method)
    color = style.color if colored else REST
    x, y = along.verification_rate.to_numpy(), along.discard_rate.to_numpy()
    dashed, level = "--" if method in REFERENCES else "-", 3 if colored else 2
    options = {"linewidth": 1.1 if colored else 0.7, "linestyle": dashed, "marker": style.marker, "markersize": 0}
    axes.plot(x, y, color=color, alpha=0.7, zorder=level, label=short(method), **options)
    best = along.undominated.to_numpy(dtype=bool) | (method == ORACLE)
    unit = axes.xaxis.label.get_size()
    sizes = np.where(best, 3.6, 1.8) * unit * (3 if method == ORACLE else 1 if colored else 0.7)
    faces = [color if flag else "white" for flag in best]
    options = {"edgecolors": color, "linewidths": 0.9, "zorder": level + 1}
    axes.scatter(x, y, s=sizes, marker=style.marker, c=faces, **options)


def _texts(curves: Sequence[tuple[str, pd.DataFrame]], chosen: Sequence[str], axes: Any) -> list[Text]:
    texts: list[Text] = []
    for method, curve in curves:
        if method in (*chosen, *REFERENCES) and "chosen" in curve and method != ORACLE:
            seen = (curve.verification_rate <= axes.get_xlim()[1]) & (curve.discard_rate <= axes.get_ylim()[1])
            for row in curve[seen & curve.chosen.astype(bool)].itertuples():
                words = row.setting.split(" head=")[0]
                texts += [(row.verification_rate, row.discard_rate, words, look(method).color)] if words else []
    return texts


def of_sweep(tables: Mapping[str, pd.DataFrame], folder: Path, title: str) -> list[Path]:
    """The figures of a sweep, from its tables; rounds are shown of each method's best setting, few of them."""
    summary = tables["summary"]
    figures = [pareto(summary, folder / "pareto.png", title)]
    if len(chosen := few_settings(tables["positions"], summary)):
        figures.append(acceptance_by_position(chosen, folder / "positions.png", title))
    if len(chosen := few_settings(tables["lengths"], summary)):
        figures.append(lengths(chosen, folder / "lengths.png", title))
    return figures


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
            _curve(axes, line, "position", "rate", name, style, linestyle=dash, markersize=3.5, linewidth=1.2)
        if len(frequent):
            axes.set_ylim(max(frequent.rate.min() - 0.25, 0), 1.02)
            axes.legend(loc="lower left", ncols=1 if width == "column" else 2)
        _titled(
            axes, title, "position in the round (k-th drafted token)", "acceptance rate (accepted / reached)", width
        )
        _whole_ticks(axes, int(frequent.position.max()) if len(frequent) else 1)
        note(axes, "given that all before it were accepted; bands: spread over prompts")
    return path


def lengths(rounds: pd.DataFrame, path: Path, title: str, width: Width = "page") -> Path:
    """Shares of rounds by drafted and accepted tokens. rounds: method, setting, length (from 0), drafted, accepted."""
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
    """Acceptance over the number of candidates. curves: method, scheme, K, acceptance, optimum; maybe acceptance_low, _high."""
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
                _curve(axes, line, "K", "acceptance", label(str(method)), style)
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


def scatter(
    settings: pd.DataFrame,
    x: str,
    y: str,
    names: tuple[str, str],
    path: Path,
    title: str,
    more: tuple[bool, bool] | None = None,
    width: Width = "page",
) -> Path:
    """One figure against another, one point with its intervals per setting, a thin line through the settings of a method.

    settings  one line per setting: method, setting, and x and y with `_low` and `_high`
    more      whether more is better, on each axis: undominated settings are filled; None: all are
    """
    complete = settings[settings[[x, y]].notna().all(axis=1)]
    with figure(path, width, aspect=0.85 if width == "column" else 0.58) as ((axes,),):
        points = complete[[x, y]].to_numpy(float)
        best = [True] * len(complete) if more is None else undominated(points, more)
        filled = dict(zip(complete.index, best, strict=True))
        for method, part in complete.groupby("method", sort=False):
            line, style = part.sort_values(x), look(str(method))
            axes.plot(line[x], line[y], color=style.color, linewidth=0.9, alpha=0.5)
            axes.plot([], [], style.marker, color=style.color, markersize=4.5, label=label(str(method)))
            for index, row in line.iterrows():
                spans = [[[row[v] - row[f"{v}_low"]], [row[f"{v}_high"] - row[v]]] for v in (x, y)]
                options = {"ecolor": style.color, "elinewidth": 0.6, "alpha": 0.45, "fmt": "none"}
                axes.errorbar(row[x], row[y], spans[1], spans[0], **options)
                face, size = (style.color, 5.5) if filled[index] else ("white", 4.5)
                axes.plot(row[x], row[y], style.marker, color=style.color, markerfacecolor=face, markersize=size)
        _titled(axes, title, *names, width)
        axes.margins(x=0.05, y=0.1)
        axes.figure.legend(loc="outside lower left" if width == "column" else "outside right center", ncols=1)
        if more is not None:
            sides = f"{'upper' if more[1] else 'lower'} {'right' if more[0] else 'left'}"
            note(axes, f"better: {sides}; filled: undominated")
    return path


def explained(responses: pd.DataFrame, path: Path, width: Width = "column") -> Path:
    """Seconds of responses against what their counts explain. responses: way, seconds, explained (maybe missing)."""
    with figure(path, width, aspect=0.85) as ((axes,),):
        rows = responses[responses.explained.notna()]
        for number, (way, part) in enumerate(rows.groupby("way", sort=False)):
            axes.scatter(part.explained, part.seconds, s=9, color=PALETTE[number % 6], label=str(way))
        high = float(rows[["explained", "seconds"]].max().max())
        axes.plot([0, high], [0, high], color=MUTED, linewidth=1)
        axes.set_xlabel("t_draft x draft passes + t_target x target passes (s)")
        axes.set_ylabel("seconds of a response")
        axes.legend()
    return path


def speedups(table: pd.DataFrame, path: Path, title: str, width: Width = "page") -> Path:
    """Speed-ups over the batch size. table: of `analysis.loads.choosing.choose`; of several drafts the faster one is drawn."""
    best = table.loc[table.groupby(["method", "batch"]).dev_times_plain.idxmax()]
    with figure(path, width, aspect=0.72 if width == "column" else 0.58) as ((axes,),):
        _over_plain(axes, best, "batch", "speedup", title, "batch size (requests decoded side by side)")
        advised = table[table.advised]
        axes.scatter(advised.batch, advised.speedup, s=110, facecolors="none", edgecolors=INK, linewidth=1.2, zorder=5)
        axes.set_ylabel(TIMES_PLAIN)
        note(axes, "circles: advised; bands: spread over prompts; line at 1: plain decoding")
    return path


def over_plain(table: pd.DataFrame, path: Path, title: str, width: Width = "page") -> Path:
    """Speed over autoregressive decoding's by load. table: kind ("users" or "requests/s"), amount, method, times_plain."""
    kinds = list(dict.fromkeys(table.kind))
    with figure(path, width, aspect=0.58, columns=len(kinds)) as (row,):
        for axes, kind in zip(row, kinds, strict=True):
            part = table[table.kind == kind]
            best = part.groupby(["method", "amount"], sort=False).times_plain.max().reset_index()
            _over_plain(axes, best, "amount", "times_plain", title, str(kind))
        row[0].set_ylabel(TIMES_PLAIN)
    return path


def _over_plain(axes: Any, table: pd.DataFrame, x: str, y: str, title: str, label: str) -> None:
    """A line per method over loads, and one at 1."""
    axes.axhline(1.0, color=MUTED, linewidth=1.0)
    drafting = table[table.method != PLAIN]
    for method, part in drafting.groupby("method", sort=False):
        _curve(axes, part.sort_values(x), x, y, short(str(method)), look(str(method)))
    axes.set_xscale("log", base=2)
    loads = sorted(set(table[x]))
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.minorticks_off()
    _titled(axes, title, label, "")
    legend(axes, [short(str(method)) for method in drafting.method.unique()], loc="upper right")

"""The page of a paper's table: what the paper claims and what came out here, then the table, then what differs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.method_styles import MARKERS, METHODS, Look, look
from analysis.papers.table import Cell, PaperTable, Runs, check_keys, expanded, first_column, merged
from analysis.tables.bootstrap import ENOUGH
from analysis.tables.files import markdown
from analysis.tables.rows import undominated
from toolkit.errors import unknown_name
from toolkit.runs.figure_style import PALETTE, figure
from toolkit.runs.stage import read_manifest

READING = (
    "Each cell: the figure here, in square brackets its interval, or [a to b], the range, of fewer than "
    f"{ENOUGH} prompts or groups; in round brackets the paper's."
)
FEW = 4  # gains in a sentence
TOY, TOY_TARGET = "the toy pair", "toy/"  # how `models` names it
FACTS = ("num_prompts", "num_texts", "prompts", "group_size", "positions", "dev_share", "sampling", "cost_ratio")
PRINTED = re.compile(r"(-?\d+(?:\.\d+)?)(?: ± .*)?")
Cells = Mapping[tuple[str, str], Cell]
AXES = ("x", "y", "x_label", "y_label", "better")
COLUMNS = ["panel", "curve", "method", "x", "y"]


def as_markdown(table: PaperTable, cells: Cells, runs: Runs, models: str, figure: str | None) -> str:
    """The whole page. models: the pair that ran, in words; figure: the name of the figure's file."""
    run = f"python -m toolkit.train +experiment={table.experiment} pair="
    named = ", ".join(f"`{pair}`" if len(table.pairs) > 2 else f"`{run}{pair}`" for pair in table.pairs)
    named = f"`{run}PAIR` with {named}" if len(table.pairs) > 2 else named
    parts = [f"# {table.paper}, {table.item}: {table.title}"]
    parts += [sentence(table, claim, cells) for claim in table.claims]
    parts.append(
        f"The models here: {models}. The paper's {'pair' if len(table.pairs) == 1 else 'pairs'}: {named}. With other models, "
        "compare which row is ahead, not the numbers."
    )
    if table.rows:
        parts += [markdown(side_by_side(table, cells)), READING]
    if figure is not None:
        parts += [f"![{table.item}]({figure})"]
    if sentences := differences(table, runs, models):
        parts += ["What differs from the paper:", "\n".join(f"- {line}" for line in sentences)]
    parts += ["Runs that this page was made from:", runs_list(runs), f"Paper: {table.cite}."]
    return "\n\n".join(parts) + "\n"


def differences(table: PaperTable, runs: Runs, models: str) -> list[str]:
    """The sentences on what differs from the paper, as far as they are about what ran, with what the runs say filled in."""
    kind = "toy" if models == TOY or f" for {TOY_TARGET}" in models else "models"
    sentences = [line if isinstance(line, str) else line.get(kind) for line in table.differs]
    return [text for line in sentences if line is not None and (text := runs.filled(line)) is not None]


def side_by_side(table: PaperTable, cells: Cells) -> pd.DataFrame:
    def text(row: str, column: str) -> str:
        printed = table.printed(row, column)
        return cells[row, column].text() + ("" if printed is None else f" ({printed})")

    return pd.DataFrame([{"": row, **{column: text(row, column) for column in table.columns}} for row in table.rows])


def sentence(table: PaperTable, claim: Mapping[str, Any], cells: Cells) -> str:
    """A claim, left over right, here and in the paper: in a sentence if about few columns (or rows), else in a table."""
    sides, names = (claim["left"], claim["right"]), claim["only"]
    pairs = [[(name, side) if claim["left"] in table.columns else (side, name) for side in sides] for name in names]
    gains = [_gain(cells[left].value, cells[right].value) for left, right in pairs]
    printed_gains = [_gain(table.printed(*left), table.printed(*right)) for left, right in pairs]
    columns = {"": names, "here": list(map(_percent, gains)), "in the paper": list(map(_percent, printed_gains))}
    published = any(gain is not None for gain in printed_gains)
    if len(names) <= FEW:
        published_range = f", {', '.join(columns['in the paper'])} in the paper" if published else ""
        return f"{claim['text']}: {', '.join(columns['here'])} here{published_range} ({', '.join(names)})."
    published_range = f", {_range(printed_gains)} in the paper" if published else ""
    lines = pd.DataFrame(columns if published else {key: columns[key] for key in ("", "here")})
    return f"{claim['text']}: {_range(gains)} here{published_range}.\n\n{markdown(lines)}"


def runs_list(runs: Runs) -> str:
    lines = []
    for name, folder in runs.folders.items():
        manifest = read_manifest(folder) or {}
        settings = {**(manifest.get("config") or {}), **manifest}
        facts = [f"{key} {_settings(settings[key])}" for key in FACTS if settings.get(key) is not None]
        lines.append(f"- {name}: {folder.name}" + (f" ({'; '.join(facts)})" if facts else ""))
    return "\n".join(lines) or "- none"


def _settings(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    plain = {
        key: setting
        for key, setting in value.items()
        if not key.startswith("_") and not isinstance(setting, (list, Mapping))
    }
    return ", ".join(f"{key}={setting}" for key, setting in plain.items() if setting is not None)


def _range(gains: Sequence[float | None]) -> str:
    numbers = [gain for gain in gains if gain is not None]
    return f"{min(numbers):+.1%} to {max(numbers):+.1%}" if numbers else "not run"


def _percent(gain: float | None) -> str:
    return "–" if gain is None else f"{gain:+.1%}"


def _gain(left: Any, right: Any) -> float | None:
    first, second = _number(left), _number(right)
    return None if first is None or not second else first / second - 1


def _number(value: Any) -> float | None:
    if not isinstance(value, str):
        return None if value is None else float(value)
    number = PRINTED.fullmatch(value)
    return float(number[1]) if number else None


def draw(layout: Mapping[str, Any], runs: Runs, item: str, path: Path) -> pd.DataFrame:
    """Draw to `path`; returns the points: panel, curve, x, y. Panels without a run, or not measured, are left out."""
    keys = (*AXES, "panels", "curves", "points")
    if unknown := [key for key in layout if key not in keys]:
        raise unknown_name("table.figure: key", unknown[0], keys)
    panels = {name: {**{key: layout.get(key) for key in AXES}, **at} for name, at in expanded(layout["panels"]).items()}
    curves = expanded(layout["curves"])
    for source in (*panels.values(), *curves.values()):
        check_keys(source, f"figure of {item}", str(layout), AXES)
    parts = [pd.DataFrame(columns=COLUMNS)]
    for panel, at in panels.items():
        for name, curve in curves.items():
            source = merged(at, curve)
            if source.get("run") in runs.folders:
                lines = runs.lines(source, f"{item}, {panel}, {name}")
                methods = lines["method"].unique() if "method" in lines else []
                method = str(methods[0]) if len(methods) == 1 else name  # whose colour a curve has: its own, if several
                x, y = (first_column(at[axis], lines.columns, f"{item}: column") for axis in ("x", "y"))
                across = lines[x] if lines[x].map(type).eq(str).any() else lines[x].astype(float)  # by x, maybe text
                part = pd.DataFrame({"x": across, "y": lines[y].astype(float)}).dropna().sort_values("x")
                parts.append(part.assign(panel=panel, curve=name, method=method))
    points = pd.concat(parts[1:] or parts, ignore_index=True)[COLUMNS]
    panels = {name: at for name, at in panels.items() if (points.panel == name).any()}
    looks = _looks(points)
    with figure(path, "page", 0.5 if len(panels) > 1 else 0.62, columns=max(1, len(panels))) as (axes,):
        for number, (axis, (panel, at)) in enumerate(zip(axes, panels.items(), strict=False)):
            for name, part in points[points.panel == panel].groupby("curve", sort=False):
                style = {"color": looks[str(name)].color, "marker": looks[str(name)].marker, "linewidth": 1.3}
                line = "none" if layout.get("points") or at["better"] else "-"
                axis.plot(part.x, part.y, linestyle=line, label=str(name), markersize=4, **style)
                if at["better"]:  # a line through the points that no other one beats
                    more = ("more x" in at["better"], "more y" in at["better"])
                    best = part[undominated(part[["x", "y"]].to_numpy(float), more)]
                    axis.plot(best.x, best.y, color=style["color"], linewidth=1.3)
            axis.set_title(panel, fontweight="normal")
            for kind, middle in (("x", len(panels) // 2), ("y", 0)):  # once, if all panels have the same label
                labels = {other[f"{kind}_label"] for other in panels.values()}
                if number == middle or len(labels) > 1:
                    getattr(axis, f"set_{kind}label")(at[f"{kind}_label"])
        if panels:
            entries = dict(zip(*(axes[0].get_legend_handles_labels()[::-1]), strict=True))
            axes[0].figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=3)
    return points


def _looks(points: pd.DataFrame) -> dict[str, Look]:
    """Looks by curve: its method's where every curve is another known method, else colours and markers in order."""
    methods = points[["curve", "method"]].drop_duplicates()
    if methods.method.is_unique and methods.method.isin(METHODS).all():
        return {str(line.curve): look(str(line.method)) for line in methods.itertuples()}
    names = enumerate(dict.fromkeys(map(str, points.curve)))
    return {name: Look(PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]) for number, name in names}

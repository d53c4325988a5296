"""The panels of a group of folders, and its result in one sentence, read from saved tables. What is not there is missing."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.method_styles import label, setting_name
from analysis.figures.plots import few_settings
from analysis.reporting import charts
from analysis.reporting.folders import Folder
from analysis.tables.files import cell, markdown, numeric_columns
from analysis.tables.grid import PLAIN, REFERENCES
from analysis.tables.standing import interval_text

FIRST = ("results", "comparison", "frontier", "summary")  # tables made to be read come first


@dataclass(frozen=True)
class TableView:
    """A table ready to be shown; `rows` is None, and `note` says why, if it is not."""

    name: str
    note: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] | None = None
    numeric: Sequence[bool] = ()
    markdown: str = ""


@dataclass(frozen=True)
class FigureView:
    """A figure as the page's own data (None: it would make the page too large), and as a file beside the Markdown."""

    name: str
    file: str
    base64: str | None


def table_files(folder: Path) -> list[Path]:
    rank = {name: number for number, name in enumerate(FIRST)}
    return sorted(folder.glob("*.csv"), key=lambda path: (rank.get(path.stem, len(FIRST)), path.name))


def figure_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.png"), *folder.glob("figures/*.png")])


def table_view(path: Path, max_cells: int) -> TableView:
    """The whole table of a CSV file. Larger ones, such as the single rows of a sweep, are named with their size."""
    try:
        frame = pd.read_csv(path)
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError):
        return TableView(path.stem, note=f"Missing: {path.name} could not be read as a table.")
    if frame.size > max_cells:
        return TableView(path.stem, note=f"{len(frame)} lines of {len(frame.columns)} columns, in {path.name} there.")
    return frame_view(path.stem, frame)


def frame_view(name: str, frame: pd.DataFrame) -> TableView:
    rows = [[cell(value) for value in row] for row in frame.itertuples(index=False)]
    columns = [str(column) for column in frame.columns]
    return TableView(name, "", columns, rows, numeric_columns(rows, len(columns)), markdown(frame))


def figure_views(paths: Sequence[Path], number: int, report: Path, budget: int) -> list[FigureView]:
    """Copies beside the report; within the page as far as `budget` bytes suffice."""
    views = []
    for path in paths:
        copy = report / "figures" / f"{number}-{path.name}"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        size = path.stat().st_size * 4 // 3
        budget -= size
        data = base64.b64encode(path.read_bytes()).decode() if budget >= 0 else None
        views.append(FigureView(path.stem, copy.relative_to(report).as_posix(), data))
    return views


@dataclass(frozen=True)
class Panel:
    """One panel: its charts, or why there is none. `logged` are the keys under which W&B runs hold the same."""

    name: str
    title: str
    missing: str = ""
    charts: Sequence[tuple[str, dict[str, Any]]] = field(default_factory=list)
    table: TableView | None = None
    folders: Sequence[Folder] = field(default_factory=list)
    logged: Sequence[str] = field(default_factory=list)


Draw = Callable[[pd.DataFrame, str], dict[str, Any]]


def _held(
    folders: Sequence[Folder], stages: Sequence[str], name: str, needs: Sequence[str]
) -> Iterator[tuple[Folder, pd.DataFrame]]:
    for folder in folders:
        table = folder.table(name) if folder.stage in stages else None
        if table is not None and len(table) and set(needs) <= set(table.columns):
            yield folder, table


def _with_kind(folder: Folder) -> str:
    """A folder's name and, of a training, the class of its head: "train-7499a32bffa0 (AcceptanceHead)"."""
    config = folder.manifest.get("config")
    head = config.get("head") if isinstance(config, dict) else None
    kind = str(head["_target_"]).rpartition(".")[2] if isinstance(head, dict) and "_target_" in head else ""
    return f"{folder.path.name} ({kind})" if kind else folder.path.name


def panels(folders: Sequence[Folder]) -> list[Panel]:
    """Frontier, costs, positions, calibration and comparison, each from the folders that have its table."""
    needs = ("method", "setting", "discard_rate", "verification_rate", "undominated")
    settings = list(_held(folders, ("frontier",), "settings", needs)) or _held(folders, ("sweep",), "summary", needs)
    frontier = [*_by_dataset(settings, charts.frontier_chart)]
    logged = [
        f"frontier/pareto-{name}" if folder.stage == "frontier" else "sweep/pareto" for folder, name, _ in frontier
    ]
    title = "Frontier: discard rate against verification rate"
    drawn = [_panel("frontier", title, "a frontier or a sweep", frontier, logged)]
    curves = _held(folders, ("frontier",), "costs", ("method", "cost_ratio", "throughput"))
    costs = [*_by_dataset(curves, charts.costs_chart)]
    logged = [f"frontier/costs-{name}" for _, name, _ in costs]
    drawn.append(_panel("costs", "Throughput over the cost ratio", "a frontier", costs, logged))
    held = _held(folders, ("sweep",), "positions", ("position", "reached", "accepted", "rate"))
    few = [(folder, few_settings(table, folder.table("summary"))) for folder, table in held]
    positions = [*_by_dataset([(f, t) for f, t in few if (t.reached >= 10).any()], charts.positions_chart)]
    title, logged = "Acceptance by position in the round", ["sweep/positions"] * len(positions)
    drawn.append(_panel("positions", title, "a sweep with chains", positions, logged))
    held = _held(folders, ("train", "calibration"), "reliability", ("scores", "count", "mean_prob", "mean_label"))
    named = [(folder, _with_kind(folder), table) for folder, table in held]
    heads = [(f, name, charts.reliability_chart(table, f"reliability of {name}")) for f, name, table in named]
    logged = ["val/reliability"] * len(heads)
    drawn.append(_panel("calibration", "Calibration of heads", "a trained head", heads, logged))
    for folder, table in _held(folders, ("heads",), "predictors", ("method", "upper_bound_share", "domain")):
        shown = frame_view("predictors", _shares(table))
        drawn.append(Panel("predictors", "What predicts acceptance", table=shown, folders=[folder]))
    comparison = Panel(
        "comparison", "Comparison", "Missing: none of the folders is a comparison, a frontier or a sweep."
    )
    for stage, name, key in (
        ("compare", "comparison", "compare/table"),
        ("frontier", "results", "frontier/frontier"),
        ("sweep", "summary", "sweep/summary"),
    ):
        for folder, table in _held(folders, (stage,), name, ("method",)):
            shown = frame_view(name, table)
            return [*drawn, Panel("comparison", "Comparison", table=shown, folders=[folder], logged=[key])]
    return [*drawn, comparison]


def _shares(table: pd.DataFrame) -> pd.DataFrame:
    """Share of the way from the best fixed K to the upper bound, a column per domain; where a level was chosen, with it."""
    lines = table.assign(share=[interval_text(row, "upper_bound_share", "{:.0%}") for _, row in table.iterrows()])
    return lines.pivot_table("share", "method", "domain", "first", sort=False).fillna("").reset_index()


def _by_dataset(held: Any, draw: Draw) -> Iterator[tuple[Folder, str, dict[str, Any]]]:
    for folder, table in held:
        parts = table.groupby("dataset", sort=False) if "dataset" in table else [("", table)]
        for dataset, part in parts:
            split = part.split.iloc[0] if "split" in part else ""
            of_split = f" {split}" if split and pd.notna(split) else ""
            yield folder, str(dataset), draw(part, f"{dataset}{of_split}, {folder.path.name}")


def _panel(
    name: str, title: str, needed: str, drawn: Sequence[tuple[Folder, str, dict[str, Any]]], logged: Sequence[str]
) -> Panel:
    if not drawn:
        return Panel(name, title, f"Missing: none of the folders is {needed} with such a table.")
    folders = list({folder.path: folder for folder, _, _ in drawn}.values())
    charted = [(spec["description"], spec) for _, _, spec in drawn]
    return Panel(name, title, charts=charted, folders=folders, logged=list(dict.fromkeys(logged)))


def headline(folders: Sequence[Folder]) -> str:
    """The folders' result in one sentence; "" where there is none."""
    for stage, name, say in (("frontier", "frontier", _of_frontier), ("compare", "comparison", _of_comparison)):
        for folder in folders:
            table = folder.table(name) if folder.stage == stage else None
            if table is not None and len(table) and (sentence := say(table)):
                return sentence
    return ""


def _of_frontier(table: pd.DataFrame) -> str:
    """ "At c = 0.2, rate gains 6.1 % [5.2 %, 7.0 %] over the best fixed K on math (...) ..."."""
    parts, first = [], table.iloc[0]
    for dataset, lines in table.groupby("dataset", sort=False):
        own = lines[~lines.method.isin((*REFERENCES, PLAIN, first.baseline))]
        if own.empty:
            continue
        best = own.loc[own.throughput.idxmax()]
        result = f"{setting_name(best.method, best.setting)} {interval_text(best, 'gain', '{:+.1%}')} on {dataset}"
        bound = next((n for n in ("upper_bound_share", "share") if n in lines and pd.notna(best[n])), None)
        if bound is not None:
            result += f" ({best[bound]:.0%} of the way to the {'upper bound' if bound != 'share' else 'oracle'})"
        parts.append(result + (", which may be none" if best.gain_low <= 0 <= best.gain_high else ""))
    if not parts:
        return ""
    over = f"over the best {label(first.baseline)} at c = {first.cost_ratio:g}"
    return f"Gain in tokens per target time {over}: {'; '.join(parts)}."


def _of_comparison(table: pd.DataFrame) -> str:
    if "speedup" not in table or not table.speedup.notna().any():
        return ""
    best = table.loc[table.speedup.idxmax()]
    measured = {**best, "prompts": best.groups}  # seconds are those of groups
    speed = f"{interval_text(measured, 'speedup', '{:.2f}')} times the baseline's speed"
    return f"Fastest of {len(table)} settings: {setting_name(best.method, best.setting)}, {speed}."

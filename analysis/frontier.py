"""python -m analysis.frontier dev=[SWEEP,...] test=[SWEEP,...] cost_ratio=.2: what adaptive stopping is worth.

Per data set, each method's setting is chosen on the dev rows (without `test`, on one half of the prompts) by throughput:
N / (c * draft calls + target calls), summed over prompts. It is reported on the test rows, beside the best fixed K, the oracle
and the upper bound, with paired intervals over prompts. Files:

    frontier    one line per data set and method: the chosen setting, throughput, gain, shares, rates, counts
    results     the same as people read it, with intervals in brackets
    settings    one line per setting of the test sweeps: rates, whether it was chosen, whether it is undominated
    costs       throughput over cost ratios, settings chosen again at each; costs_table: at `table_costs`
    standing    at these ratios: throughput, gain and shares with intervals, and a note where a method loses
    frontier.md, standing.md, figures/
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("frontier")

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import keys
from analysis.figures import plots
from analysis.loads.exports import decode_command
from analysis.tables.bootstrap import ENOUGH, Bootstrap, spread_name
from analysis.tables.files import DEFINITIONS, definitions_text, markdown, read_table, save_table, show
from analysis.tables.grid import PLAIN, REFERENCES, Setting, bounded, default_bound
from analysis.tables.rows import FACTS, SETTING, settings_table, totals
from analysis.tables.selection import (
    apart,
    as_one_part,
    check_comparable,
    choose,
    comparable,
    halves,
    load_rows,
    same_texts,
    unseen,
)
from analysis.tables.standing import (
    SHARES,
    Cost,
    compare,
    cost_ratios,
    costs_table,
    frontier_scalars,
    interval_text,
    notes,
    over_costs,
)  # fmt: skip
from toolkit.config import override, plain
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_text
from toolkit.runs.stage import MANIFEST, config_as_written, open_stage, read_manifest
from toolkit.runs.tracking import log_image, log_lines, log_scatter, log_summary, log_table, wandb_run

TABLES = ("frontier", "settings", "costs")
NAMES = {"upper_bound": "upper bound", "oracle": "oracle"}


def run(cfg: keys.Frontier) -> Path:
    dev, test, folders = read_sides(cfg)
    test_folders = _folders(cfg.test or cfg.dev)
    inputs = [folder / "rows.parquet" for folder in folders]
    stage = open_stage("frontier", cfg, inputs=inputs, ignore=("track",))
    fresh = not stage.finished
    if fresh:
        hindsight = same_texts(test_folders, test, cfg.baseline)
        studies = [_study(*part, cfg, hindsight) for part in by_dataset(dev, test)]
        for name, frames in zip((*TABLES, "standing"), zip(*studies, strict=True), strict=True):
            save_table(pd.concat(frames, ignore_index=True), stage.folder, name)
    figures = draw(stage.folder)
    frontier = read_table(stage.folder, "frontier")
    results = readable(frontier)
    results.insert(0, "dataset", frontier.dataset.to_numpy())
    save_table(results, stage.folder, "results")
    by_cost = costs_table(read_table(stage.folder, "costs"), plain(cfg.table_costs))
    save_table(by_cost, stage.folder, "costs_table")
    write_text(stage.folder / "frontier.md", as_markdown(frontier, by_cost, figures))
    about = f"Tokens per target-forward time; in brackets intervals over prompts, or the range of fewer than {ENOUGH}."
    parts = ["# Standing", about]
    for ratio, table in read_table(stage.folder, "standing").groupby("cost_ratio"):
        parts += [f"## c = {ratio:g}", markdown(side_by_side(table))]
    write_text(stage.folder / "standing.md", "\n\n".join(parts) + "\n")
    if fresh:
        _log(stage.folder, figures, cfg)
        manifest = test_folders[0] / MANIFEST
        config = read_json(manifest)["config"] if manifest.exists() else {}
        made_with = {name: config.get(name) for name in ("pair", "sampling")}  # alike in all sweeps
        stage.finish(
            datasets=sorted(set(frontier.dataset)), next=next_command(frontier, test, test_folders), **made_with
        )
    for _, table in frontier.groupby("dataset", sort=False):
        printed = readable(table)
        first = [*printed.columns[:4], "note", "way to the upper bound"]
        show(printed, _headline(table), stage.folder / "frontier.md", first)
    print(f"\n{definitions_text()}\n\nat other cost ratios: {stage.folder / 'standing.md'}")
    if line := stage.manifest.get("next"):
        print(f"next: {line}")
    return stage.folder


def next_command(frontier: pd.DataFrame, test: pd.DataFrame, folders: Sequence[Path]) -> str | None:
    """What decodes with the best method of the table, its head and its setting on the first data set.

    The best method has the highest mean throughput over data sets. None if no sweep's manifest is there.
    """
    own = frontier[~frontier.method.isin(REFERENCES)]
    method = own.pivot(index="method", columns="dataset", values="throughput").mean(1, skipna=False).idxmax()
    best = own[own.method == method].iloc[0]
    rows = test[(test.dataset == best.dataset) & (test.method == method) & (test.setting == best.setting)].iloc[0]
    folder = next(folder for folder in folders if (read_table(folder, "rows").dataset == best.dataset).any())
    if not (folder / MANIFEST).exists():
        return None
    config = config_as_written(read_manifest(folder))
    values = {}
    for name, value in rows.drop([*SETTING, *FACTS], errors="ignore").dropna().items():
        whole = (
            isinstance(value, float) and value.is_integer()
        )  # tables hold whole numbers as floats, and lists as texts
        listed = isinstance(value, str) and value.startswith("[")
        values[name] = int(value) if whole else json.loads(value) if listed else value
    setting = Setting(str(method).partition(" ")[0], values)
    if config["max_drafted"] != default_bound():
        setting = bounded(setting, config["max_drafted"])
    return decode_command(config, [override(key, value) for key, value in setting.decode_keys().items()])


def read_sides(cfg: keys.Frontier) -> tuple[pd.DataFrame, pd.DataFrame, list[Path]]:
    """Dev rows, test rows and their folders; without `cfg.test` two halves. Raises InputError if sweeps do not compare."""
    dev_folders, test_folders = _folders(cfg.dev), _folders(cfg.test or [])
    check_comparable([*dev_folders, *test_folders])
    rows = as_one_part(load_rows(dev_folders, "dev"))
    dev, test = halves(rows) if not test_folders else (rows, as_one_part(load_rows(test_folders, "test")))
    both = apart(pd.concat([dev, test], ignore_index=True), plain(cfg.apart))
    return both[: len(dev)], both[len(dev) :], [*dev_folders, *test_folders]


def draw(folder: Path) -> dict[str, list[Path]]:
    frontier, settings, costs = (read_table(folder, name) for name in TABLES)
    figures = {}
    for dataset, table in frontier.groupby("dataset", sort=False):
        title = f"{dataset}, {table.prompts.iloc[0]} test prompts"
        of_dataset, curves = settings[settings.dataset == dataset], costs[costs.dataset == dataset]
        figures_folder, name = folder / "figures", re.sub(r"[^\w.-]+", "_", str(dataset))
        figures[str(dataset)] = [
            plots.pareto(of_dataset, figures_folder / f"pareto-{name}.png", title),
            plots.costs(curves, figures_folder / f"costs-{name}.png", title, float(table.cost_ratio.iloc[0])),
        ]
    return figures


def readable(frontier: pd.DataFrame) -> pd.DataFrame:
    lines = [row for _, row in frontier.iterrows()]
    baseline = plots.label(frontier.baseline.iloc[0])
    results = pd.DataFrame({
        "method": [plots.label(row.method) for row in lines],
        "setting": [row.setting for row in lines],
        "tokens per target time": [interval_text(row, "throughput", "{:.3f}") for row in lines],
        f"over best {baseline}": [interval_text(row, "gain", "{:+.1%}") for row in lines],
    })  # fmt: skip
    for name, column in (("share", "way to the oracle"), ("upper_bound_share", "way to the upper bound")):
        if name in frontier:
            shares = ["" if row.method == PLAIN else interval_text(row, name, "{:.0%}") for row in lines]
            results[column] = shares
    for name in ("discard_rate", "verification_rate", "block_efficiency"):
        results[name.replace("_", " ")] = [f"{row[name]:.3f}" for row in lines]
    line_notes = notes(frontier, baseline)
    if any(line_notes):
        results["note"] = line_notes
    if "tokens_per_second" in frontier:
        results["tokens/s"] = [f"{row.tokens_per_second:.4g}" for row in lines]
    return results


def as_markdown(frontier: pd.DataFrame, by_cost: pd.DataFrame, figures: dict[str, list[Path]]) -> str:
    parts = ["# Frontier"]
    for dataset, table in frontier.groupby("dataset", sort=False):
        parts += [f"## {dataset}", _headline(table), markdown(readable(table))]
        lines = by_cost[by_cost.dataset == dataset].drop(columns="dataset")
        lines["method"] = [plots.label(method) for method in lines.method]
        parts += ["Tokens per target-forward time by cost ratio, settings chosen again at each:", markdown(lines)]
        parts += [f"![{path.stem}](figures/{path.name})" for path in figures[str(dataset)]]
    definitions = "\n".join(f"- **{term}**: {meaning}." for term, meaning in DEFINITIONS.items())
    return "\n\n".join([*parts, "## Definitions", definitions]) + "\n"


def side_by_side(table: pd.DataFrame) -> pd.DataFrame:
    """One line per method, three columns per data set: throughput, gain over the baseline, share of the way."""
    shares = [name for name in SHARES if name in table]
    methods = list(dict.fromkeys(table.method))
    wide = pd.DataFrame({"method": [plots.label(name) for name in methods]})
    for dataset, part in table.groupby("dataset", sort=False):
        lines = part.set_index("method")
        columns = {f"{dataset}": "throughput", f"{dataset}: over {plots.label(table.baseline.iloc[0])}": "gain"}
        columns |= {f"{dataset}: way to {NAMES[SHARES[name]]}": name for name in shares}
        for heading, name in columns.items():
            form = "{:.3f}" if name == "throughput" else "{:+.1%}" if name == "gain" else "{:.0%}"
            wide[heading] = [
                interval_text(lines.loc[method], name, form)
                if method in lines.index and not (name in shares and method == PLAIN)
                else ""
                for method in methods
            ]
        wide[f"{dataset}: note"] = [lines.note.get(method, "") for method in methods]
    return wide.loc[:, (wide != "").any()]


def _study(
    dataset: str, dev: pd.DataFrame, test: pd.DataFrame, cfg: keys.Frontier, hindsight: bool
) -> list[pd.DataFrame]:
    cost = Cost.of(cfg.cost_ratio, cfg.draft_seconds, cfg.target_seconds, cfg.node_cost)
    test = comparable(test, f"{dataset}, test")
    dev = comparable(unseen(dev, test, dataset), f"{dataset}, dev")
    choice = choose(totals(dev), totals(test), cost.ratio, dataset, cost.node)
    bootstrap = Bootstrap(cfg.resamples, cfg.confidence, cfg.seed)
    settings = settings_table(test, cost.ratio, cost.node)
    settings["chosen"] = [choice[row.method] == row.setting for row in settings.itertuples()]
    low, high = cfg.cost_range
    listed = sorted(set(plain(cfg.table_costs)))
    ratios = cost_ratios(low, high, listed)
    compared = compare(test, choice, cfg.baseline, cost, bootstrap, hindsight)
    curves = over_costs(dev, test, dataset, ratios, cfg.baseline if hindsight else None, cost.node, bootstrap)
    if cost.target_seconds is not None:
        curves["tokens_per_second"] = curves.throughput / cost.target_seconds
    standings = []
    for ratio in listed:
        choice = choose(totals(dev), totals(test), ratio, dataset, cost.node)
        table = compare(test, choice, cfg.baseline, Cost(ratio, node=cost.node), bootstrap)
        standings.append(table.assign(note=notes(table, plots.label(cfg.baseline))))
    return [compared, settings, curves, pd.concat(standings)]


def by_dataset(dev: pd.DataFrame, test: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """Dev and test rows of each data set. Raises InputError unless both hold the same ones."""
    dev_names, test_names = (list(dict.fromkeys(rows.dataset)) for rows in (dev, test))
    if set(dev_names) != set(test_names):
        raise InputError(
            f"dev and test must hold the same data sets, got {', '.join(dev_names)} and {', '.join(test_names)}; "
            "name them alike when sweeping (dataset=NAME)"
        )
    for dataset in test_names:
        yield dataset, dev[dev.dataset == dataset], test[test.dataset == dataset]


def _folders(value: Any) -> list[Path]:
    value = plain(value)
    return [Path(folder) for folder in (value if isinstance(value, list) else [value])]


def _headline(table: pd.DataFrame) -> str:
    first = table.iloc[0]
    spread = spread_name(first.prompts, first.confidence)
    return f"{first.dataset}: {first.prompts} test prompts, c = {first.cost_ratio:g}, {spread}"


def _log(folder: Path, figures: dict[str, list[Path]], cfg: keys.Frontier) -> None:
    tables = {name: read_table(folder, name) for name in TABLES}
    datasets = list(dict.fromkeys(tables["frontier"].dataset.astype(str)))
    options: dict[str, Any] = {
        "tags": datasets,
        "name": f"c={cfg.cost_ratio:g} {' '.join(datasets)}",
        "track": cfg.track,
    }
    options["inputs"] = [*_folders(cfg.dev), *_folders(cfg.test or [])]
    with wandb_run("frontier", plain(cfg), folder, **options) as wandb:
        log_summary(wandb, frontier_scalars(tables["frontier"]))
        for name, table in tables.items():
            log_table(wandb, f"frontier/{name}", table)
        for figure in chain.from_iterable(figures.values()):
            log_image(wandb, f"frontier/{figure.stem}", figure)
        for dataset, settings in tables["settings"].groupby("dataset", sort=False):
            title = f"{dataset}: discard rate against verification rate"
            log_scatter(wandb, f"frontier/settings-{dataset}", settings, "verification_rate", "discard_rate", title)
        for dataset, curves in tables["costs"].groupby("dataset", sort=False):
            title = f"{dataset}: tokens per target-forward time over the cost ratio"
            log_lines(wandb, f"frontier/curves-{dataset}", curves, "cost_ratio", "throughput", "method", title)

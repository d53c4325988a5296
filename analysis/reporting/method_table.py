"""The table of a comparison: every figure of every setting with its interval.

Counts and scores are known per prompt, so intervals of what follows from them are over prompts. Seconds and joules are
measured per group, so theirs are over groups.

Shapes: n prompts or groups, m settings, k counted quantities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.figures import plots
from analysis.quality import Metric
from analysis.quality.base import table as counted
from analysis.tables.bootstrap import ENOUGH, Bootstrap, Scale
from analysis.tables.files import markdown, with_interval
from analysis.tables.grid import Setting
from analysis.tables.rows import COUNTS, Array, one_kind
from analysis.tables.sweep_context import SweepContext
from toolkit import metrics as forwards
from toolkit.costs.energy import Energy
from toolkit.errors import InputError
from toolkit.types import Generation, Round

Unscored = dict[str, dict[str, dict[str, int]]]  # metric -> setting -> why texts could not be scored, how often
Function = Callable[[Array], Array]
Figure = tuple[tuple[str, ...], Function, Scale]  # columns; from their totals [..., m, k] to [..., m]
LABELS = {
    "tokens_per_second": "tokens/s", "speedup": "speed / baseline", "throughput": "tokens per target time",
    "block_efficiency": "block efficiency", "draft_calls": "draft forwards per token", "discard_rate": "discard rate",
    "verification_rate": "verification rate", "mean_width": "mean width", "joules_per_token": "J/token",
    "joules_per_forward": "J/target forward", "joules_per_input": "J/input",
    "idle_joules_per_token": "of it idle, J/token",
}  # fmt: skip


def group_rows(
    parts: Sequence[Mapping[str, Any]],
    settings: Sequence[Setting],
    groups: Sequence[range],
    context: SweepContext,
    metrics: Mapping[str, Metric],
    dev: Sequence[int] = (),
) -> tuple[pd.DataFrame, pd.DataFrame, Unscored]:
    """One line per setting and group, one per setting and prompt, and the texts that metrics could not score.

    dev  groups that are not reported: their texts are left out of the last
    """
    reported = [prompt for number, group in enumerate(groups) if number not in dev for prompt in group]
    rows: list[dict[str, Any]] = []
    prompt_rows: list[dict[str, Any]] = []
    unscored: Unscored = {}
    for setting in settings:
        measured = [part["settings"][setting.name] for part in parts]
        generations = [
            [
                Generation(
                    **{**record, "rounds": [Round(**{**r, "widths": tuple(r["widths"])}) for r in record["rounds"]]}
                )
                for record in measurement["generations"]
            ]
            for measurement in measured
        ]
        prompts = [context.prompts[i] for group in groups for i in group]
        flat = [generation for group in generations for generation in group]
        scores = {name: metric.measure(prompts, flat, context.pair) for name, metric in metrics.items()}
        tables = {name: counted(metric, scores[name]) for name, metric in metrics.items()}
        for name, metric_scores in scores.items():
            if reasons := Counter(metric_scores[i].reason for i in reported if metric_scores[i].counts is None):
                unscored.setdefault(name, {})[setting.name] = dict(reasons.most_common())
        for number, (measurement, texts) in enumerate(zip(measured, generations, strict=True)):
            row: dict[str, Any] = {"method": setting.method, "setting": setting.label, "name": setting.name}
            row |= {"group": number, "group_size": context.batch_size}
            row |= {"prompts": len(texts), "failed": sum(text.error is not None for text in texts)}
            counts = [{name: getattr(text.counts, name) for name in COUNTS} for text in texts]
            for prompt, text, line in zip(groups[number], texts, counts, strict=True):
                widths = [width for r in text.rounds for width in r.widths]
                line |= {"layers": len(widths), "widths": sum(widths)}
                for name, metric in metrics.items():
                    scored = zip(metric.columns, tables[name][prompt], strict=True)
                    line |= {f"{name}.{column}": value for column, value in scored}
                prompt_rows.append({"name": setting.name, "group": number, "prompt": prompt, **line})
            row |= pd.DataFrame(counts).sum().to_dict()
            row |= {"target_runs": max((len(text.rounds) for text in texts), default=0)}
            energy = Energy(**measurement["energy"])
            row["seconds"] = measurement["seconds"]
            for name, joules in (("joules", energy.joules), ("idle_joules", energy.idle_joules)):
                row[name] = np.nan if joules is None else joules
            row["cache_bytes"] = measurement["cache_bytes"]
            rows.append(row)
    return pd.DataFrame(rows), pd.DataFrame(prompt_rows), unscored


def table_of(
    rows: pd.DataFrame,
    prompt_rows: pd.DataFrame,
    settings: Sequence[Setting],
    metrics: Mapping[str, Metric],
    baseline: str,
    cost_ratio: float,
    bootstrap: Bootstrap,
) -> pd.DataFrame:
    """One line per setting. Each figure `x` comes with `x_low` and `x_high`; resamples have the same prompts for all.

    A metric comes with `x_scored`, too: of how many prompts, with any setting, it could score a text.
    """
    names = [setting.name for setting in settings]
    lines = rows.groupby("name", sort=False).agg(
        method=("method", "first"), setting=("setting", "first"), group_size=("group_size", "first"),
        prompts=("prompts", "sum"), groups=("group", "nunique"), failed=("failed", "sum"),
        cache_mib=("cache_bytes", lambda held: held.max() / 2**20), **{name: (name, "sum") for name in COUNTS},
    ).loc[names].reset_index(drop=True)  # fmt: skip
    of_prompts, of_groups = counted_figures(metrics, cost_ratio), measured_figures(names.index(baseline))
    for unit, frame, figures in (("prompt", prompt_rows, of_prompts), ("group", rows, of_groups)):
        parts = [frame[frame.name == name].sort_values(unit) for name in names]
        for name, (columns, figure, scale) in figures.items():
            values = np.stack([part[list(columns)].to_numpy(float) for part in parts], 1)  # [n, m, k]

            def of_totals(totals: Array, figure: Function = figure, shape: Sequence[int] = values.shape[1:]) -> Array:
                return figure(totals.reshape(*totals.shape[:-1], *shape))

            numbers = bootstrap.spread(values.reshape(len(values), -1), of_totals, scale)
            lines[name], lines[f"{name}_low"], lines[f"{name}_high"] = numbers
            if name in metrics:
                lines[f"{name}_scored"] = int(values.any(axis=(1, 2)).sum())
    return lines


def groups_to_choose_on(count: int, share: float, seed: int) -> list[int]:
    """A share of the groups, drawn at random. Raises InputError if none is left on one side; a share of 0 draws none."""
    size = round(share * count)
    if share and not 0 < size < count:
        raise InputError(f"dev_share: {share:g} of {count} groups leaves none on one side; expected more groups, or 0")
    return sorted(np.random.default_rng(seed).permutation(count)[:size].tolist())


def about_settings(settings: Sequence[Setting], context: SweepContext) -> pd.DataFrame:
    """Per setting its parameters, and `levels`, the most of a round: tokens of a chain, levels of a tree, layers of beams."""
    lines = []
    for setting in settings:
        method = context.methods[setting.name].bind(context.pair)
        widths = getattr(method.proposer, "widths", None)
        values = {name: value for name, value in setting.parameters.items() if name != "head"}
        parameters = {name: " ".join(map(str, v)) if isinstance(v, list | tuple) else v for name, v in values.items()}
        lines.append({**parameters, "levels": method.limit if widths is None else min(method.limit, len(widths))})
    return one_kind(pd.DataFrame(lines))


def counted_figures(metrics: Mapping[str, Metric], cost_ratio: float) -> dict[str, Figure]:
    def throughput(totals: Array) -> Array:
        return np.asarray(totals[..., 0] / forwards.cost(totals[..., 1], totals[..., 2], cost_ratio))

    def scored(name: str, metric: Metric) -> Figure:
        return tuple(f"{name}.{column}" for column in metric.columns), metric.value, metric.scale

    return {
        "throughput": (("num_generated", "num_draft_calls", "num_target_calls"), throughput, "linear"),
        "block_efficiency": _quotient("num_generated", "num_target_calls"),
        "draft_calls": _quotient("num_draft_calls", "num_generated"),
        "discard_rate": _quotient("num_discarded", "num_generated"),
        "verification_rate": _quotient("num_target_calls", "num_generated"),
        "mean_width": _quotient("widths", "layers"),
        **{name: scored(name, metric) for name, metric in metrics.items()},
    }


def measured_figures(base: int) -> dict[str, Figure]:
    """What follows from seconds and joules, on a logarithmic scale. base: index of the baseline."""
    columns, speed, scale = _quotient("num_generated", "seconds", "log")
    return {
        "tokens_per_second": (columns, speed, scale),
        "speedup": (columns, lambda totals: speed(totals) / speed(totals)[..., [base]], scale),
        "seconds_per_forward": _quotient("seconds", "target_runs", "log"),
        "seconds_per_input": _quotient("seconds", "num_target_calls", "log"),
        "joules_per_token": _quotient("joules", "num_generated", "log"),
        "joules_per_forward": _quotient("joules", "target_runs", "log"),
        "joules_per_input": _quotient("joules", "num_target_calls", "log"),
        "idle_joules_per_token": _quotient("idle_joules", "num_generated", "log"),
    }


def _quotient(upper: str, lower: str, scale: Scale = "linear") -> Figure:
    return (upper, lower), lambda totals: np.asarray(totals[..., 0] / totals[..., 1]), scale


def readable(table: pd.DataFrame, metrics: Mapping[str, Metric], cost_ratio: float) -> pd.DataFrame:
    results = pd.DataFrame({"method": [plots.label(method) for method in table.method], "setting": table.setting})
    for name in (*metrics, *LABELS):
        if table[name].notna().any():
            title = metrics[name].label if name in metrics else LABELS[name]
            title = f"{title} (c = {cost_ratio:g})" if name == "throughput" else title
            ends = zip(table[name], table[f"{name}_low"], table[f"{name}_high"], strict=True)
            numbers = table.groups if name in measured_figures(0) else table.get(f"{name}_scored", table.prompts)
            results[title] = [with_interval(*line, number) for line, number in zip(ends, numbers, strict=True)]
    results["cache, MiB"] = [f"{value:.2f}" for value in table.cache_mib]
    if table.failed.any():
        results["failed"] = table.failed
    return results


def draw(table: pd.DataFrame, metrics: Mapping[str, Metric], folder: Path, title: str) -> list[Path]:
    """Each metric against speed, forward passes and energy, and mean width against all of these."""
    rates = [name for name in ("tokens_per_second", "throughput", "joules_per_token") if table[name].notna().any()]
    named = {**LABELS, **{name: metric.label for name, metric in metrics.items()}}
    better = {"joules_per_token": False, **{name: metric.ascending for name, metric in metrics.items()}}
    pairs = [(x, y) for y in metrics for x in rates]
    if table.mean_width.notna().any():
        pairs += [("mean_width", y) for y in (*metrics, *rates)]
    paths = []
    for x, y in pairs:
        if table[[x, y]].notna().all(axis=1).any():
            frontier = None if x == "mean_width" else (better.get(x, True), better.get(y, True))
            path = folder / f"{y}-{x}.png"
            paths.append(plots.scatter(table, x, y, (named[x], named[y]), path, title, frontier))
    return paths


def as_markdown(title: str, results: pd.DataFrame, figures: Sequence[Path], energy: str, cost_ratio: float) -> str:
    notes = (
        "Settings took turns on every group of prompts; only decoding is timed. Intervals are over prompts; those of seconds "
        f"and joules over groups. [a to b] is a range: of fewer than {ENOUGH}. Tokens per target time: N / (c x draft passes "
        f"+ target passes), c = {cost_ratio:g}. "
        "Cache: target and draft, the largest of all groups. A target pass reads all texts of a group together, each an "
        f"input (MTAD, Table 2); joules are those of all devices, idle power included. {energy}"
    )
    lines = [f"# Comparison: {title}", "", markdown(results), "", notes, ""]
    lines += [f"![{figure.stem}](figures/{figure.name})" for figure in figures]
    return "\n".join(lines) + "\n"

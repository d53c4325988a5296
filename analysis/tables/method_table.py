"""The table of a comparison: every figure of every setting with its interval, all from the same bootstrap of the groups.

Shapes: g groups, m settings, k counted quantities, R resamples.
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
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import markdown, with_interval
from analysis.tables.grid import Setting
from analysis.tables.rows import COUNTS, Array, one_kind
from analysis.tables.workbench import Workbench
from toolkit import metrics as forwards
from toolkit.costs.energy import Energy
from toolkit.errors import InputError
from toolkit.types import Generation, Round

Unscored = dict[str, dict[str, dict[str, int]]]  # metric -> setting -> why texts could not be scored, how often
MEASURED = (*COUNTS, "target_runs", "seconds", "joules", "idle_joules", "layers", "widths")
METERED = {  # figures that are unknown if a group's total is
    "joules_per_token": "joules", "joules_per_forward": "joules", "joules_per_input": "joules",
    "idle_joules_per_token": "idle_joules",
}  # fmt: skip
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
    bench: Workbench,
    metrics: Mapping[str, Metric],
) -> tuple[pd.DataFrame, Unscored]:
    """One line per setting and group: counts, seconds, joules, bytes of cache, and the counted quantities of the metrics.

    And the texts that metrics could not score.
    """
    rows: list[dict[str, Any]] = []
    unscored: Unscored = {}
    for setting in settings:
        measured = [part["settings"][setting.name] for part in parts]
        generations = [[generation_of(record) for record in measurement["generations"]] for measurement in measured]
        prompts = [bench.prompts[i] for group in groups for i in group]
        flat = [generation for group in generations for generation in group]
        scores = {name: metric.measure(prompts, flat, bench.pair) for name, metric in metrics.items()}
        tables = {name: counted(metric, scores[name]) for name, metric in metrics.items()}
        for name, metric_scores in scores.items():
            if reasons := Counter(score.reason for score in metric_scores if score.counts is None):
                unscored.setdefault(name, {})[setting.name] = dict(reasons.most_common())
        first = 0
        for number, (measurement, texts) in enumerate(zip(measured, generations, strict=True)):
            row: dict[str, Any] = {
                "method": setting.method,
                "setting": setting.label,
                "name": setting.name,
                "group": number,
                "group_size": bench.batch_size,
            }
            row |= {"prompts": len(texts), "failed": sum(text.error is not None for text in texts)}
            row |= {name: sum(getattr(text.counts, name) for text in texts) for name in COUNTS}
            widths = [width for text in texts for r in text.rounds for width in r.widths]
            row |= {"layers": len(widths), "widths": sum(widths)}
            row |= {"target_runs": max((len(text.rounds) for text in texts), default=0)}
            energy = Energy(**measurement["energy"])
            row["seconds"] = measurement["seconds"]
            for name, joules in (("joules", energy.joules), ("idle_joules", energy.idle_joules)):
                row[name] = np.nan if joules is None else joules
            row["cache_bytes"] = measurement["cache_bytes"]
            for name, metric in metrics.items():
                sums = tables[name][first : first + len(texts)].sum(0)
                row |= {f"{name}.{column}": value for column, value in zip(metric.columns, sums, strict=True)}
            first += len(texts)
            rows.append(row)
    return pd.DataFrame(rows), unscored


def unscored_note(unscored: Unscored) -> str:
    """A sentence per metric on the texts without a score; empty if every text got its scores."""
    lines = []
    for name, settings in unscored.items():
        of = [
            f"{setting} {count} ({reason})"
            for setting, reasons in settings.items()
            for reason, count in reasons.items()
        ]
        lines.append(f"{name}: texts without a score, left out of it: {'; '.join(of)}.")
    return " ".join(lines)


def generation_of(record: Mapping[str, Any]) -> Generation:
    """A generation as it was before it was written."""
    rounds = [Round(**{**r, "widths": tuple(r["widths"])}) for r in record["rounds"]]
    return Generation(**{**record, "rounds": rounds})


def table_of(
    rows: pd.DataFrame,
    settings: Sequence[Setting],
    metrics: Mapping[str, Metric],
    baseline: str,
    cost_ratio: float,
    bootstrap: Bootstrap,
) -> pd.DataFrame:
    """One line per setting. Each figure `x` comes with `x_low` and `x_high`; in every resample all settings have
    the same groups.
    """
    names = [setting.name for setting in settings]
    columns = [*MEASURED, *(f"{name}.{column}" for name, metric in metrics.items() for column in metric.columns)]
    pivoted = [rows.pivot(index="group", columns="name", values=column)[names].to_numpy(float) for column in columns]
    values = np.stack(pivoted, -1)  # [g, m, k]
    drawn = bootstrap.totals(np.nan_to_num(values).reshape(len(values), -1))
    figures = _figures(columns, metrics, names.index(baseline), cost_ratio)
    whole, samples = values.sum(0)[None], drawn.reshape(-1, *values.shape[1:])
    lines = rows.groupby("name", sort=False).agg(
        method=("method", "first"), setting=("setting", "first"), group_size=("group_size", "first"),
        prompts=("prompts", "sum"), failed=("failed", "sum"),
        cache_mib=("cache_bytes", lambda held: held.max() / 2**20),
    ).loc[names].reset_index(drop=True)  # fmt: skip
    lines = lines.join(pd.DataFrame(whole[0][:, : len(COUNTS)], columns=list(COUNTS)))
    missing = {name: np.isnan(whole[0][:, columns.index(total)]) for name, total in METERED.items()}
    for name, figure in figures.items():
        estimates = figure(whole)[0]
        ends = [_ends(column, bootstrap, len(values)) for column in figure(samples).T]
        lines[name] = estimates
        lines[f"{name}_low"], lines[f"{name}_high"] = zip(*ends, strict=True)
        unknown = np.isnan(estimates) | missing.get(name, False)
        lines.loc[unknown, [name, f"{name}_low", f"{name}_high"]] = np.nan
    return lines


def groups_to_choose_on(count: int, share: float, seed: int) -> list[int]:
    """A share of the groups, drawn at random. Raises InputError if none is left on one side; a share of 0 draws none."""
    size = round(share * count)
    if share and not 0 < size < count:
        raise InputError(f"dev_share: {share:g} of {count} groups leaves none on one side; expected more groups, or 0")
    return sorted(np.random.default_rng(seed).permutation(count)[:size].tolist())


def speed_of(rows: pd.DataFrame, settings: Sequence[Setting]) -> list[float]:
    """Tokens per second of every setting."""
    sums = rows.groupby("name", sort=False)[["num_generated", "seconds"]].sum()
    return [float(sums.num_generated[setting.name] / sums.seconds[setting.name]) for setting in settings]


def about_settings(settings: Sequence[Setting], bench: Workbench) -> pd.DataFrame:
    """Per setting, a column for every parameter of the grid, named as its override, and `levels`: the most that a round drafts.

    Levels are tokens of a chain, levels of a tree, layers of beams.
    """
    lines = []
    for setting in settings:
        method = bench.methods[setting.name].bind(bench.pair)
        widths = getattr(method.proposer, "widths", None)
        values = {name: value for name, value in setting.parameters.items() if name != "head"}
        parameters = {name: " ".join(map(str, v)) if isinstance(v, list | tuple) else v for name, v in values.items()}
        lines.append({**parameters, "levels": method.limit if widths is None else min(method.limit, len(widths))})
    return one_kind(pd.DataFrame(lines))


def _ends(samples: Array, bootstrap: Bootstrap, num_groups: int) -> tuple[float, float]:
    """The central interval; none of too few groups, or if a figure is undefined in over one resample of a hundred."""
    finite = samples[np.isfinite(samples)]
    if len(finite) < 0.99 * len(samples):
        return float("nan"), float("nan")
    return bootstrap.group_interval(finite, num_groups)


def _figures(
    columns: list[str], metrics: Mapping[str, Metric], base: int, cost_ratio: float
) -> dict[str, Callable[[Array], Array]]:
    """Each figure [..., m] of totals [..., m, k]."""

    def of(name: str) -> Callable[[Array], Array]:
        return lambda totals: totals[..., columns.index(name)]

    def ratio(upper: Callable[[Array], Array], lower: Callable[[Array], Array]) -> Callable[[Array], Array]:
        def figure(totals: Array) -> Array:
            with np.errstate(invalid="ignore", divide="ignore"):
                return np.asarray(upper(totals) / lower(totals))

        return figure

    def quality(name: str, metric: Metric) -> Callable[[Array], Array]:
        picked = [columns.index(f"{name}.{column}") for column in metric.columns]
        return lambda totals: metric.value(totals[..., picked])

    produced, target, draft = of("num_generated"), of("num_target_calls"), of("num_draft_calls")
    speed = ratio(produced, of("seconds"))
    return {
        "tokens_per_second": speed,
        "speedup": ratio(speed, lambda totals: speed(totals)[..., base : base + 1]),
        "throughput": ratio(produced, lambda totals: forwards.cost(draft(totals), target(totals), cost_ratio)),
        "block_efficiency": ratio(produced, target),
        "draft_calls": ratio(draft, produced),
        "discard_rate": ratio(of("num_discarded"), produced),
        "verification_rate": ratio(target, produced),
        "mean_width": ratio(of("widths"), of("layers")),
        "seconds_per_forward": ratio(of("seconds"), of("target_runs")),
        "seconds_per_input": ratio(of("seconds"), target),
        "joules_per_token": ratio(of("joules"), produced),
        "joules_per_forward": ratio(of("joules"), of("target_runs")),
        "joules_per_input": ratio(of("joules"), target),
        "idle_joules_per_token": ratio(of("idle_joules"), produced),
        **{name: quality(name, metric) for name, metric in metrics.items()},
    }


def readable(table: pd.DataFrame, metrics: Mapping[str, Metric], cost_ratio: float) -> pd.DataFrame:
    """The table as people read it: intervals in brackets, columns without any value left out."""
    results = pd.DataFrame({"method": [plots.label(method) for method in table.method], "setting": table.setting})
    for name in (*metrics, *LABELS):
        if table[name].notna().any():
            title = metrics[name].label if name in metrics else LABELS[name]
            title = f"{title} (c = {cost_ratio:g})" if name == "throughput" else title
            ends = zip(table[name], table[f"{name}_low"], table[f"{name}_high"], strict=True)
            results[title] = [with_interval(*numbers) for numbers in ends]
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
    """The table with how to read it, and the figures."""
    notes = (
        "Settings took turns on every group of prompts; only decoding is timed. Intervals: bootstrap over groups, the same "
        f"resamples for all settings. Tokens per target time: N / (c x draft passes + target passes), c = {cost_ratio:g}. "
        "Cache: target and draft, the largest of all groups. A target pass reads all texts of a group together, each an "
        f"input (MTAD, Table 2); joules are those of all devices, idle power included. {energy}"
    )
    lines = [f"# Comparison: {title}", "", markdown(results), "", notes, ""]
    lines += [f"![{figure.stem}](figures/{figure.name})" for figure in figures]
    return "\n".join(lines) + "\n"


def check_baseline(settings: Sequence[Setting], baseline: str) -> None:
    """Raises InputError unless a setting of the grid has this name."""
    if baseline not in [setting.name for setting in settings]:
        raise InputError(f"baseline: expected one of {'; '.join(c.name for c in settings)}, got {baseline!r}")

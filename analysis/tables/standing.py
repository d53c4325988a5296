"""Where methods stand on the same prompts: throughput, gain over a baseline, share of the way to the references.

All with intervals over prompts; in every resample all methods have the same prompts, so that gains and shares are paired.

`frontier_scalars` are what W&B runs can be sorted by.

Shapes: n prompts, m methods, k counts (`COUNTS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.tables.bootstrap import ENOUGH, Bootstrap, brackets
from analysis.tables.grid import ORACLE, PER_PROMPT, PLAIN, REFERENCES, UPPER_BOUND
from analysis.tables.rows import COUNTS, Array, throughput, totals
from analysis.tables.selection import Choice, best_per_prompt, choose
from toolkit.errors import InputError

SHARES = {"share": ORACLE, "upper_bound_share": UPPER_BOUND}
NUM_COSTS = 41  # cost ratios of the curves, evenly spaced in their logarithm


def standing(
    counts: Array,
    methods: Sequence[str],
    baseline: str,
    cost_ratio: float,
    bootstrap: Bootstrap,
    node_cost: float = 0.0,
) -> pd.DataFrame:
    """One line per method: `throughput`, `gain` over the baseline, and SHARES where there is such a reference.

    counts [n, m, k]. Each figure comes with `<name>_low` and `<name>_high`. gain = throughput / baseline's - 1; a share is
    (throughput - baseline's) / (reference's - baseline's).
    """
    base = list(methods).index(baseline)
    ends = {name: list(methods).index(reference) for name, reference in SHARES.items() if reference in methods}

    def quantities(totals: Array) -> Array:
        """Throughput, gain and shares [..., 2 or more, m] of totals [..., m k]."""
        reached = rates(totals.reshape(*totals.shape[:-1], *counts.shape[1:]), methods, cost_ratio, node_cost)
        gain = reached / reached[..., [base]] - 1
        return np.stack([reached, gain, *(_share(reached, base, end) for end in ends.values())], -2)

    figures = bootstrap.spread(counts.reshape(len(counts), -1), quantities)
    table = pd.DataFrame({"method": list(methods)})
    for name, *numbers in zip(("throughput", "gain", *ends), *figures, strict=True):
        table[name], table[f"{name}_low"], table[f"{name}_high"] = numbers
    return table


def notes(table: pd.DataFrame, baseline: str) -> list[str]:
    """What a reader must not miss of each line of `standing`: that a method loses beyond its interval."""
    slower = table.throughput_high < 1  # autoregressive decoding has 1
    lines = np.select([slower, table.gain_high < 0], ["slower than plain decoding", f"below the best {baseline}"], "")
    return np.where(table.method.isin((PLAIN, *REFERENCES)), "", lines).tolist()


def interval_text(row: Any, name: str, form: str) -> str:
    """ "1.234 [1.200, 1.268]"; the estimate alone if that is a point; "?" for an interval that is undefined.

    row  with `prompts` or `texts`, their number: "1.234 [1.200 to 1.268]" is the range of few
    """
    if name not in row or pd.isna(row[name]):
        return ""
    if pd.isna(row[f"{name}_low"]):
        return f"{form.format(row[name])} [?]"
    estimate, low, high = (form.format(row[key]) for key in (name, f"{name}_low", f"{name}_high"))
    number = int(row.get("prompts", row.get("texts", ENOUGH)))
    return estimate if low == high else f"{estimate} {brackets(low, high, number)}"


def gain_over(counts: Array, base: Array, cost_ratio: float, bootstrap: Bootstrap) -> dict[str, float]:
    """`gain`, `gain_low`, `gain_high` of counts [n, k] over a baseline's on the same prompts."""
    both = np.stack([counts, base], axis=1)
    line = standing(both, ["mine", "base"], "base", cost_ratio, bootstrap).iloc[0]
    return {name: float(line[name]) for name in ("gain", "gain_low", "gain_high")}


def rates(counts: Array, methods: Sequence[str], cost_ratio: float, node_cost: float = 0.0) -> Array:
    """Throughputs [..., m] of counts [..., m, k]; references decode autoregressively where that is faster."""
    throughputs = throughput(counts, cost_ratio, node_cost)
    return np.where([method in SHARES.values() for method in methods], np.maximum(throughputs, 1.0), throughputs)


def _share(throughputs: Array, base: int, end: int) -> Array:
    """Part of the way from the baseline to a reference; not a number where the reference is not higher."""
    way = throughputs[..., [end]] - throughputs[..., [base]]
    return np.divide(throughputs - throughputs[..., [base]], way, out=np.full_like(throughputs, np.nan), where=way > 0)


def frontier_scalars(frontier: pd.DataFrame) -> dict[str, float | str | None]:
    """Scalars of a frontier: the best method of every data set, on its test prompts, with settings chosen on dev."""
    scalars: dict[str, float | str | None] = {"cost_ratio": float(frontier.cost_ratio.iloc[0])}
    for dataset, lines in frontier.groupby("dataset", sort=False):
        own = lines[~lines.method.isin((*REFERENCES, PLAIN))]
        if own.empty:
            continue
        best = own.loc[own.throughput.idxmax()]
        scalars |= {
            f"{dataset}/best": f"{best.method} {best.setting}".strip(),
            f"{dataset}/throughput": float(best.throughput),
            f"{dataset}/over_{best.baseline}": float(best.gain),
            f"{dataset}/upper_bound_share": float(best.upper_bound_share) if "upper_bound_share" in lines else None,
        }
    return scalars


@dataclass(frozen=True)
class Cost:
    """Costs of forward passes: c, and the target's seconds if they are known; node: see `analysis.tables.rows.throughput`."""

    ratio: float
    target_seconds: float | None = None
    node: float = 0.0

    def __post_init__(self) -> None:
        if not self.ratio > 0:
            raise InputError(f"cost_ratio: expected a number above 0, got {self.ratio}")
        if not self.node >= 0:
            raise InputError(f"node_cost: expected a number of at least 0, got {self.node}")

    @classmethod
    def of(cls, ratio: float, draft_seconds: float | None, target_seconds: float | None, node: float = 0.0) -> Cost:
        """The cost from the seconds of both forward passes if they are named, else from their ratio."""
        if draft_seconds is None and target_seconds is None:
            return cls(ratio, node=node)
        if draft_seconds is None or target_seconds is None or not target_seconds > 0:
            raise InputError("expected draft_seconds and target_seconds above 0, or neither of them")
        return cls(draft_seconds / target_seconds, target_seconds, node)


def compare(
    test: pd.DataFrame, choice: Choice, baseline: str, cost: Cost, bootstrap: Bootstrap, hindsight: bool = False
) -> pd.DataFrame:
    """`standing` of the chosen settings, references last. hindsight: with the baseline's best setting per prompt."""
    if baseline not in choice:
        raise InputError(
            f"nothing to compare with: the sweeps hold no {baseline}; add it to the sweep's grid, or set baseline= to one of "
            f"{', '.join(sorted(choice))}"
        )
    if hindsight:
        test = pd.concat([test, best_per_prompt(test, baseline, cost.ratio, cost.node)], ignore_index=True)
        choice = {**choice, PER_PROMPT: ""}
    choice = dict(sorted(choice.items(), key=lambda entry: _rank(entry[0])))
    prompts = list(dict.fromkeys(test.prompt))  # the same prompt in each line of [prompts, methods, counts]
    blocks = [
        test[(test.method == method) & (test.setting == setting)].set_index("prompt").loc[prompts, list(COUNTS)]
        for method, setting in choice.items()
    ]
    counts = np.stack([block.to_numpy(dtype=float) for block in blocks], axis=1)
    figures = standing(counts, list(choice), baseline, cost.ratio, bootstrap, cost.node)
    table = _chosen(totals(test), choice)
    table = table.assign(baseline=baseline, cost_ratio=cost.ratio, **vars(bootstrap))
    table = table.join(figures.drop(columns="method"))
    if cost.target_seconds is not None:
        table["tokens_per_second"] = table.throughput / cost.target_seconds
    return table


def cost_ratios(low: float, high: float, listed: Sequence[float]) -> list[float]:
    """Cost ratios of the curves (evenly spaced logarithms) and the table, in order. Raises InputError for bad values."""
    if not 0 < low < high:
        raise InputError(f"cost_range: expected 0 < low < high, got {low} and {high}")
    if not listed or min(listed) <= 0:
        raise InputError(f"table_costs: expected cost ratios above 0, got {list(listed)}")
    return sorted({*map(float, np.geomspace(low, high, NUM_COSTS)), *map(float, listed)})


def over_costs(
    dev: pd.DataFrame,
    test: pd.DataFrame,
    dataset: str,
    ratios: Sequence[float],
    hindsight: str | None = None,
    node_cost: float = 0.0,
    bootstrap: Bootstrap | None = None,
) -> pd.DataFrame:
    """Throughput of every method over cost ratios, its setting chosen again at each. hindsight: shown per prompt, too."""
    names = ["method", "setting"]
    in_both = pd.MultiIndex.from_frame(dev[names]).isin(pd.MultiIndex.from_frame(test[names]))
    dev_totals, test_totals = totals(dev[in_both]), totals(test)
    lines = []
    for cost_ratio in ratios:
        choice = choose(dev_totals, test_totals, cost_ratio, dataset, node_cost)
        table = _chosen(test_totals, choice)
        if hindsight is not None:
            per_prompt = best_per_prompt(test, hindsight, cost_ratio, node_cost)
            table = pd.concat([table, totals(per_prompt)], ignore_index=True)
        throughputs = rates(table[list(COUNTS)].to_numpy(dtype=float), list(table.method), cost_ratio, node_cost)
        line = table[["dataset", "method", "setting"]].assign(cost_ratio=cost_ratio, throughput=throughputs)
        lines.append(line)
    curves = pd.concat(lines, ignore_index=True)[["dataset", "cost_ratio", "method", "setting", "throughput"]]
    if bootstrap is not None:
        curves[["throughput_low", "throughput_high"]] = np.nan
        for (method, setting), line in curves[curves.method != PER_PROMPT].groupby(["method", "setting"], sort=False):
            counts = test[(test.method == method) & (test.setting == setting)][list(COUNTS)].to_numpy(dtype=float)

            def throughputs_of(sums: Array, method: str = method, ratios: Sequence[float] = line.cost_ratio) -> Array:
                each = [rates(sums[..., None, :], [method], ratio, node_cost)[..., 0] for ratio in ratios]
                return np.stack(each, -1)

            _, *ends = bootstrap.spread(counts, throughputs_of)
            curves.loc[line.index, ["throughput_low", "throughput_high"]] = np.stack(ends, -1)
    return curves


def costs_table(curves: pd.DataFrame, ratios: Sequence[float]) -> pd.DataFrame:
    """One line per data set and method, references last, one column of throughputs per cost ratio: `over_costs` as a table."""
    key = ["dataset", "method"]
    wide = curves[curves.cost_ratio.isin(ratios)].pivot(index=key, columns="cost_ratio", values="throughput")
    lines = curves[key].drop_duplicates()
    lines = lines.iloc[np.lexsort((lines.method.map(_rank), lines.dataset.map(list(lines.dataset).index)))]
    wide = wide.loc[pd.MultiIndex.from_frame(lines)]
    return wide.rename(columns="c={:g}".format).rename_axis(columns=None).reset_index()


def _rank(method: str) -> int:
    return REFERENCES.index(method) + 1 if method in REFERENCES else 0


def _chosen(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    return table.set_index(["method", "setting"], drop=False).loc[list(choice.items())].reset_index(drop=True)

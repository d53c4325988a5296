"""The tables of a frontier, for one data set. Settings come from the dev rows, every number from the test rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.tables.bootstrap import Bootstrap
from analysis.tables.grid import PER_PROMPT, YARDSTICKS
from analysis.tables.rows import COUNTS, Array, totals
from analysis.tables.selection import Choice, best_per_prompt, choose, in_both
from analysis.tables.standing import rates, standing
from toolkit.errors import InputError

NUM_COSTS = 41  # cost ratios of the curves, evenly spaced in their logarithm


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
    """One line per method with its chosen setting, references last: throughput, gain over the baseline, shares of the way.

    See `standing`. hindsight: with the baseline's best setting per prompt.
    """
    if baseline not in choice:
        raise InputError(
            f"nothing to compare with: the sweeps hold no {baseline}; add it to the sweep's grid, or set baseline= to one of "
            f"{', '.join(sorted(choice))}"
        )
    if hindsight:
        test = pd.concat([test, best_per_prompt(test, baseline, cost.ratio)], ignore_index=True)
        choice = {**choice, PER_PROMPT: ""}
    choice = dict(sorted(choice.items(), key=lambda entry: _place(entry[0])))
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
    """Throughput of every method over cost ratios, its setting chosen again at each, among those of both sets.

    hindsight  the method whose best setting per prompt is shown, too
    bootstrap  for throughput_low and throughput_high, over prompts, of the setting that was chosen
    """
    dev_totals, test_totals = totals(in_both(dev, test)), totals(test)
    lines = []
    for cost_ratio in ratios:
        choice = choose(dev_totals, test_totals, cost_ratio, dataset, node_cost)
        table = _chosen(test_totals, choice)
        if hindsight is not None:
            table = pd.concat([table, totals(best_per_prompt(test, hindsight, cost_ratio))], ignore_index=True)
        throughputs = rates(table[list(COUNTS)].to_numpy(dtype=float), list(table.method), cost_ratio, node_cost)
        line = table[["dataset", "method", "setting"]].assign(cost_ratio=cost_ratio, throughput=throughputs)
        lines.append(line)
    curves = pd.concat(lines, ignore_index=True)[["dataset", "cost_ratio", "method", "setting", "throughput"]]
    if bootstrap is not None:
        curves[["throughput_low", "throughput_high"]] = np.nan
        for (method, setting), line in curves[curves.method != PER_PROMPT].groupby(["method", "setting"], sort=False):
            mine = test[(test.method == method) & (test.setting == setting)][list(COUNTS)].to_numpy(dtype=float)

            def throughputs_of(sums: Array, method: str = method, ratios: Sequence[float] = line.cost_ratio) -> Array:
                each = [rates(sums[..., None, :], [method], ratio, node_cost)[..., 0] for ratio in ratios]
                return np.stack(each, -1)

            _, *ends = bootstrap.interval(mine, throughputs_of)
            curves.loc[line.index, ["throughput_low", "throughput_high"]] = np.stack(ends, -1)
    return curves


def costs_table(curves: pd.DataFrame, ratios: Sequence[float]) -> pd.DataFrame:
    """One line per data set and method, references last, one column of throughputs per cost ratio: `over_costs` as a table."""
    key = ["dataset", "method"]
    wide = curves[curves.cost_ratio.isin(ratios)].pivot(index=key, columns="cost_ratio", values="throughput")
    lines = curves[key].drop_duplicates()
    lines = lines.iloc[np.lexsort((lines.method.map(_place), lines.dataset.map(list(lines.dataset).index)))]
    wide = wide.loc[pd.MultiIndex.from_frame(lines)]
    return wide.rename(columns="c={:g}".format).rename_axis(columns=None).reset_index()


def _place(method: str) -> int:
    """The rank of a method in a table: in the order it has, references last."""
    return YARDSTICKS.index(method) + 1 if method in YARDSTICKS else 0


def _chosen(table: pd.DataFrame, choice: Choice) -> pd.DataFrame:
    """The lines of `totals` that were chosen, in the order of the choice."""
    return table.set_index(["method", "setting"], drop=False).loc[list(choice.items())].reset_index(drop=True)

"""Where methods stand on the same prompts: throughput, gain over a baseline, share of the way to the references.

All with intervals over prompts; in every resample all methods have the same prompts, so that gains and shares are paired.

`sweep_scalars` and `frontier_scalars` are what W&B runs can be sorted by.

Shapes: n prompts, m methods, k counts (`COUNTS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.tables.bootstrap import Bootstrap
from analysis.tables.grid import ORACLE, PLAIN, UPPER_BOUND, YARDSTICKS
from analysis.tables.rows import COUNTS, Array, counts_of, throughput
from toolkit.metrics import scalars as scalars_of

FIXED = "speculative"
SHARES = {"share": ORACLE, "upper_bound_share": UPPER_BOUND}


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

    figures = bootstrap.interval(counts.reshape(len(counts), -1), quantities)
    table = pd.DataFrame({"method": list(methods)})
    for name, *numbers in zip(("throughput", "gain", *ends), *figures, strict=True):
        table[name], table[f"{name}_low"], table[f"{name}_high"] = numbers
    return table


def notes(table: pd.DataFrame, baseline: str) -> list[str]:
    """What a reader must not miss of each line of `standing`: that a method loses beyond its interval.

    baseline  as tables call it. Autoregressive decoding and the references have no note.
    """
    slower = table.throughput_high < 1  # autoregressive decoding has 1
    lines = np.select([slower, table.gain_high < 0], ["slower than plain decoding", f"below the best {baseline}"], "")
    return np.where(table.method.isin((PLAIN, *YARDSTICKS)), "", lines).tolist()


def interval_text(row: Any, name: str, form: str) -> str:
    """ "1.234 [1.200, 1.268]"; the estimate alone if the interval is a point; nothing if there is no estimate.

    "?" for an interval that is undefined: in many resamples the reference was not higher.
    """
    if name not in row or pd.isna(row[name]):
        return ""
    if pd.isna(row[f"{name}_low"]):
        return f"{form.format(row[name])} [?]"
    estimate, low, high = (form.format(row[key]) for key in (name, f"{name}_low", f"{name}_high"))
    return estimate if low == high else f"{estimate} [{low}, {high}]"


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


def sweep_scalars(summary: pd.DataFrame, cost_ratio: float) -> dict[str, float | str | None]:
    """Scalars of a sweep's summary at one cost ratio, on the prompts that the best setting was picked on (not a test set).

    A figure is None where the sweep lacks what it is measured against.
    """
    own = summary[~summary.method.isin((*YARDSTICKS, PLAIN))]
    own = summary[summary.method == PLAIN] if own.empty else own
    if own.empty:
        return {"cost_ratio": cost_ratio}
    best = own.loc[own.throughput.idxmax()]
    fixed, bound = (summary[summary.method == name].throughput.max() for name in (FIXED, UPPER_BOUND))
    return {
        "best": f"{best.method} {best.setting}".strip(),
        **scalars_of(counts_of(best[list(COUNTS)]), cost_ratio),
        **{name: float(best[name]) for name in ("copy_share", "draft_share") if name in best},
        "over_fixed_k": None if pd.isna(fixed) else float(best.throughput / fixed - 1),
        "upper_bound_share": float((best.throughput - fixed) / (bound - fixed)) if bound > fixed else None,
    }


def frontier_scalars(frontier: pd.DataFrame) -> dict[str, float | str | None]:
    """Scalars of a frontier: the best method of every data set, on its test prompts, with settings chosen on dev."""
    scalars: dict[str, float | str | None] = {"cost_ratio": float(frontier.cost_ratio.iloc[0])}
    for dataset, lines in frontier.groupby("dataset", sort=False):
        own = lines[~lines.method.isin((*YARDSTICKS, PLAIN))]
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

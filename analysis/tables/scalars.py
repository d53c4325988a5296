"""Scalars that W&B runs can be sorted by: the best setting's throughput, its gain over fixed K, its share of the bound."""

from __future__ import annotations

import pandas as pd

from analysis.tables.grid import PLAIN, UPPER_BOUND, YARDSTICKS
from analysis.tables.rows import COUNTS, counts_of
from toolkit.metrics import scalars

FIXED = "speculative"


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
        **scalars(counts_of(best[list(COUNTS)]), cost_ratio),
        **{name: float(best[name]) for name in ("copy_share", "draft_share") if name in best},
        "over_fixed_k": None if pd.isna(fixed) else float(best.throughput / fixed - 1),
        "upper_bound_share": _share(best.throughput, fixed, bound),
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


def _share(throughput: float, fixed: float, bound: float) -> float | None:
    """Part of the way from fixed K to the upper bound; None where one of them is missing or the bound is not higher."""
    if pd.isna(fixed) or pd.isna(bound) or not bound > fixed:
        return None
    return float((throughput - fixed) / (bound - fixed))

"""Produced tokens per target forward, the extra token included, for every method and tree shape of sweeps.

python -m analysis.sweep prompts=toy_math grid=trees  ->  python -m analysis.acceptance sweeps=[FOLDER]
"""

from __future__ import annotations

import pandas as pd

from analysis.figures import plots
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.rows import SETTING
from analysis.tables.selection import comparable
from toolkit.errors import InputError

SHAPE = "proposer.k_config"


def block_efficiency_table(rows: pd.DataFrame, bootstrap: Bootstrap) -> pd.DataFrame:
    """One line per setting with a tree shape: prompts, block efficiency with its interval, tokens drafted per forward.

    Raises InputError if the rows have no tree shapes.
    """
    if SHAPE not in rows or rows[SHAPE].isna().all():
        raise InputError(f"sweeps: expected settings with {SHAPE} (analysis.sweep grid=trees), found none")
    lines = []
    for dataset, of_dataset in rows.groupby("dataset", sort=False):
        shared = comparable(of_dataset, str(dataset))
        for setting, mine in shared[shared[SHAPE].notna()].groupby([*SETTING, SHAPE], sort=False):
            totals = mine[["num_generated", "num_target_calls", "num_drafted"]].to_numpy(dtype=float)
            _, calls, drafted = totals.sum(0)
            lines.append({
                **dict(zip([*SETTING, "k_config"], setting, strict=True)),
                "prompts": len(mine),
                **bootstrap.figures(totals, lambda sums: {"block_efficiency": sums[..., 0] / sums[..., 1]}),
                "drafted_per_call": drafted / calls,
            })  # fmt: skip
    return pd.DataFrame(lines)


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """A line per method, a column per tree shape, for one data set."""
    lines = []
    for method, rows in table.groupby("method", sort=False):
        by_shape = {
            row.k_config: f"{row.block_efficiency:.3f} [{row.block_efficiency_low:.3f}, {row.block_efficiency_high:.3f}]"
            for row in rows.itertuples()
        }
        lines.append({"method": plots.label(str(method)), **by_shape})
    return pd.DataFrame(lines)

"""Acceptance per data set, method and number of candidates, beside the optimum of the way candidates are drawn.

    acceptance  P(a candidate is emitted by acceptance), mean over positions of target text
    drafted     P(the emitted token is a candidate): a decoder walks on there as well
    optimum     the most that `drafted` can be under any exact rule with the same scheme; for candidates of different
                distributions an upper bound of it (`toolkit.verification.optimal.independent_bounds`)
    gap         optimum - acceptance
Each with `_low` and `_high`, over prompts; all columns have the same resampled prompts (paired).

And produced tokens per target forward, the extra one included, for every method and tree shape of sweeps (grid=trees).
"""

from __future__ import annotations

import pandas as pd

from analysis.figures import plots
from analysis.multi_draft.target_texts import SUMS
from analysis.tables.bootstrap import Array, Bootstrap
from analysis.tables.files import markdown
from analysis.tables.rows import SETTING as SWEPT
from analysis.tables.selection import comparable
from toolkit.errors import InputError

SETTING = ["dataset", "method", "scheme", "K"]
SHAPE = "proposer.k_config"
QUANTITIES = ("acceptance", "drafted", "optimum")


def acceptance_table(sums: pd.DataFrame, bootstrap: Bootstrap) -> pd.DataFrame:
    """One line per data set, method and K, from `Walk.run`'s rows with a `dataset` column."""
    lines = []
    for setting, rows in sums.groupby(SETTING, sort=False):
        counts = rows[["positions", *SUMS]].to_numpy(dtype=float)
        line = dict(zip(SETTING, setting, strict=True))
        line |= {"prompts": len(rows), "positions": int(rows.positions.sum())}
        line |= bootstrap.figures(counts, _means, "probability")
        lines.append(line | bootstrap.figures(counts, _gap))
    return pd.DataFrame(lines)


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The table of one data set as people read it: a line per method and quantity, a column per K."""
    lines = []
    for (method, scheme), rows in table.groupby(["method", "scheme"], sort=False):
        labels = {"rule": plots.label(str(method)), "scheme": str(scheme).replace("_", " ")}
        for name in ("acceptance", "optimum", "gap"):
            by_k = {
                f"K={row.K}": f"{row[name]:.4f} [{row[f'{name}_low']:.4f}, {row[f'{name}_high']:.4f}]"
                for _, row in rows.iterrows()
            }
            lines.append({**labels, "quantity": name, **by_k})
            labels = dict.fromkeys(labels, "")
    return pd.DataFrame(lines)


def compact(table: pd.DataFrame) -> pd.DataFrame:
    """For the terminal: acceptance per rule and K, the optimum of each scheme once, without intervals."""
    lines = []
    for scheme, of_scheme in table.groupby("scheme", sort=False):
        for method, rows in of_scheme.groupby("method", sort=False):
            by_k = {f"K={row.K}": f"{row.acceptance:.4f}" for row in rows.itertuples()}
            lines.append({"scheme": str(scheme).replace("_", " "), "rule": plots.label(str(method)), **by_k})
        best = {f"K={row.K}": f"{row.optimum:.4f}" for row in rows.itertuples()}
        lines.append({"scheme": str(scheme).replace("_", " "), "rule": "optimum", **best})
    return pd.DataFrame(lines)


def as_markdown(table: pd.DataFrame) -> str:
    """`readable` of every data set."""
    parts = []
    for dataset, rows in table.groupby("dataset", sort=False):
        parts += [f"## {dataset}: {headline(rows)}", markdown(readable(rows))]
    return "\n\n".join(parts)


def headline(table: pd.DataFrame) -> str:
    """The amount of text that the numbers of one data set rest on."""
    return f"{table.prompts.max()} prompts, {table.positions.max():,} positions"


def _means(totals: Array) -> dict[str, Array]:
    """QUANTITIES [...] of totals [..., 1 + len(SUMS)]."""
    return {name: totals[..., 1 + number] / totals[..., 0] for number, name in enumerate(QUANTITIES)}


def _gap(totals: Array) -> dict[str, Array]:
    means = _means(totals)
    return {"gap": means["optimum"] - means["acceptance"]}


def block_efficiency_table(rows: pd.DataFrame, bootstrap: Bootstrap) -> pd.DataFrame:
    """One line per setting with a tree shape: prompts, block efficiency with its interval, tokens drafted per forward.

    Raises InputError if the rows have no tree shapes.
    """
    if SHAPE not in rows or rows[SHAPE].isna().all():
        raise InputError(f"sweeps: expected settings with {SHAPE} (analysis.sweep grid=trees), found none")
    lines = []
    for dataset, of_dataset in rows.groupby("dataset", sort=False):
        shared = comparable(of_dataset, str(dataset))
        for setting, mine in shared[shared[SHAPE].notna()].groupby([*SWEPT, SHAPE], sort=False):
            totals = mine[["num_generated", "num_target_calls", "num_drafted"]].to_numpy(dtype=float)
            _, calls, drafted = totals.sum(0)
            lines.append({
                **dict(zip([*SWEPT, "k_config"], setting, strict=True)),
                "prompts": len(mine),
                **bootstrap.figures(totals, lambda sums: {"block_efficiency": sums[..., 0] / sums[..., 1]}),
                "drafted_per_call": drafted / calls,
            })  # fmt: skip
    return pd.DataFrame(lines)


def readable_shapes(table: pd.DataFrame) -> pd.DataFrame:
    """A line per method, a column per tree shape, for one data set."""
    lines = []
    for method, rows in table.groupby("method", sort=False):
        by_shape = {
            row.k_config: f"{row.block_efficiency:.3f} [{row.block_efficiency_low:.3f}, {row.block_efficiency_high:.3f}]"
            for row in rows.itertuples()
        }
        lines.append({"method": plots.label(str(method)), **by_shape})
    return pd.DataFrame(lines)

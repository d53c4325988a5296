"""Acceptance per data set, method and number of candidates, beside the optimum of the way candidates are drawn.

    acceptance  P(a candidate is emitted by acceptance), mean over positions of target text
    drafted     P(the emitted token is a candidate): a decoder walks on there as well
    optimum     the most that `drafted` can be under any exact rule with the same scheme, or an upper bound of it
    gap         optimum - acceptance

Each with `_low` and `_high`, over prompts (paired). And which tree to draft: one with K_1, K_2, ... children per level yields
1 + a(K_1) + a(K_1) a(K_2) + ... tokens per round and costs c D + 1 + v n (D levels, n nodes). Approximation: a(K) is the mean
of `drafted`, and levels are independent. So deep trees are worth more than it says; trees of equal depth compare well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.figures import plots
from analysis.multi_draft.target_texts import SUMS
from analysis.tables.bootstrap import Array, Bootstrap
from analysis.tables.files import markdown
from analysis.tables.rows import SETTING as SWEPT
from analysis.tables.selection import comparable
from analysis.tables.standing import interval_text
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
        lines.append(
            line | bootstrap.figures(counts, lambda sums: {"gap": _means(sums)["optimum"] - _means(sums)["acceptance"]})
        )
    return pd.DataFrame(lines)


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The table of one data set as people read it: a line per method and quantity, a column per K."""
    lines = []
    for (method, scheme), rows in table.groupby(["method", "scheme"], sort=False):
        labels = {"rule": plots.label(str(method)), "scheme": str(scheme).replace("_", " ")}
        for name in ("acceptance", "optimum", "gap"):
            by_k = {f"K={row.K}": interval_text(row, name, "{:.4f}") for _, row in rows.iterrows()}
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
    parts = []
    for dataset, rows in table.groupby("dataset", sort=False):
        parts += [f"## {dataset}: {headline(rows)}", markdown(readable(rows))]
    return "\n\n".join(parts)


def headline(table: pd.DataFrame) -> str:
    return f"{table.prompts.max()} prompts, {table.positions.max():,} positions"


def _means(totals: Array) -> dict[str, Array]:
    """QUANTITIES [...] of totals [..., 1 + len(SUMS)]."""
    return {name: totals[..., 1 + number] / totals[..., 0] for number, name in enumerate(QUANTITIES)}


def block_efficiency_table(rows: pd.DataFrame, bootstrap: Bootstrap) -> pd.DataFrame:
    """One line per setting with a tree shape. Raises InputError if the rows have none."""
    if SHAPE not in rows or rows[SHAPE].isna().all():
        raise InputError(f"sweeps: expected settings with {SHAPE} (analysis.sweep grid=trees), found none")
    lines = []
    for dataset, of_dataset in rows.groupby("dataset", sort=False):
        shared = comparable(of_dataset, str(dataset))
        for setting, of_setting in shared[shared[SHAPE].notna()].groupby([*SWEPT, SHAPE], sort=False):
            totals = of_setting[["num_generated", "num_target_calls", "num_drafted"]].to_numpy(dtype=float)
            _, calls, drafted = totals.sum(0)
            lines.append({
                **dict(zip([*SWEPT, "k_config"], setting, strict=True)),
                "prompts": len(of_setting),
                **bootstrap.figures(totals, lambda sums: {"block_efficiency": sums[..., 0] / sums[..., 1]}),
                "drafted_per_call": drafted / calls,
            })  # fmt: skip
    return pd.DataFrame(lines)


def readable_shapes(table: pd.DataFrame) -> pd.DataFrame:
    lines = []
    for method, rows in table.groupby("method", sort=False):
        by_shape = {row.setting: interval_text(row, "block_efficiency", "{:.3f}") for _, row in rows.iterrows()}
        lines.append({"method": plots.label(str(method)), **by_shape})
    return pd.DataFrame(lines)


@dataclass(frozen=True)
class TreeCost:
    """In target forwards: a draft forward, and one more node in the target's forward."""

    draft: float
    node: float

    @classmethod
    def of(
        cls,
        cost_ratio: float,
        node_cost: float,
        target_seconds: float | None = None,
        draft_seconds: float | None = None,
        node_seconds: float | None = None,
    ) -> TreeCost:
        seconds = (target_seconds, draft_seconds, node_seconds)
        if all(value is None for value in seconds):
            return cls(cost_ratio, node_cost)
        if target_seconds is None or draft_seconds is None or node_seconds is None or not target_seconds > 0:
            raise InputError("expected target_seconds above 0, draft_seconds and node_seconds, or none of them")
        return cls(draft_seconds / target_seconds, node_seconds / target_seconds)

    def of_round(self, shape: Sequence[int]) -> float:
        return 1 + self.draft * len(shape) + self.node * int(np.cumprod(shape).sum())


def shapes(widths: Sequence[int], max_levels: int, max_nodes: int) -> Iterator[tuple[int, ...]]:
    """Trees whose levels have `widths` children per node, never more than the level above, and at most `max_nodes`."""

    def below(shape: tuple[int, ...], level: int, nodes: int) -> Iterator[tuple[int, ...]]:
        for width in widths:
            if (shape and width > shape[-1]) or len(shape) == max_levels or nodes + level * width > max_nodes:
                continue
            yield (*shape, width)
            yield from below((*shape, width), level * width, nodes + level * width)

    yield from below((), 1, 0)


def advise(table: pd.DataFrame, cost: TreeCost, max_levels: int, max_nodes: int) -> pd.DataFrame:
    """The best shape of every method and data set; tokens per round, cost and rate (tokens / cost) in target forwards."""
    lines = []
    for (dataset, method), rows in table.groupby(["dataset", "method"], sort=False):
        probs = dict(zip(map(int, rows.K), rows.drafted.clip(0, 1), strict=True))
        trees = list(shapes(sorted(probs), max_levels, max_nodes))
        tokens = np.array([1 + np.cumprod([probs[width] for width in shape]).sum() for shape in trees])
        costs = np.array([cost.of_round(shape) for shape in trees])
        is_chain = np.array([max(shape) == 1 for shape in trees])
        if not trees:
            raise InputError(f"no tree of at most {max_nodes} nodes has {min(probs)} children per node")
        best = int((tokens / costs).argmax())
        chain = float((tokens / costs)[is_chain].max()) if is_chain.any() else float("nan")
        lines.append({
            "dataset": dataset, "method": method, "k_config": "x".join(map(str, trees[best])),
            "nodes": int(np.cumprod(trees[best]).sum()), "tokens": float(tokens[best]), "cost": float(costs[best]),
            "rate": float(tokens[best] / costs[best]), "best_chain_rate": chain,
        })  # fmt: skip
    return pd.DataFrame(lines).sort_values(["dataset", "rate"], ascending=[True, False], ignore_index=True)


def as_sentence(advice: pd.DataFrame, cost: TreeCost) -> str:
    best = advice.iloc[0]
    costs = f"draft forward {cost.draft:g}, node {cost.node:g} target forwards"
    if best.rate <= 1:
        return f"{best.dataset}: do not draft at these costs ({costs}): the best tree makes {best.rate:.2f} of plain"
    chain = "" if np.isnan(best.best_chain_rate) else f", {best.best_chain_rate:.2f} with the best chain"
    return (
        f"{best.dataset}: {plots.label(best.method)} (method={best.method} proposer.k_config={best.k_config}): "
        f"{best.tokens:.2f} tokens per round, {best.rate:.2f} per target-forward time{chain} ({costs}; levels taken as "
        "independent)"
    )

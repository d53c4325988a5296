"""Which tree to draft: the shape of most tokens per time, from the acceptance of every method and number of candidates.

A tree with K_1, K_2, ... children per level yields 1 + a(K_1) + a(K_1) a(K_2) + ... tokens per round, the extra one
included. A tree of D levels and n nodes costs c D + 1 + v n. It pays c for the draft forward of each level and 1 for the target
forward. It also pays v for each of the n nodes that this forward reads.
Approximation: a(K) is the probability that the emitted token is among K candidates. Its mean over target text is used at every
level, and levels are treated as independent. In a text easy positions follow easy ones, so deep trees are worth more than
this formula says. A chain's survival is the mean of a product, not the product of the means. Trees of equal depth compare well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.figures import plots
from toolkit.errors import InputError


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
        """The cost from seconds if they are given, else from units of one target forward."""
        seconds = (target_seconds, draft_seconds, node_seconds)
        if all(value is None for value in seconds):
            return cls(cost_ratio, node_cost)
        if target_seconds is None or draft_seconds is None or node_seconds is None or not target_seconds > 0:
            raise InputError("expected target_seconds above 0, draft_seconds and node_seconds, or none of them")
        return cls(draft_seconds / target_seconds, node_seconds / target_seconds)

    def of_round(self, shape: Sequence[int]) -> float:
        """Cost of a round with this tree."""
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


def expected_tokens(shape: Sequence[int], probs: dict[int, float]) -> float:
    """Tokens per round, the extra one included, with a(K) in `probs`."""
    return 1 + float(np.cumprod([probs[width] for width in shape]).sum())


def advise(table: pd.DataFrame, cost: TreeCost, max_levels: int, max_nodes: int) -> pd.DataFrame:
    """The best shape of every method per data set, best first; and the best chain of each, from `acceptance_table`.

    tokens is per round, cost and rate are in target forwards: rate = tokens / cost, autoregressive decoding has 1.
    """
    lines = []
    for (dataset, method), rows in table.groupby(["dataset", "method"], sort=False):
        probs = dict(zip(map(int, rows.K), rows.drafted.clip(0, 1), strict=True))
        trees = list(shapes(sorted(probs), max_levels, max_nodes))
        tokens = np.array([expected_tokens(shape, probs) for shape in trees])
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
    """One line for one data set."""
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

"""Tree rate: as many nodes as pay, where they pay, at the rate of tokens per target-forward time that is reached.

The rule is ours, from renewal-reward theory as in `rate`; trees of EAGLE-2 (arXiv:2406.16858) and OPT-Tree (arXiv:2406.17276)
have a size that is set. A node's gain is its survival, P(it enters the text): its parent's, times P(it is accepted | the
parent is, no candidate before it was), times P(none before it was). Of nodes in the order of their gains v_1 >= v_2 >= .., with
C(n) what n columns add to the target's forward pass, a tree has the n of

    max over n of  v_1 + .. + v_n - lambda * C(n)

Another level is drafted while some number m of levels is worth its price. Level i from now on has a node below each leaf that
is sent, of gain v a^i, where a is the share of levels that this text has accepted; those below the price of a column are left
out; c(m) is the mean over the columns of m such levels, of which two may cost more than four. A level costs one draft forward
pass over the nodes that it reads:

    max over m of  sum over i = 1..m of  sum over leaves of (v a^i - lambda c(m))+  -  lambda c_draft(leaves)  >  0

Gains are multiplied by what the text shows of them, as in `rate`: min(1, (tokens accepted + n) / (gains of all nodes + n)).
Approximations: further levels have as many nodes as now; leaves that are not worth a column now are not read.

num_nodes=m: EAGLE-2 instead, with estimator.confidence=true: every level is drafted, and the best m nodes are sent.

Shapes: B rows, M nodes, W nodes that the draft reads at once, C candidates per node, L deepest level.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.config.notes import Between, Internal
from toolkit.errors import InputError, warn
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.stopping.planner import PricedDraft, best_fixed, depths, net
from toolkit.stopping.prices import Column, Ratio
from toolkit.types import Children, Drafted, Nodes, Verified

WIDEST = 64  # nodes of a level that a forward pass of the draft is priced for


class CandidateJudge(Protocol):
    """Gives P(a candidate is accepted | none before it was)."""

    def bind(self, pair: object) -> CandidateJudge:
        """Load and check what the estimator needs of a pair."""

    def candidate_probs(self, children: Children) -> Tensor:
        """P(accepted | the parent is, no candidate before it was) [B, W, C] float64."""


@dataclass(frozen=True)
class TreeRate(PricedDraft):
    """Send the nodes that are worth their columns, and draft another level while that is worth its forward pass.

    estimator    P(a candidate is accepted | none before it was)
    cost_ratio   draft forward pass / target forward pass; None: what is measured, else .2
    column_cost  what one more node adds to a target forward pass, as a share of it; None: what is measured, else .05
    max_nodes    nodes that are priced; a tree has no more
    num_nodes    nodes of every tree, whatever they cost; None: as many as pay
    levels       the deepest level: set by `within`

    The rest is `PricedDraft`'s; `acceptance` is that of a level. In the state are of a round `depth`, the levels that are sent,
    `promised`, the gains of what is sent before they are corrected, and `reading`, what the draft's passes over several nodes
    cost more than over one; `expected` and `correction` as in `rate`.
    """

    name = "tree_rate"
    counts = (*PricedDraft.counts, "expected")
    fading = (*PricedDraft.fading, "expected")
    round_values: ClassVar = {"depth": 0.0, "promised": 0.0, "reading": 0.0, "correction": 1.0}
    furthest: ClassVar[int] = WIDEST
    chooses_nodes: ClassVar[bool] = True
    estimator: CandidateJudge
    cost_ratio: Ratio = None
    column_cost: Column = None
    max_nodes: Annotated[int, Between(1, 1024)] = field(default=64, kw_only=True)
    num_nodes: Annotated[int, Between(1, 1024)] | None = field(default=None, kw_only=True)
    levels: Annotated[int, Internal()] = field(default=20, kw_only=True)

    step = StoppingPolicy.step  # nodes are chosen, not drawn one after another

    def within(self, max_drafted: int) -> TreeRate:
        return replace(self, deepest=self.max_nodes, levels=max_drafted)

    def bind(self, pair: object) -> TreeRate:
        if len(drafts := getattr(pair, "drafts", ())) > 1:
            raise InputError(
                f"method tree_rate: expected one draft model, whose tokens are the nodes, got {len(drafts)}"
            )
        table = self.read_table(self.cost_ratio, self.column_cost)
        if self.num_nodes is None and (over := table.beyond(self.batch_size, self.max_nodes + 1)):
            warn(f"method tree_rate: {over}; beyond, its last slope goes on (policy.max_nodes={self.max_nodes})")
        return self.bound(pair, table)

    def first_rate(self, state: State) -> Tensor | float:
        return best_fixed(self.acceptance, self.prices_at(state).tokens[0])

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        if self.num_nodes is not None:
            return state, live
        prices = self.prices_at(state).tokens[:, : self.levels]
        return state, live & (self.further(self.posterior(state), prices, state, 0) > 0)

    def judge(self, children: Children) -> Tensor:
        return self.estimator.candidate_probs(children)

    def choose(self, nodes: Nodes, state: State) -> tuple[State, Tensor, Tensor]:
        prices, index = self.prices_at(state), torch.arange(nodes.survival.shape[1], device=nodes.survival.device)
        if self.num_nodes is not None:
            if self.num_nodes > (most := nodes.survival.shape[1]):
                raise InputError(f"policy.num_nodes={self.num_nodes}: expected at most proposer.num_nodes={most}")
            num_sent = nodes.drawn.clamp(min=self.num_nodes)
            read = nodes.read(nodes.readable)
        else:
            gains = nodes.survival * state["correction"].unsqueeze(1)
            some = gains[:, : self.max_nodes]
            sums = pad(net(some, prices.columns[:, : some.shape[1]], self.reached(state)), (1, 0))
            withdrawn = torch.arange(sums.shape[1], device=sums.device) < nodes.drawn.unsqueeze(1)
            num_sent = sums.masked_fill(withdrawn, -torch.inf).argmax(1)
            leaves = nodes.read(index < num_sent.unsqueeze(1))
            read = leaves & self._another_level(gains, leaves, num_sent, nodes.depth, state).unsqueeze(1)
        sent = index < num_sent.unsqueeze(1)
        more = prices.catching_up((read.sum(1) - 1).clamp(min=0))
        values = {
            "depth": torch.where(sent, nodes.depths, 0).amax(1),
            "promised": torch.where(sent, nodes.survival, 0.0).sum(1),
            "reading": state["reading"] + more,
        }
        return {**state, **{name: value.to(state[name].dtype) for name, value in values.items()}}, num_sent, read

    def _another_level(self, gains: Tensor, leaves: Tensor, num_sent: Tensor, depth: int, state: State) -> Tensor:
        """Whether some number of further levels below the leaves [B, M] is worth its price [B]."""
        if depth >= self.levels:
            return torch.zeros_like(num_sent, dtype=torch.bool)
        prices, rate = self.prices_at(state), self.reached(state)
        horizon, num_leaves = depths(self.levels - depth, gains.device), leaves.sum(1, keepdim=True)
        column = prices.mean_column(num_sent, (num_leaves * horizon).long())  # [B, L]
        below = torch.where(leaves, gains, 0.0).unsqueeze(2) * self.posterior(state).view(-1, 1, 1) ** horizon
        worth = (below.unsqueeze(3) - (rate.unsqueeze(1) * column).view(len(rate), 1, 1, -1)).clamp(min=0).sum(1)
        draft = prices.forward + prices.catching_up((num_leaves.squeeze(1) - 1).clamp(min=0))
        return (worth.triu().sum(1) - (rate * draft).unsqueeze(1) * horizon).amax(1) > 0

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        state = super().observe(proposal, verdict, state)
        accepted, expected = (state[name] + self.evidence for name in ("accepted", "expected"))
        return {**state, "correction": (accepted / expected).clamp(max=1)}

    def counted(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        levels = torch.minimum(verdict.length + 1, state["depth"])
        return {**super().counted(proposal, verdict, state), "verified": levels, "expected": state["promised"]}

    def spent(self, proposal: Drafted, state: State) -> Tensor:
        return super().spent(proposal, state) + state["reading"]

"""Batch rate: the rate rule for a batch whose rows draft side by side. No threshold; plain decoding is one of its choices.

The rule is ours, from renewal-reward theory as `rate` is. In a batch, every row pays for the deepest one. A draft forward
and one more column of the target's forward cost the same whether one row wants them or all. So all rows decide
together. With B rows, C(d) is the cost of a round of depth d. The batch reaches lambda tokens per unit of cost. Drafting
goes on behind depth k iff for some depth d > k

    sum over live rows, j = k+1 .. d, of P(the first j tokens are accepted)  >  lambda * (C(d) - C(k))

One step ahead, P comes from the estimator. Further ahead, and before anything is drafted, P comes from the rows'
running acceptance rates of first tokens and of later ones. Looking further than one step matters where the first extra
column is expensive and the next ones are cheap. Depth d = 0 is plain decoding: a batch for which drafting does not pay
drafts nothing.

lambda is the best rate of a fixed depth by the running acceptance rates and the costs. It is multiplied by the ratio of
achieved to planned tokens so far. This factor is needed because stopping inside a round beats every fixed depth. Costs
come from a table, never from a clock, so equal batches give equal texts.

A row's text depends on its neighbours, but its distribution does not. The depth of a round is decided before its
acceptance draws are looked at (`couples_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.load_cost import LoadCost
from toolkit.schema.arguments import check_ranges
from toolkit.schema.ranges import AtLeast, Between
from toolkit.stopping.base import DrawnEstimator, State, StoppingPolicy, chances_to_enter
from toolkit.transfer import floats_on
from toolkit.types import Drafted, Judged, Step

# Entries of `seen` [B, 3, 2], the counts of a row's rounds, in which older rounds count less. For first and for later
# drafted tokens they say how many were accepted and how many were tried. The last entry has tokens made and planned.
FIRST, LATER, MADE = 0, 1, 2


@dataclass(frozen=True)
class BatchRate(StoppingPolicy):
    """Draft on while the tokens that the batch expects exceed their cost times the batch's rate.

    estimator   gives `drawn_probs(step)`, P(y_k accepted) and P(y_{k+1} accepted), before y_k is read
    costs       a table by batch size, a JSON or CSV file (`toolkit.load_cost`); None: `cost_ratio` and `column_cost`
    cost_ratio  c, draft forward / target forward, whatever the batch
    column_cost  what one more token per row adds to a target forward, as a share of it
    context     tokens behind a forward that costs are taken at
    first, later  acceptance of a round's first token, and of one behind accepted ones, before anything is known
    memory      how many tries that counts for, and how many rounds the past is remembered for
    deepest     the deepest round that is planned for: set by `within`
    table       costs, and `known`, C(d) by batch size: set by `bind`
    """

    reads_states: ClassVar[bool] = True
    couples_rows: ClassVar[bool] = True
    estimator: DrawnEstimator
    costs: str | None = None
    cost_ratio: Annotated[float, AtLeast(0)] = 0.2
    column_cost: Annotated[float, AtLeast(0)] = 0.0
    context: Annotated[int, AtLeast(0)] = 256
    first: Annotated[float, Between(0, 1, "()")] = 0.75
    later: Annotated[float, Between(0, 1, "()")] = 0.75
    memory: Annotated[float, Between(1, 1e9)] = 20.0
    deepest: int = 20
    table: LoadCost | None = None
    known: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    def within(self, max_drafted: int) -> BatchRate:
        return replace(self, deepest=max_drafted)

    def bind(self, pair: object) -> BatchRate:
        table = LoadCost.ratio(self.cost_ratio, self.column_cost) if self.costs is None else LoadCost.load(self.costs)
        return replace(self, estimator=self.estimator.bind(pair), table=table, known={})

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state per row.

        survival [B] of the round; rate [B, 2]: lambda and the planned rate; live [B]: whether the row takes part;
        seen [B, 3, 2]: counts of older rounds; ahead [B, D]: how many tokens of the next j are accepted if the first is.
        """
        one = torch.ones(num_rows, device=device)
        seen = torch.zeros(num_rows, 3, 2, device=device)
        seen[:, MADE] = self.memory
        ahead = torch.ones(num_rows, self.deepest, device=device)
        return {
            "survival": one,
            "rate": torch.ones(num_rows, 2, device=device),
            "live": one,
            "seen": seen,
            "ahead": ahead,
        }

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        cost, powers, priors = self._known(len(live), live.device)
        weight = live.to(cost.dtype)
        seen = state["seen"] * weight.view(-1, 1, 1)
        total = seen.sum(0)
        pooled = (total[:2, 0] + self.memory * priors) / (total[:2, 1] + self.memory)
        # a row's acceptance rates of first and later tokens [B, 2], shrunk to the batch's, which are shrunk to the prior
        chances = (seen[:, :2, 0] + self.memory * pooled) / (seen[:, :2, 1] + self.memory)
        ahead = (chances[:, LATER:] ** powers).cumsum(1)
        gained = torch.nn.functional.pad((weight * chances[:, FIRST]) @ ahead, (1, 0))
        best, depth = ((weight.sum() + gained) / cost).max(0)  # tokens per unit of cost, of the best fixed depth
        beyond = (total[MADE, 0] / total[MADE, 1].clamp(min=1e-9)).clamp(min=1.0)
        rate = torch.stack([best * beyond, best]).expand(len(live), 2)
        new = {"survival": torch.ones_like(weight), "rate": rate, "live": weight, "seen": state["seen"], "ahead": ahead}
        return new, (depth > 0).expand_as(live)

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        assert step.live is not None, "the proposer says which rows are live"
        survival, following = chances_to_enter(self.estimator, step, state["survival"])
        cost = self._known(len(survival), survival.device)[0]
        left = len(cost) - 1 - step.depth
        if not left:
            return {**state, "survival": survival}, torch.zeros_like(step.live)
        gain = (following * step.live) @ state["ahead"][:, :left]
        price = state["rate"][0, 0] * (cost[step.depth + 1 :] - cost[step.depth])
        return {**state, "survival": survival}, (gain > price).any().expand_as(step.live)

    def observe(self, proposal: Drafted, verdict: Judged, state: State) -> State:
        drafted, length, weight = proposal.num_drafted, verdict.length, state["live"]
        cost = self._known(len(drafted), drafted.device)[0]
        planned = cost[drafted.max().clamp(max=len(cost) - 1)] * state["rate"][:, 1] / weight.sum().clamp(min=1)
        later = torch.minimum(length, drafted - 1).clamp(min=0)  # tried behind an accepted first one
        counts = [length.clamp(max=1), drafted.clamp(max=1), (length - 1).clamp(min=0), later, length + 1, planned]
        kept = 1 - 1 / self.memory
        seen = kept * state["seen"] + torch.stack(counts, 1).view(-1, 3, 2)
        return {**state, "seen": torch.where(weight.view(-1, 1, 1) > 0, seen, state["seen"])}

    def _known(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """C(d) of a batch [D + 1], d from 0; the exponents 0..D-1; the priors [2]."""
        assert self.table is not None, "bind the policy to a pair first"
        if batch not in self.known:
            costs = [self.table.round(batch, depth, self.context) for depth in range(self.deepest + 1)]
            numbers = (costs, [float(power) for power in range(self.deepest)], [self.first, self.later])
            first, second, third = (floats_on(device, values) for values in numbers)
            self.known[batch] = (first, second, third)
        return self.known[batch]

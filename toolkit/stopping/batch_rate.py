"""Batch rate: the rate rule for a batch whose rows draft side by side. No threshold; never slower than without, by design.

Ours, from renewal-reward theory as `rate` is. In a batch, every row pays for the deepest one: a draft forward and one more
column of the target's forward cost the same whether one row wants them or all. So the batch decides together. With B
rows, C(d) the cost of a round of depth d and lambda the tokens per unit of cost that the batch reaches, it goes on behind
depth k iff for some depth d > k

    sum over live rows, j = k+1 .. d, of P(the first j tokens are accepted)  >  lambda * (C(d) - C(k))

One step ahead P comes from the estimator; further ahead, and before anything is drafted, from the rows' running
acceptance: of first tokens, and of later ones. Looking further than one step matters where the first extra column is dear
and the next ones are not. d = 0 is plain decoding: a batch for which drafting does not pay drafts nothing.

lambda is the best rate of a fixed depth by the running acceptance and the costs, times the ratio of achieved to planned
tokens so far, as the stopping inside a round beats every fixed depth. Costs are those of a table, never of a clock: equal
batches give equal texts.

Rows depend on their neighbours in their text, not in distribution: how deep a round goes is decided before its acceptance
draws are looked at (`couples_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.load_cost import LoadCost
from toolkit.schema.arguments import check_ranges
from toolkit.schema.ranges import AtLeast, Between
from toolkit.stopping.base import DrawnEstimator, State, StoppingPolicy
from toolkit.types import Drafted, Judged, Step

# Columns of what a row has seen, older rounds counting less: tokens made, tokens planned, and of first and of later drafted
# tokens, how many were accepted and how many tried.
TOKENS, PLANNED, FIRST, LATER = 0, 1, slice(2, 4), slice(4, 6)


@dataclass(frozen=True)
class BatchRate(StoppingPolicy):
    """Draft on while the batch's expected tokens exceed what they cost at the batch's rate.

    estimator   gives `drawn_probs(step)`, P(y_k accepted) and P(y_{k+1} accepted), before y_k is read
    costs       a table by batch size, a JSON or CSV file (`toolkit.load_cost`); None: `cost_ratio` and `column_cost`
    cost_ratio  c, draft forward / target forward, whatever the batch
    column_cost  what one more token per row adds to a target forward, as a share of it
    context     tokens behind a forward that costs are taken at
    first, later  acceptance of a round's first token, and of one behind accepted ones, before anything is known
    memory      how many tries that counts for, and how many rounds the past is remembered for
    deepest     the deepest round that is planned for: set by `within`
    table       costs, and `known`, C(d) [D + 1] by batch size: set by `bind`
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
    known: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    def within(self, max_drafted: int) -> BatchRate:
        return replace(self, deepest=max_drafted)

    def bind(self, pair: object) -> BatchRate:
        table = LoadCost.ratio(self.cost_ratio, self.column_cost) if self.costs is None else LoadCost.load(self.costs)
        return replace(self, estimator=self.estimator.bind(pair), table=table, known={})

    def init(self, num_rows: int, device: torch.device) -> State:
        """Per row: survival of the round, its planned rate and its lambda, whether it takes part, what was seen [B, 6]."""
        one = torch.ones(num_rows, device=device)
        seen = torch.zeros(num_rows, 6, device=device)
        seen[:, :2] = self.memory
        return {"survival": one, "rate": one.clone(), "planned": one.clone(), "live": one.bool(), "seen": seen}

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        cost = self._costs(len(live), live.device)
        seen = state["seen"] * live.unsqueeze(1)
        total = seen.sum(0)
        first, later = self._acceptance(seen[:, FIRST], self.first), self._acceptance(seen[:, LATER], self.later)
        powers = torch.arange(len(cost) - 1, device=live.device)
        by_depth = ((first * live).unsqueeze(1) * later.unsqueeze(1) ** powers).sum(0)
        gained = torch.nn.functional.pad(by_depth.cumsum(0), (1, 0))
        best, depth = ((live.sum() + gained) / cost).max(0)  # tokens per unit of cost, of the best fixed depth
        beyond = (total[TOKENS] / total[PLANNED].clamp(min=1e-9)).clamp(min=1.0)
        state = {
            "survival": torch.ones_like(first),
            "rate": (best * beyond).expand_as(first),
            "planned": best.expand_as(first),
            "live": live,
            "seen": state["seen"],
        }
        return state, (depth > 0).expand_as(live)

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        assert step.live is not None, "the proposer says which rows are live"
        accepted, following = self.estimator.drawn_probs(step)
        survival = state["survival"] * accepted
        cost = self._costs(len(survival), survival.device)
        further = torch.arange(len(cost) - 1 - step.depth, device=survival.device)
        if not len(further):
            return {**state, "survival": survival}, torch.zeros_like(step.live)
        seen = state["seen"] * state["live"].unsqueeze(1)
        later = self._acceptance(seen[:, LATER], self.later)
        ahead = (survival * following * step.live).unsqueeze(1) * later.unsqueeze(1) ** further
        gain = ahead.sum(0).cumsum(0) - state["rate"][0] * (cost[step.depth + 1 :] - cost[step.depth])
        return {**state, "survival": survival}, (gain.max() > 0).expand_as(step.live)

    def observe(self, proposal: Drafted, verdict: Judged, state: State) -> State:
        drafted, length, live = proposal.num_drafted, verdict.length, state["live"]
        cost = self._costs(len(drafted), drafted.device)
        planned = cost[drafted.max().clamp(max=len(cost) - 1)] * state["planned"] / live.sum().clamp(min=1)
        later_tried = torch.where(length > 0, torch.minimum(length, drafted - 1), 0)
        new = [length + 1, planned, length > 0, drafted > 0, (length - 1).clamp(min=0), later_tried]
        seen = (1 - 1 / self.memory) * state["seen"] + torch.stack([value.float() for value in new], 1)
        return {**state, "seen": torch.where(live.unsqueeze(1), seen, state["seen"])}

    def _acceptance(self, seen: Tensor, prior: float) -> Tensor:
        """Running acceptance [B] of accepted and tried [B, 2]: a row's own, drawn to the batch's, and that to the prior."""
        (accepted, tried), total = seen.unbind(1), seen.sum(0)
        pooled = (total[0] + self.memory * prior) / (total[1] + self.memory)
        return (accepted + self.memory * pooled) / (tried + self.memory)

    def _costs(self, batch: int, device: torch.device) -> Tensor:
        """C(d) of a batch [D + 1], d from 0."""
        assert self.table is not None, "bind the policy to a pair first"
        if batch not in self.known:
            values = [self.table.round(batch, depth, self.context) for depth in range(self.deepest + 1)]
            self.known[batch] = torch.tensor(values, device=device)
        return self.known[batch].to(device)

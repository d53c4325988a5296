"""Batch rate: the rate rule for a batch whose rows draft side by side, all to one depth, which may be 0. No threshold.

The rule is ours, from renewal-reward theory as `rate` is. In a batch, every row pays for the deepest one. So all rows decide
together. C(k) is the cost of a round of depth k, and the batch reaches lambda tokens per unit of cost. After depth k, drafting
goes on iff

    for some d:  (1 + a + .. + a^(d - 1)) * sum over live rows of P(all drafted so far are accepted) * P(the next one is)
                     >  lambda * (C(k + d) - C(k))

The estimator gives both probabilities; a, the live rows' acceptance so far, stands for the tokens after the next one. Before
anything is drafted, it stands for all of them. So a round drafts iff for some depth d

    live rows * (a + a^2 + .. + a^d)  >  lambda * (C(d) - C(0))

lambda is what the live rows' texts have reached. Before any round it is the rate of the best fixed depth, by the assumed
acceptance. Costs are those of the longest live row's context, in rounds of autoregressive decoding with this many slots.

A row's text depends on its neighbours, but its distribution does not. The depth of a round is decided before its acceptance
draws are looked at (`couples_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.config.notes import Between
from toolkit.drafts.kinds import gives_blocks
from toolkit.stopping.base import DrawnEstimator, State
from toolkit.stopping.planner import Planner, best_fixed, depths, pays_together, with_longest, worth
from toolkit.stopping.prices import BATCH_COLUMN, BatchColumn, Ratio
from toolkit.types import Step


@dataclass(frozen=True)
class BatchRate(Planner):
    """Draft on while the tokens that the batch expects exceed their cost times the batch's rate.

    estimator   gives `drawn_probs(step)`, P(y_k accepted) and P(y_{k+1} accepted), before y_k is read
    costs       a table by batch size, a JSON or CSV file of `analysis.timing`; None: `cost_ratio` and `column_cost`
    cost_ratio  c, draft forward pass / target forward pass, whatever the batch; None: what is measured, else .2
    column_cost  what one more token per row adds to a target forward pass, as a share of it; None: what is measured, else 0
    acceptance  probability that a drafted token is accepted, before any round
    memory      how many drafted tokens, and how many rounds, the start counts for
    """

    name = "batch_rate"
    reads_states: ClassVar[bool] = True
    couples_rows: ClassVar[bool] = True
    counts = (*Planner.counts, "rate", "acceptance")
    estimator: DrawnEstimator
    cost_ratio: Ratio = None
    column_cost: BatchColumn = None
    acceptance: Annotated[float, Between(0, 1, "()")] = 0.75
    memory: Annotated[float, Between(0, 1e9, "(]")] = 20.0

    def bind(self, pair: object) -> BatchRate:
        column = BATCH_COLUMN if self.column_cost is None else self.column_cost
        return self.bound(pair, self.read_table(self.cost_ratio, column), gives_blocks(getattr(pair, "draft", None)))

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        if not len(live):
            return state, live
        state = with_longest(state, live)
        prices, weight = self.prices_at(state).tokens[0], live.to(state["cost"].dtype)
        tokens, cost, verified, accepted = (torch.dot(weight, state[name]) for name in Planner.counts)
        acceptance = (accepted + self.memory * self.acceptance) / (verified + self.memory)
        rate = (tokens + self.memory * best_fixed(self.acceptance, prices)) / (cost + self.memory)  # per row
        drafts = worth(acceptance ** depths(len(prices), prices.device), prices, rate) > 0
        shared = {"rate": (weight.sum() * rate).expand(len(live)), "acceptance": acceptance.expand(len(live))}
        return {**state, **shared}, live & drafts

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        state, following = self.score(step, state)
        prices = self.prices_at(state).tokens[0]
        return state, pays_together(following, state["acceptance"], prices, state["rate"][0], step)

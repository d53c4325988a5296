"""Block draft rate: how much of a block is worth the target's columns, and whether a round has a block at all. No threshold.

The rule is ours, from renewal-reward theory as `rate` is; the drafts are DFlash's and DSpark's, with one draft forward pass per
round. lambda is the rate that the text has reached, in tokens per unit of cost; C(k) is what a target forward pass over k
drafted tokens costs beyond one over none. Before the block is drafted, a stands for the acceptance of each of its tokens, the
posterior mean over the text's rounds. A round has a block iff

    max over d of  a + a^2 + .. + a^d - lambda * C(d)  >  lambda * c_block

Afterwards c_block is spent. Position k is sent, before its token is drawn, iff for some number d of positions from it on

    P(all so far and this one are accepted) * (1 + a + .. + a^(d - 1))  >  lambda * (C(k - 1 + d) - C(k - 1))

Where columns cost the same, d = 1 decides. Where they cost nothing, the whole block is sent: then no policy is better.
What decides about position k is q_k, the state that it is made of and what was drawn before; never its own token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Protocol

import torch
from torch import Tensor

from toolkit.config.notes import Between
from toolkit.stopping.base import State, entry_probs
from toolkit.stopping.priced import PricedDraft
from toolkit.stopping.prices import Column, PriceTable, Ratio, table_of
from toolkit.types import Drafted, Step, Verified


class BlockEstimate(Protocol):
    """Gives probabilities of a block's positions: `position_prob`, or `drawn_probs` as a `DrawnEstimator`, or both."""

    def bind(self, pair: object) -> BlockEstimate:
        """Load and check what the estimator needs of a pair."""


@dataclass(frozen=True)
class BlockDraftRate(PricedDraft):
    """Send a block's positions while their probability to enter the text exceeds the target's columns at the text's rate.

    estimator    P(x_k accepted) before x_k is drawn (`position_prob`), and once it is (`drawn_probs`), or one of the two
    cost_ratio   c_block, draft forward pass / target forward pass; None: what is measured, else .2
    column_cost  what one more token per row adds to a target forward pass, as a share of it; None: what is measured, else .05

    The rest is `PricedDraft`'s.
    """

    name = "block_draft_rate"
    reads: ClassVar[bool] = True
    reads_states: ClassVar[bool] = True
    estimator: BlockEstimate
    cost_ratio: Ratio = None
    column_cost: Column = None
    acceptance: Annotated[float, Between(0, 1, "()")] = field(default=0.6, kw_only=True)

    def bind(self, pair: object) -> BlockDraftRate:
        table = table_of(self.costs, self.cost_ratio, self.column_cost, [self.batch_size], self.deepest + 1)
        prices = PriceTable.of(table, self.batch_size, self.deepest, self.costs is None, blocks=True)
        return replace(self, estimator=self.estimator.bind(pair), prices=prices)

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state of `PricedDraft`, and `entering`: that the position being decided enters the text, too."""
        state = super().init(num_rows, device)
        return {**state, "entering": torch.ones_like(state["cost"])}

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        worth = self.prices_at(state).worth(self.posterior(state), state["tokens"] / state["cost"])
        return state, live & (worth > 0)

    def read(self, step: Step, state: State) -> tuple[State, Tensor]:
        entering, prices = self.entering(step, state), self.prices_at(state)
        columns = replace(prices, tokens=prices.columns)
        goes_on = columns.pay(entering, self.posterior(state), state["tokens"] / state["cost"], step.depth - 1)
        return {**state, "entering": entering}, goes_on

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        going = torch.ones_like(state["survival"], dtype=torch.bool)
        if not hasattr(self.estimator, "drawn_probs"):
            return {**state, "survival": state["entering"]}, going
        survival, following = entry_probs(self.estimator, step, state["survival"])  # type: ignore[arg-type]
        return {**state, "survival": survival, "entering": following}, going

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        prices, ones = self.prices_at(state), torch.ones_like(state["survival"])
        spent = 1 + proposal.num_calls * prices.forward + prices.read(proposal.num_drafted)
        verified = torch.minimum(verdict.length + 1, proposal.num_drafted)
        return {
            **state,
            "tokens": state["tokens"] + verdict.length + 1,
            "cost": state["cost"] + spent,
            "verified": state["verified"] + verified,
            "accepted": state["accepted"] + verdict.length,
            "survival": ones,
            "entering": ones.clone(),
        }

    def entering(self, step: Step, state: State) -> Tensor:
        """P(all so far and this position's token are accepted) [B], before the token is drawn."""
        if hasattr(self.estimator, "position_prob"):
            return state["survival"] * self.estimator.position_prob(step).to(state["survival"].dtype)
        return self.posterior(state) if step.depth == 1 else state["entering"]  # predicted with the token before

"""Block draft rate: how much of a block is worth the target's columns, and whether a round has a block at all. No threshold.

The rule is ours, from renewal-reward theory as `rate` is; the drafts are DFlash's and DSpark's, with one draft forward pass per
round. lambda is the rate that the text has reached; C(k) is what a target forward pass over k drafted tokens costs beyond one
over none. Before the block is drafted, a stands for the acceptance of each of its tokens, the posterior mean over the text's
rounds. A round has a block iff

    max over d of  a + a^2 + .. + a^d - lambda * C(d)  >  lambda * c_block

Afterwards c_block is spent. Position k is sent, before its token is drawn, iff for some number d of positions from it on

    P(all so far and this one are accepted) * (1 + a + .. + a^(d - 1))  >  lambda * (C(k - 1 + d) - C(k - 1))

So where columns cost nothing, the whole block is sent: then no policy is better. What decides about position k is q_k, the
state that it is made of and what was drawn before; never its own token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Protocol

import torch
from torch import Tensor

from toolkit.config.notes import Between
from toolkit.stopping.base import State
from toolkit.stopping.planner import PricedDraft
from toolkit.stopping.prices import Column, Ratio
from toolkit.types import Step


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

    The rest is `PricedDraft`'s. In the state, `entering` is that the position being decided enters the text, too.
    """

    name = "block_draft_rate"
    reads: ClassVar[bool] = True
    reads_states: ClassVar[bool] = True
    round_values: ClassVar = {**PricedDraft.round_values, "entering": 1.0}
    estimator: BlockEstimate
    cost_ratio: Ratio = None
    column_cost: Column = None
    acceptance: Annotated[float, Between(0, 1, "()")] = field(default=0.6, kw_only=True)

    def bind(self, pair: object) -> BlockDraftRate:
        return self.bound(pair, self.read_table(self.cost_ratio, self.column_cost), blocks=True)

    def read(self, step: Step, state: State) -> tuple[State, Tensor]:
        entering = self.entering(step, state)
        worth = self.further(entering, self.prices_at(state).columns, state, step.depth - 1)
        return {**state, "entering": entering}, worth > 0

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        going = torch.ones_like(state["survival"], dtype=torch.bool)
        if not hasattr(self.estimator, "drawn_probs"):
            return {**state, "survival": state["entering"]}, going
        state, following = self.score(step, state)
        return {**state, "entering": following}, going

    def entering(self, step: Step, state: State) -> Tensor:
        """P(all so far and this position's token are accepted) [B], before the token is drawn."""
        if hasattr(self.estimator, "position_prob"):
            return state["survival"] * self.estimator.position_prob(step).to(state["survival"].dtype)
        return self.posterior(state) if step.depth == 1 else state["entering"]  # predicted with the token before

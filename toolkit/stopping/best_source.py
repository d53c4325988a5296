"""Best source: nothing, copied tokens or the draft model, whichever is expected to make most tokens per second. No threshold.

The rule is ours, from renewal-reward theory as `rate` and `lookup_rate` are. At lambda, the rate that the text has reached, a
round is worth what it is expected to add to the text less lambda times what it costs beyond plain decoding. Nothing is worth 0,
a copy its largest sum of gains in `lookup_rate`. The draft model has not been read when it is chosen. With c the cost of its
forward pass and a the acceptance of its tokens in this text so far, it is worth what the best fixed length is:

    max over d of  sum over k = 1..d of  a^k - lambda * (c + C(k) - C(k - 1)),  less lambda * what catching up costs

a is the posterior mean of a Beta prior, `evidence` tokens of which the share `acceptance` was accepted. A draft that has not
read the tokens of rounds without it reads them in its first forward pass, which costs more by a table with widths. A chosen
draft goes on while some number of further tokens is worth its cost: the next one by its own probability, those after it by a.

The choice reads the text and the counts of earlier rounds; no token has been drawn that it could withhold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from toolkit.stopping.base import CopyEstimator, DrawnEstimator, State
from toolkit.stopping.lookup_rate import best_length
from toolkit.stopping.planner import PricedDraft
from toolkit.stopping.prices import Column, Ratio
from toolkit.types import Drafted, Match, Verified


@dataclass(frozen=True)
class BestSource(PricedDraft):
    """Choose the source of every row's round by what it is worth at the text's rate, and draft as long as it pays.

    estimator    gives `drawn_probs(step)` of the draft model's tokens
    copies       gives P(copied token accepted) from its match
    cost_ratio   c, draft forward pass / target forward pass; None: what is measured, else .2
    column_cost  what one more token per row adds to a target forward pass, as a share of it; None: what is measured, else .05

    The rest is `PricedDraft`'s. In the state are `gain`, of the round's copy, as in `lookup_rate`, and `unread`, tokens of the
    text since the row last drafted with the draft model.
    """

    name = "best_source"
    reads_states: ClassVar[bool] = True
    reads_matches: ClassVar[bool] = True
    plans_copies: ClassVar[bool] = True
    counts = (*PricedDraft.counts, "unread")
    round_values: ClassVar = {**PricedDraft.round_values, "gain": 0.0}
    furthest: ClassVar[int] = 64
    estimator: DrawnEstimator
    copies: CopyEstimator
    cost_ratio: Ratio = None
    column_cost: Column = None

    def bind(self, pair: object) -> BestSource:
        table = self.read_table(self.cost_ratio, self.column_cost).apart("copies beside a draft model")
        return replace(self.bound(pair, table), copies=self.copies.bind(pair))

    def plan(self, match: Match, available: Tensor, live: Tensor, state: State) -> tuple[State, Tensor]:
        return best_length(self, self.copies, match, available, state)

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        """The new state, and whether the draft model drafts [B]; where it does not, what was copied is sent."""
        worth = self.best_fixed(state) - self.reached(state) * self.catching_up(state)
        return state, live & (worth > state["gain"].clamp(min=0))

    def counted(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        unread = torch.where(proposal.num_calls > 0, -state["unread"], verdict.length + 1)
        return {**super().counted(proposal, verdict, state), "unread": unread}

    def spent(self, proposal: Drafted, state: State) -> Tensor:
        drafted = proposal.num_calls.amax() if self.couples_rows else proposal.num_calls
        return super().spent(proposal, state) + torch.where(drafted > 0, self.catching_up(state), 0.0)

    def catching_up(self, state: State) -> Tensor:
        """The price of what the draft has not read [B]."""
        return self.prices_at(state).catching_up(state["unread"])

"""Best source: nothing, copied tokens or the draft model, whichever is expected to make most tokens per second. No threshold.

The rule is ours, from renewal-reward theory as `rate` and `lookup_rate` are. At lambda, the rate that the text has reached
in tokens per unit of cost, a round is worth what it is expected to add to the text less lambda times what it costs beyond
plain decoding. Nothing is worth 0. A copy is worth what `lookup_rate` adds up while it decides how much to copy:

    sum over copied tokens k of  P(all up to k are accepted) - lambda * (C(k) - C(k - 1))

The draft model has not been read when it is chosen. With c the cost of its forward pass and a the acceptance of its tokens
in this text so far, it is worth what the best fixed length is:

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

from toolkit.stopping.base import CopyEstimator, DrawnEstimator, State, entry_probs
from toolkit.stopping.lookup_rate import best_length
from toolkit.stopping.priced import PricedDraft
from toolkit.stopping.prices import Column, PriceTable, Ratio, table_of
from toolkit.types import Drafted, Match, Step, Verified

FURTHEST = 64  # tokens that a draft has not read, at most, in its cost


@dataclass(frozen=True)
class BestSource(PricedDraft):
    """Choose the source of every row's round by what it is worth at the text's rate, and draft as long as it pays.

    estimator    gives `drawn_probs(step)` of the draft model's tokens
    copies       gives P(copied token accepted) from its match
    cost_ratio   c, draft forward pass / target forward pass; None: what is measured, else .2
    column_cost  what one more token per row adds to a target forward pass, as a share of it; None: what is measured, else .05

    The rest is `PricedDraft`'s.
    """

    name = "best_source"
    reads_states: ClassVar[bool] = True
    reads_matches: ClassVar[bool] = True
    plans_copies: ClassVar[bool] = True
    estimator: DrawnEstimator
    copies: CopyEstimator
    cost_ratio: Ratio = None
    column_cost: Column = None

    def bind(self, pair: object) -> BestSource:
        table = table_of(self.costs, self.cost_ratio, self.column_cost, [self.batch_size], self.deepest + 1)
        table = table.apart("copies beside a draft model")
        prices = PriceTable.of(table, self.batch_size, self.deepest, self.costs is None, FURTHEST)
        return replace(self, estimator=self.estimator.bind(pair), copies=self.copies.bind(pair), prices=prices)

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state of `PricedDraft`, the gain of the round's copy, as in `lookup_rate`, and `unread`.

        unread  tokens of the text since the row last drafted with the draft model
        """
        state = super().init(num_rows, device)
        return {**state, **{name: torch.zeros_like(state["cost"]) for name in ("gain", "unread")}}

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        """The new state, and whether the draft model drafts [B]; where it does not, what was copied is sent."""
        rate, prices = state["tokens"] / state["cost"], self.prices_at(state)
        worth = prices.worth(self.posterior(state), rate) - rate * prices.catching_up(state["unread"])
        return {**state, "survival": torch.ones_like(worth)}, live & (worth > state["gain"].clamp(min=0))

    def plan(self, match: Match, available: Tensor, live: Tensor, state: State) -> tuple[State, Tensor]:
        return best_length(self.copies, match, available, self.prices_at(state), state)

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        survival, following = entry_probs(self.estimator, step, state["survival"])
        go_on = self.prices_at(state).pay(following, self.posterior(state), state["tokens"] / state["cost"], step.depth)
        return {**state, "survival": survival}, go_on

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        drafted, prices = proposal.num_calls > 0, self.prices_at(state)
        behind = torch.where(drafted, prices.catching_up(state["unread"]), 0.0)
        verified = torch.where(drafted, torch.minimum(verdict.length + 1, proposal.num_drafted), 0)
        return {
            "gain": torch.zeros_like(state["gain"]),
            "tokens": state["tokens"] + verdict.length + 1,
            "cost": state["cost"]
            + 1
            + prices.read(proposal.num_drafted)
            + (proposal.num_calls * prices.forward + behind),
            "survival": torch.ones_like(state["survival"]),
            "verified": state["verified"] + verified,
            "accepted": state["accepted"] + torch.where(drafted, verdict.length, 0),
            "unread": torch.where(drafted, 0.0, state["unread"] + verdict.length + 1),
        }

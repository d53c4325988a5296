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
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.config.notes import AtLeast, Between, File
from toolkit.config.values import check_ranges
from toolkit.costs.table import CostTable
from toolkit.stopping.base import CopyEstimator, DrawnEstimator, State, StoppingPolicy, entry_probs
from toolkit.stopping.lookup_rate import LookupRate
from toolkit.stopping.prices import Column, Prices, PriceTable, Ratio, table_of
from toolkit.types import Drafted, Match, Step, Verified

FURTHEST = 64  # tokens that a draft has not read, at most, in its cost


@dataclass(frozen=True)
class BestSource(StoppingPolicy):
    """Choose the source of every row's round by what it is worth at the text's rate, and draft as long as it pays.

    estimator    gives `drawn_probs(step)` of the draft model's tokens
    copies       gives P(copied token accepted) from its match
    costs        a table by batch size, a JSON or CSV file (`toolkit.costs.load`); null: `cost_ratio` and `column_cost`
    cost_ratio   c, draft forward pass / target forward pass
    column_cost  what one more token per row adds to a target forward pass, as a share of it
    batch_size   rows that are decoded together: the table is read at this size
    acceptance   probability that a token of the draft model is accepted, before any round
    evidence     drafted tokens that `acceptance` counts for
    initial_rate  lambda of a text that begins
    memory       target forward passes that `initial_rate` counts for
    deepest, lookup  the deepest round, and the rule for copies with the prices: set by `within` and `bind`
    """

    reads_states: ClassVar[bool] = True
    reads_matches: ClassVar[bool] = True
    plans_copies: ClassVar[bool] = True
    estimator: DrawnEstimator
    copies: CopyEstimator
    costs: Annotated[str | CostTable | None, File()] = None
    cost_ratio: Ratio = None
    column_cost: Column = None
    batch_size: Annotated[int, AtLeast(1)] = 1
    acceptance: Annotated[float, Between(0, 1, "()")] = 0.75
    evidence: Annotated[float, Between(0, 1e6, "(]")] = 5.0
    initial_rate: Annotated[float, Between(0, 1e6, "(]")] = 1.2
    memory: Annotated[float, Between(0, 1e6, "(]")] = 20.0
    deepest: int = 20
    lookup: LookupRate | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    def within(self, max_drafted: int) -> BestSource:
        return replace(self, deepest=max_drafted)

    def bind(self, pair: object) -> BestSource:
        table = table_of(self.costs, self.cost_ratio, self.column_cost, [self.batch_size], self.deepest + 1)
        lookup = LookupRate(
            self.copies, self.costs, self.column_cost, self.batch_size, self.initial_rate, self.memory, self.deepest
        )
        prices = PriceTable.of(table, self.batch_size, self.deepest, self.costs is None, FURTHEST)
        return replace(self, estimator=self.estimator.bind(pair), lookup=replace(lookup.bind(pair), prices=prices))

    @property
    def reads_context(self) -> bool:  # type: ignore[override]
        return self.lookup is not None and self.lookup.reads_context

    def _prices(self, state: State) -> Prices:
        return self._copying.prices_at(state)

    def _acceptance(self, state: State) -> Tensor:
        """The posterior mean of the acceptance of the draft model's tokens [B]."""
        return (state["accepted"] + self.evidence * self.acceptance) / (state["verified"] + self.evidence)

    @property
    def _copying(self) -> LookupRate:
        assert self.lookup is not None, "bind the policy to a pair first"
        return self.lookup

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state of `lookup_rate`, and of the draft model: its tokens that were verified, the accepted ones, and `unread`.

        unread  tokens of the text since the row last drafted with it
        """
        state = self._copying.init(num_rows, device)
        counts = {name: torch.zeros_like(state["cost"]) for name in ("verified", "accepted", "unread")}
        return {**state, **counts, "survival": torch.ones_like(state["cost"])}

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        """The new state, and whether the draft model drafts [B]; where it does not, what was copied is sent."""
        rate, prices = state["tokens"] / state["cost"], self._prices(state)
        worth = prices.worth(self._acceptance(state), rate) - rate * prices.catching_up(state["unread"])
        return {**state, "survival": torch.ones_like(worth)}, live & (worth > state["gain"].clamp(min=0))

    def plan(self, match: Match, available: Tensor, state: State) -> tuple[State, Tensor]:
        return self._copying.plan(match, available, state)

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        survival, following = entry_probs(self.estimator, step, state["survival"])
        go_on = self._prices(state).pay(following, self._acceptance(state), state["tokens"] / state["cost"], step.depth)
        return {**state, "survival": survival}, go_on

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        drafted, prices = proposal.num_calls > 0, self._prices(state)
        behind = torch.where(drafted, prices.catching_up(state["unread"]), 0.0)
        spent = proposal.num_calls * prices.forward + behind
        verified = torch.where(drafted, torch.minimum(verdict.length + 1, proposal.num_drafted), 0)
        after = self._copying.observe(proposal, verdict, state)
        return {
            **after,
            "cost": after["cost"] + spent,
            "survival": torch.ones_like(state["survival"]),
            "verified": state["verified"] + verified,
            "accepted": state["accepted"] + torch.where(drafted, verdict.length, 0),
            "unread": torch.where(drafted, 0.0, state["unread"] + verdict.length + 1),
        }

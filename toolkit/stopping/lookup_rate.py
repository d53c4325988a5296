"""Lookup rate: the rate rule for copied tokens, which cost no draft forward pass but a column of the target's. No threshold.

The rule is ours, from renewal-reward theory as `rate` is. A copied token costs what one more token adds to the target's
forward pass. C(k) is the cost of a target forward pass over k drafted tokens and one more, for a batch of the configured
size, and lambda the rate that the text has reached, in tokens per unit of cost. All copied tokens are known at once. So many
of them are sent as have the largest sum of gains, none if no sum is above 0:

    max over d of  sum over k = 1..d of  P(all up to k are accepted) - lambda * (C(k) - C(k - 1))

Where columns cost the same, this is to go on while a token's gain is above 0. The tokens are known before they
are decided on, and they were not drawn. So leaving some out changes no distribution, unlike withholding a token that was drawn.
The unit of cost is a target forward pass over one token per row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.config.notes import AtLeast, Between, File
from toolkit.config.values import check_ranges
from toolkit.costs.table import CostTable
from toolkit.engine.device import floats_on
from toolkit.sampling import first_maximum
from toolkit.stopping.base import CopyEstimator, State, StoppingPolicy
from toolkit.stopping.prices import Column, Prices, PriceTable, table_of
from toolkit.types import Drafted, Match, Verified


@dataclass(frozen=True)
class LookupRate(StoppingPolicy):
    """Copy as many tokens as gain most: their probabilities to enter the text, less what they cost at the text's rate.

    estimator    gives P(copied token accepted) from its match
    costs        a table by batch size, a JSON or CSV file (`toolkit.costs.load`); null: `column_cost` for every column
    column_cost  what one more token per row adds to a target forward pass, as a share of it
    batch_size   rows that are decoded together: the table's column costs at this size
    initial_rate  lambda of a text that begins
    memory       target forward passes that `initial_rate` counts for
    deepest, prices  the deepest round, and what its columns cost: set by `within` and `bind`
    """

    needs_draft_model: ClassVar[bool] = False
    reads_matches: ClassVar[bool] = True
    plans_copies: ClassVar[bool] = True
    estimator: CopyEstimator
    costs: Annotated[str | CostTable | None, File()] = None
    column_cost: Column = None
    batch_size: Annotated[int, AtLeast(1)] = 1
    initial_rate: Annotated[float, Between(0, 1e6, "(]")] = 1.2
    memory: Annotated[float, Between(0, 1e6, "(]")] = 20.0
    deepest: int = 20
    prices: PriceTable | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    def within(self, max_drafted: int) -> LookupRate:
        return replace(self, deepest=max_drafted)

    def bind(self, pair: object) -> LookupRate:
        table = table_of(self.costs, 0.0, self.column_cost, [self.batch_size], self.deepest + 1)
        prices = PriceTable.of(table, self.batch_size, self.deepest, self.costs is None)
        return replace(self, estimator=self.estimator.bind(pair), prices=prices)

    @property
    def reads_context(self) -> bool:  # type: ignore[override]
        return self.prices is not None and self.prices.by_context

    def prices_at(self, state: State) -> Prices:
        """The prices of rows at their contexts."""
        assert self.prices is not None, "bind the policy to a pair first"
        return self.prices.at(state.get("context"), state["gain"].device)

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state: tokens and cost of the text's rounds so far, and the round's gain.

        gain  tokens that the copy is expected to add to the text, less what they cost at the text's rate
        """
        ones = torch.ones(num_rows, dtype=torch.float32, device=device)
        tokens, cost = self.initial_rate * self.memory * ones, self.memory * ones
        return {"gain": torch.zeros_like(ones), "tokens": tokens, "cost": cost}

    def plan(self, match: Match, available: Tensor, state: State) -> tuple[State, Tensor]:
        count = min(match.length.shape[1], self.deepest)
        depths = floats_on(available.device, [float(depth) for depth in range(1, count + 1)])
        columns = (match.length, match.occurrences, match.agreement)
        probs = self.estimator.prob(Match(*(column[:, :count] for column in columns)), depths)
        survival, rate = torch.ones_like(state["gain"]), state["tokens"] / state["cost"]
        gains = []
        for prob, column in zip(probs.unbind(1), self.prices_at(state).columns.unbind(1), strict=False):
            survival = survival * prob
            gains.append((survival - rate * column).double())
        sums = torch.stack([torch.zeros_like(rate).double(), *gains], 1).cumsum(1)
        possible = torch.cat([torch.zeros_like(depths[:1]), depths]) <= available.unsqueeze(1)
        sums = torch.where(possible, sums, -torch.inf)
        return {**state, "gain": sums.amax(1).float()}, first_maximum(sums)

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        return {
            "gain": torch.zeros_like(state["gain"]),
            "tokens": state["tokens"] + verdict.length + 1,
            "cost": state["cost"] + 1 + self.prices_at(state).read(proposal.num_drafted),
        }

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
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.engine.device import floats_on
from toolkit.sampling import first_maximum
from toolkit.stopping.base import CopyEstimator, State
from toolkit.stopping.priced import Priced
from toolkit.stopping.prices import Column, Prices, PriceTable, table_of
from toolkit.types import Drafted, Match, Verified


@dataclass(frozen=True)
class LookupRate(Priced):
    """Copy as many tokens as gain most: their probabilities to enter the text, less what they cost at the text's rate.

    estimator    gives P(copied token accepted) from its match
    column_cost  what one more token per row adds to a target forward pass, as a share of it; None: what is measured, else .05

    The rest is `Priced`'s. Without `costs` every column has the same cost.
    """

    name = "lookup_rate"
    needs_draft_model: ClassVar[bool] = False
    reads_matches: ClassVar[bool] = True
    plans_copies: ClassVar[bool] = True
    estimator: CopyEstimator
    column_cost: Column = None

    def bind(self, pair: object) -> LookupRate:
        table = table_of(self.costs, 0.0, self.column_cost, [self.batch_size], self.deepest + 1)
        prices = PriceTable.of(table.copying, self.batch_size, self.deepest, self.costs is None)
        return replace(self, estimator=self.estimator.bind(pair), prices=prices)

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state of `Priced`, and the round's gain.

        gain  tokens that the copy is expected to add to the text, less what they cost at the text's rate
        """
        state = super().init(num_rows, device)
        return {**state, "gain": torch.zeros_like(state["cost"])}

    def plan(self, match: Match, available: Tensor, live: Tensor, state: State) -> tuple[State, Tensor]:
        return best_length(self.estimator, match, available, self.prices_at(state), state)

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        return {
            "gain": torch.zeros_like(state["gain"]),
            "tokens": state["tokens"] + verdict.length + 1,
            "cost": state["cost"] + 1 + self.prices_at(state).read(proposal.num_drafted),
        }


def copied_entries(copies: CopyEstimator, match: Match, available: Tensor, deepest: int) -> Tensor:
    """P(all copied tokens up to k are accepted) [B, K], 0 beyond the `available` ones; K: the longest copy, or `deepest`."""
    count = min(match.length.shape[1], deepest)
    depths = _counted(count, available)
    columns = (match.length, match.occurrences, match.agreement)
    probs = copies.prob(Match(*(column[:, :count] for column in columns)), depths)
    return torch.where(depths <= available.unsqueeze(1), probs.cumprod(1), 0.0)


def best_length(
    copies: CopyEstimator, match: Match, available: Tensor, prices: Prices, state: State
) -> tuple[State, Tensor]:
    """The state with the round's gain, and how many of the `available` copied tokens have the largest sum of gains [B]."""
    entries = copied_entries(copies, match, available, prices.columns.shape[1])
    rate, count = state["tokens"] / state["cost"], entries.shape[1]
    gains = (entries - rate.unsqueeze(1) * prices.columns[:, :count]).double()
    sums = pad(gains.cumsum(1), (1, 0))
    sums[:, 1:] = torch.where(_counted(count, available) <= available.unsqueeze(1), sums[:, 1:], -torch.inf)
    return {**state, "gain": sums.amax(1).float()}, first_maximum(sums)


def _counted(count: int, like: Tensor) -> Tensor:
    """1 .. count, as floats."""
    return floats_on(like.device, [float(depth) for depth in range(1, count + 1)])

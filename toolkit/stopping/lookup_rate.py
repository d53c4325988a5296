"""Lookup rate: the rate rule for copied tokens, which cost no draft forward pass but a column of the target's. No threshold.

The rule is ours, from renewal-reward theory as `rate` is. C(k) is the cost of a target forward pass over k drafted tokens and
one more, and lambda the rate that the text has reached. So many copied tokens are sent as have the largest sum of gains, none
if no sum is above 0:

    max over d of  sum over k = 1..d of  P(all up to k are accepted) - lambda * (C(k) - C(k - 1))

Where columns cost the same, this is to go on while a token's gain is above 0. The tokens are all known before they are decided
on, and were not drawn. So leaving some out changes no distribution, unlike withholding a token that was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.sampling import first_maximum
from toolkit.stopping.base import CopyEstimator, State
from toolkit.stopping.planner import Priced, copied, depths, net
from toolkit.stopping.prices import Column
from toolkit.types import Match


@dataclass(frozen=True)
class LookupRate(Priced):
    """Copy as many tokens as gain most: their probabilities to enter the text, less what they cost at the text's rate.

    estimator    gives P(copied token accepted) from its match
    column_cost  what one more token per row adds to a target forward pass, as a share of it; None: what is measured, else .05

    The rest is `Priced`'s. Without `costs` every column has the same cost. In the state, `gain` is the largest sum of gains.
    """

    name = "lookup_rate"
    needs_draft_model: ClassVar[bool] = False
    reads_matches: ClassVar[bool] = True
    plans_copies: ClassVar[bool] = True
    round_values: ClassVar = {"gain": 0.0}
    estimator: CopyEstimator
    column_cost: Column = None

    def bind(self, pair: object) -> LookupRate:
        return self.bound(pair, self.read_table(0.0, self.column_cost).copying)

    def plan(self, match: Match, available: Tensor, live: Tensor, state: State) -> tuple[State, Tensor]:
        return best_length(self, self.estimator, match, available, state)


def best_length(
    rule: Priced, copies: CopyEstimator, match: Match, available: Tensor, state: State
) -> tuple[State, Tensor]:
    """The state with the round's gain, and how many of the `available` copied tokens have the largest sum of gains [B]."""
    entries, columns = copied(copies, match, available, rule.deepest), rule.prices_at(state).columns
    sums = net(entries, columns[:, : entries.shape[1]], rule.reached(state))
    is_available = depths(entries.shape[1], available.device) <= available.unsqueeze(1)
    sums = pad(torch.where(is_available, sums, -torch.inf), (1, 0))
    return {**state, "gain": sums.amax(1).float()}, first_maximum(sums)

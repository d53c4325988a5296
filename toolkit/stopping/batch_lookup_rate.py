"""Batch lookup rate: copied tokens for a batch whose rows are verified side by side. It has no threshold.

The rule is ours, `lookup_rate` as `batch_rate` is `rate`. In a batch every row's forward pass is as wide as the widest row's.
A copy of one row costs all of them its columns, and what the others put into these costs nothing more. So the rows choose
one width together. C(w) is what a target forward pass over w drafted tokens per row costs beyond one over none, and the live
rows reach lambda tokens per unit of cost together. The width is

    argmax over w of  sum over live rows and their copied tokens k <= w of  P(all up to k are accepted)  -  lambda * C(w)

and every row sends as many of its copied tokens as fit. All of them are known before any is decided on, and none was drawn.
So a row's text follows the target's distribution, though which text it gets depends on its neighbours (`couples_rows`). C is
read at the longest live row's context. The unit of cost is a target forward pass over one token per row.

Shapes: B rows, D deepest round, K tokens of the longest copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.sampling import first_maximum
from toolkit.stopping.base import State
from toolkit.stopping.lookup_rate import LookupRate, copied_entries
from toolkit.stopping.prices import Prices
from toolkit.types import Drafted, Match, Verified


@dataclass(frozen=True)
class BatchLookupRate(LookupRate):
    """Copy as far as the tokens that all rows gain exceed what the width costs the batch. Its settings are `LookupRate`'s.

    In its state `gain` is the sum of probabilities of the copied tokens that a row sends.
    """

    name = "batch_lookup_rate"
    couples_rows: ClassVar[bool] = True

    def plan(self, match: Match, available: Tensor, live: Tensor, state: State) -> tuple[State, Tensor]:
        state = with_longest(state, live)
        columns = self.prices_at(state).columns[0]
        entries = copied_entries(self.estimator, match, available, len(columns))
        depths = torch.arange(entries.shape[1], device=available.device)
        gains = entries.nan_to_num(0.0).sum(0) - together(state, live) * columns[: len(depths)]  # NaN: a broken row
        sums = torch.where(depths < available.amax(), gains.double().cumsum(0), -torch.inf)
        lengths = torch.minimum(available, first_maximum(pad(sums, (1, 0))))
        sent = depths < lengths.unsqueeze(1)
        return {**state, "gain": torch.where(sent, entries, 0.0).sum(1)}, lengths

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        return {
            **state,
            "gain": torch.zeros_like(state["gain"]),
            "tokens": state["tokens"] + verdict.length + 1,
            "cost": state["cost"] + 1 + widest(self.prices_at(state), proposal),
        }


def with_longest(state: State, live: Tensor) -> State:
    """The state with the longest live row's context in every row, where it has contexts."""
    if "context" not in state:
        return state
    return {**state, "context": torch.where(live, state["context"], 0.0).amax().expand(len(live))}


def together(state: State, live: Tensor) -> Tensor:
    """lambda: tokens that the live rows reach together per unit of cost, []; 0 without one."""
    weight = live.to(state["cost"].dtype)
    return weight.sum() * torch.dot(weight, state["tokens"]) / torch.dot(weight, state["cost"]).clamp(min=1e-9)


def widest(prices: Prices, proposal: Drafted) -> Tensor:
    """The price of the columns of the row that sends most [B], which every row pays."""
    return prices.read(proposal.num_drafted.amax().expand_as(proposal.num_drafted))

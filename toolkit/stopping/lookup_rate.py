"""Lookup rate: the rate rule for copied tokens, which cost no draft forward pass but a column of the target's. No threshold.

The rule is ours, from renewal-reward theory as `rate` is. A copied token costs what one more token adds to the target's
forward pass. C(k) is the cost of a target forward pass over k drafted tokens and one more, for a batch of the configured
size, and lambda the rate that the text has reached, in tokens per unit of cost. Token k + 1 is sent iff

    P(all before it are accepted) * P(it is)  >  lambda * (C(k + 1) - C(k))

The token is known before it is decided on, and it was not drawn. So leaving it out changes no distribution, unlike
withholding a token that was drawn. The unit of cost is a target forward pass over one token per row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.config.notes import AtLeast, Between, File
from toolkit.config.values import check_ranges
from toolkit.costs.load import table_of
from toolkit.costs.table import CostTable
from toolkit.engine.device import floats_on
from toolkit.stopping.base import CopyEstimator, State, StoppingPolicy
from toolkit.types import Drafted, Judged, Step


@dataclass(frozen=True)
class LookupRate(StoppingPolicy):
    """Copy on while a token's probability to enter the text exceeds what it costs at the text's rate.

    estimator    gives P(copied token accepted) from its match
    costs        a table by batch size, a JSON or CSV file (`toolkit.costs.load`); null: `column_cost` for every column
    column_cost  what one more token per row adds to a target forward pass, as a share of it
    batch_size   rows that are decoded together: the table's column costs at this size
    initial_rate  lambda of a text that begins
    memory       target forward passes that `initial_rate` counts for
    deepest, extra  the deepest round, and what its columns cost: set by `within` and `bind`
    """

    reads: ClassVar[bool] = True
    needs_draft_model: ClassVar[bool] = False
    reads_matches: ClassVar[bool] = True
    estimator: CopyEstimator
    costs: Annotated[str | CostTable | None, File()] = None
    column_cost: Annotated[float, AtLeast(0)] = 0.05
    batch_size: Annotated[int, AtLeast(1)] = 1
    initial_rate: Annotated[float, Between(0, 1e6, "(]")] = 1.2
    memory: Annotated[float, Between(0, 1e6, "(]")] = 20.0
    deepest: int = 20
    extra: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    def within(self, max_drafted: int) -> LookupRate:
        return replace(self, deepest=max_drafted)

    def bind(self, pair: object) -> LookupRate:
        table = table_of(self.costs, 0.0, self.column_cost, [self.batch_size], self.deepest + 1)
        seconds = [table.target(self.batch_size, width, table.middle) for width in range(1, self.deepest + 2)]
        extra = [(wider - narrower) / seconds[0] for narrower, wider in pairwise(seconds)]
        return replace(self, estimator=self.estimator.bind(pair), extra=tuple(extra))

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state: tokens and cost of the text's rounds so far, and the round's survival and gain.

        gain  tokens that the copy is expected to add to the text, less what they cost at the text's rate
        """
        ones = torch.ones(num_rows, dtype=torch.float32, device=device)
        tokens, cost = self.initial_rate * self.memory * ones, self.memory * ones
        return {"survival": ones, "gain": torch.zeros_like(ones), "tokens": tokens, "cost": cost}

    def read(self, step: Step, state: State) -> tuple[State, Tensor]:
        assert step.match is not None, "only copied tokens have a match"
        survival = state["survival"] * self.estimator.prob(step.match, step.depth)
        price = state["tokens"] / state["cost"] * self.extra[step.depth - 1]
        go_on = survival > price
        gain = state["gain"] + torch.where(go_on, survival - price, 0.0)
        return {**state, "survival": survival, "gain": gain}, go_on

    def observe(self, proposal: Drafted, verdict: Judged, state: State) -> State:
        spent = floats_on(verdict.length.device, [0.0, *self.extra]).cumsum(0)
        return {
            "survival": torch.ones_like(state["survival"]),
            "gain": torch.zeros_like(state["gain"]),
            "tokens": state["tokens"] + verdict.length + 1,
            "cost": state["cost"] + 1 + spent[proposal.num_drafted.clamp(max=self.deepest)],
        }

"""What rules share that weigh a text's tokens against their costs: settings, prices at a row's context, the counts so far.

lambda is the rate that a text has reached, in tokens per unit of cost: its `tokens` over its `cost`, both in the state. It
begins at `initial_rate`, which counts for `memory` target forward passes. The unit of cost is a target forward pass over one
token per row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Self

import torch
from torch import Tensor

from toolkit.config.notes import AtLeast, Between, File, Internal
from toolkit.config.values import check_ranges
from toolkit.costs.table import CostTable
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.stopping.prices import Prices, PriceTable


@dataclass(frozen=True, kw_only=True)
class Priced(StoppingPolicy):
    """A rule that weighs costs.

    costs        a cost table, a JSON or CSV file of `analysis.timing`; None: the rule's own figures, or what is measured
    batch_size   rows that are decoded together: the table is read at this size
    initial_rate  lambda of a text that begins
    memory       target forward passes that `initial_rate` counts for
    deepest, prices  the deepest round, and what its tokens cost: set by `within` and `bind`
    """

    costs: Annotated[str | CostTable | None, File()] = None
    batch_size: Annotated[int, AtLeast(1)] = 1
    initial_rate: Annotated[float, Between(0, 1e6, "(]")] = 1.2
    memory: Annotated[float, Between(0, 1e6, "(]")] = 20.0
    deepest: Annotated[int, Internal()] = 20
    prices: Annotated[PriceTable | None, Internal()] = None

    def __post_init__(self) -> None:
        check_ranges(self, "policy.")

    @property
    def reads_context(self) -> bool:  # type: ignore[override]
        return self.prices is not None and self.prices.by_context

    def within(self, max_drafted: int) -> Self:
        return replace(self, deepest=max_drafted)

    def prices_at(self, state: State) -> Prices:
        """The prices of rows at their contexts."""
        assert self.prices is not None, "bind the policy to a pair first"
        return self.prices.at(state.get("context"), next(iter(state.values())).device)

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state: tokens and cost of the text so far."""
        ones = torch.ones(num_rows, dtype=torch.float32, device=device)
        return {"tokens": self.initial_rate * self.memory * ones, "cost": self.memory * ones}


@dataclass(frozen=True, kw_only=True)
class PricedDraft(Priced):
    """A rule that weighs the tokens of a draft model: what `Priced` has, and the acceptance of the text's drafted tokens.

    acceptance   probability that a drafted token is accepted, before any round
    evidence     drafted tokens that `acceptance` counts for
    """

    acceptance: Annotated[float, Between(0, 1, "()")] = 0.75
    evidence: Annotated[float, Between(0, 1e6, "(]")] = 5.0

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state of `Priced`; drafted tokens of the text that were verified, and the accepted ones; the round's survival.

        survival  that what was drawn so far enters the text
        """
        state = super().init(num_rows, device)
        counts = {name: torch.zeros_like(state["cost"]) for name in ("verified", "accepted")}
        return {**state, **counts, "survival": torch.ones_like(state["cost"])}

    def posterior(self, state: State) -> Tensor:
        """The mean acceptance of the text's drafted tokens [B]: of a Beta distribution, after `acceptance` and `evidence`."""
        return (state["accepted"] + self.evidence * self.acceptance) / (state["verified"] + self.evidence)

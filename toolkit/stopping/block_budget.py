"""Block budget: the positions of all rows' blocks are ranked, and the best ones are sent: as many as the round's budget.

The budget is ours, from renewal-reward theory as in `block_draft_rate`; it has no threshold. Engines lay a batch's tokens side
by side, so a target forward pass costs what its tokens cost, whosever they are. vLLM and DSpark's engines (arXiv:2607.05147)
rank positions by the probability that all of a row's tokens up to them are accepted. With C(w) what w drafted tokens per row
cost and v_1 >= v_2 >= .. the probabilities of all positions of B live rows, a round has a block iff

    max over n of  (v_1 + .. + v_n) / B - lambda * C(n / B)  >  lambda * c_block

and the n of the maximum is the budget. Which v? Those of the round itself depend on its tokens: x_k decides v of position
k + 1, this the budget, and the budget whether x_k is sent. Such a text no longer follows p. So v is each row's mean by depth
over its earlier rounds, and the budget is known before anything is drawn. The round's own probabilities decide who gets it.
That is safe: they fall with the depth, so a row's position k is among the best n or not whatever is drawn at k or later. The
tokens that are left out are those that would never have been drawn, one position after another, best first.

Deviation: theirs takes the budget from probabilities of some steps before; here it is the mean of all earlier rounds. In this
package's own forward passes every row is as wide as the widest, which `batch_rate` weighs; `analysis.advise drops=flattened`
says what either is worth where tokens lie side by side.

Shapes: B rows, D deepest round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from toolkit.stopping.base import State
from toolkit.stopping.block_draft_rate import BlockDraftRate
from toolkit.types import Drafted, Step, Verified


@dataclass(frozen=True)
class BlockBudget(BlockDraftRate):
    """Rank the positions of all rows' blocks, and send as many as were worth their columns in earlier rounds.

    Its settings are those of `BlockDraftRate`; `evidence` is also the rounds that `acceptance` counts for. In the state are the
    round's `budget`, in every row, and by depth its probabilities to enter the text, `entries`, and `before`, their sums over
    earlier rounds, `blocks` of them.
    """

    name = "block_budget"
    couples_rows: ClassVar[bool] = True
    counts = (*BlockDraftRate.counts, "budget", "blocks", "before")
    round_values: ClassVar = {**BlockDraftRate.round_values, "entries": 0.0}
    by_depth = ("before", "entries")

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        if not len(live):
            return state, live
        powers = self.acceptance ** torch.arange(1, self.deepest + 1, device=live.device)
        means = (state["before"] + self.evidence * powers) / (state["blocks"] + self.evidence).unsqueeze(1)
        possible = torch.where(live.unsqueeze(1), means, -torch.inf)
        ranked, rows = possible.flatten().sort(descending=True).values, live.sum().clamp(min=1)
        if "context" in state:
            mean = torch.where(live, state["context"], 0.0).sum() / rows
            state = {**state, "context": mean.expand(len(live))}
        rate = torch.where(live, state["tokens"] / state["cost"], 0.0).sum() / rows
        numbers = torch.arange(1, len(ranked) + 1, device=live.device)
        net, best = (ranked.cumsum(0) / rows - rate * self._read(numbers / rows, state)).max(0)
        drafts = net > rate * self.prices_at(state).forward.mean()
        budget = (best + 1).to(state["budget"].dtype).expand_as(state["budget"])
        return {**state, "budget": budget}, live & drafts

    def read(self, step: Step, state: State) -> tuple[State, Tensor]:
        entering, entries = self.entering(step, state), state["entries"].clone()
        last = entries[:, step.depth - 2] if step.depth > 1 else torch.ones_like(entering)
        entries[:, step.depth - 1] = torch.minimum(entering, last)  # a later position never precedes an earlier one
        return {**state, "entering": entering, "entries": entries}, torch.ones_like(entering, dtype=torch.bool)

    def sent(self, num_drafted: Tensor, state: State) -> Tensor:
        depths = torch.arange(1, self.deepest + 1, device=num_drafted.device)
        possible = depths <= num_drafted.unsqueeze(1)
        entries = torch.where(possible, state["entries"].nan_to_num(0.0), -1.0)
        order = entries.T.flatten().argsort(descending=True, stable=True)  # equal ones: the shallower first
        within = torch.arange(len(order), device=order.device) < state["budget"][0]
        chosen = torch.zeros_like(within).index_copy(0, order, within)
        return (chosen.view(self.deepest, len(num_drafted)).T & possible).sum(1)

    def counted(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        blocks = {"before": state["entries"], "blocks": proposal.num_calls > 0}
        return {**super().counted(proposal, verdict, state), **blocks}

    def spent(self, proposal: Drafted, state: State) -> Tensor:
        drafted = proposal.num_calls > 0
        width = proposal.num_drafted.sum() / drafted.sum().clamp(min=1)
        return 1 + proposal.num_calls * self.prices_at(state).forward.mean() + drafted * self._read(width[None], state)

    def _read(self, widths: Tensor, state: State) -> Tensor:
        """C of so many drafted tokens per row [n], linear between whole ones, at the live rows' mean context."""
        read = torch.nn.functional.pad(self.prices_at(state).columns.mean(0).cumsum(0), (1, 0))
        low = widths.long().clamp(max=len(read) - 2)
        return read[low] + (widths - low) * (read[low + 1] - read[low])

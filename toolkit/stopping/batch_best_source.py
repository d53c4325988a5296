"""Batch best source: copies, the draft model or neither, chosen for a batch whose rows are verified side by side.

The rule is ours, `best_source` as `batch_rate` is `rate`. It has no threshold. In a batch, a draft forward pass and a column of
the target's cost the same whether one row wants them or all. So the live rows choose two numbers together: the target's
width w, and the depth d <= w to which the draft model drafts. With G_r(w) what copies of at most w tokens add to row r's text,
by their probabilities, a_r the acceptance of the draft's tokens in that text so far, C(w) what the target's width costs, and c
a draft forward pass, these are

    argmax over w, d of  sum over live rows r of max(G_r(w), a_r + .. + a_r^d)  -  lambda * (C(w) + d c + [d > 0] * catching up)

A row drafts where d > 0 and its right term is the larger one; the others send what they copied, as far as it fits. Drafted
tokens go on while, for some number of further ones, what all drafting rows expect exceeds its price: the next token by its own
probability, those after it by a_r. Columns up to the width of the copies are paid. lambda is what the live rows' texts have
reached together, in tokens per unit of cost.

The choice reads the texts and the counts of earlier rounds, and nothing drawn is withheld: a row's text follows the target's
distribution, though which text it gets depends on its neighbours (`couples_rows`). Where one row drafts, the draft reads the
text of all, so that a row which copied beside it is at most one round behind. Costs are read at the longest live row's
context. They may fall with the width, so w is d, or no wider than the longest copy.

Shapes: B rows, D deepest round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.engine.device import floats_on
from toolkit.sampling import first_maximum
from toolkit.stopping.base import State, entry_probs
from toolkit.stopping.batch_lookup_rate import together, widest, with_longest
from toolkit.stopping.best_source import BestSource
from toolkit.stopping.lookup_rate import copied_entries
from toolkit.types import Drafted, Match, Step, Verified


@dataclass(frozen=True)
class BatchBestSource(BestSource):
    """Choose width, depth and sources that all rows together gain most by. Its settings are `BestSource`'s."""

    name = "batch_best_source"
    couples_rows: ClassVar[bool] = True

    def init(self, num_rows: int, device: torch.device) -> State:
        """The state of `BestSource`, what copies are expected to add by width, and the round's choice.

        entries  P(all copied tokens up to k are accepted) [B, D];  width, of copies, and rate [B], of the batch
        """
        state = super().init(num_rows, device)
        zeros = {name: torch.zeros_like(state["cost"]) for name in ("width", "rate")}
        return {**state, **zeros, "entries": torch.zeros(num_rows, self.deepest, device=device)}

    def plan(self, match: Match, available: Tensor, live: Tensor, state: State) -> tuple[State, Tensor]:
        entries = copied_entries(self.copies, match, available, self.deepest)
        state = {**state, "entries": pad(entries, (0, self.deepest - entries.shape[1]))}
        width, _ = self._choice(live, with_longest(state, live))
        return state, torch.minimum(available, width)

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        state = with_longest(state, live)
        width, drafts = self._choice(live, state)
        copied = torch.where(drafts.unsqueeze(1), 0.0, state["entries"]).gt(0).sum(1).amax().clamp(max=width)
        shared = {"rate": together(state, live), "width": copied.to(state["cost"].dtype)}
        shared = {name: value.expand(len(live)) for name, value in shared.items()}
        return {**state, **shared, "survival": torch.ones_like(state["survival"])}, drafts

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        assert step.live is not None, "the proposer says which rows are live"
        survival, following = entry_probs(self.estimator, step, state["survival"])
        prices, first = self.prices_at(state), min(step.depth, self.deepest - 1)
        later = self._depths(survival)[first:]
        price = prices.forward[0] + torch.where(later <= state["width"][0], 0.0, prices.columns[0, first:])
        ahead = (self.posterior(state).unsqueeze(1) ** (later - later[0])).cumsum(1)
        following = torch.where(step.live, following, 0.0).nan_to_num(0.0)  # a row that is broken adds nothing
        go_on = (following.to(ahead.dtype) @ ahead > state["rate"][0] * price.cumsum(0)).any()
        return {**state, "survival": survival}, go_on.expand_as(step.live)

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        prices, any_drafted = self.prices_at(state), (proposal.num_calls > 0).any()
        behind = torch.where(any_drafted, self._behind(state), 0.0)
        spent = 1 + widest(prices, proposal) + proposal.num_calls.amax() * prices.forward + behind
        alone = super().observe(proposal, verdict, state)
        read = torch.where(proposal.num_calls > 0, 0, verdict.length + 1).to(state["unread"].dtype)
        return {
            **state,
            **alone,
            "cost": state["cost"] + spent,
            "unread": torch.where(any_drafted, read, alone["unread"]),
            "entries": torch.zeros_like(state["entries"]),
        }

    def _choice(self, live: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """The width [], and which rows draft [B]."""
        prices, depths = self.prices_at(state), self._depths(state["cost"])
        entries = torch.where(live.unsqueeze(1), state["entries"], 0.0).nan_to_num(0.0)
        drafted = live.unsqueeze(1) * self.posterior(state).unsqueeze(1) ** depths
        copied, drafted = (pad(part.cumsum(1), (1, 0)) for part in (entries, drafted))  # [B, D + 1] each
        draft_price = pad(depths * prices.forward[0] + self._behind(state)[0], (1, 0))
        cost = pad(prices.columns[0].cumsum(0), (1, 0)).unsqueeze(1) + draft_price  # [w, d]
        gained = torch.maximum(copied.unsqueeze(2), drafted.unsqueeze(1)).sum(0)
        worth = (gained - together(state, live) * cost).double()
        numbers = pad(depths, (1, 0))
        widths = numbers.unsqueeze(1)
        possible = (widths == numbers) | ((widths > numbers) & (widths <= (entries > 0).any(0).sum()))
        best = first_maximum(torch.where(possible, worth, -torch.inf).flatten())
        width, depth = best // len(numbers), best % len(numbers)
        return width, live & (drafted[:, depth] > copied[:, width])

    def _behind(self, state: State) -> Tensor:
        """The price of what the draft has not read of the row that it is most behind [B]."""
        return self.prices_at(state).catching_up(state["unread"].amax().expand_as(state["unread"]))

    def _depths(self, like: Tensor) -> Tensor:
        """1 .. D, as floats."""
        return floats_on(like.device, [float(depth) for depth in range(1, self.deepest + 1)])

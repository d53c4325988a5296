"""Batch best source: copies, the draft model or neither, chosen for a batch whose rows are verified side by side.

The rule is ours, `best_source` as `batch_rate` is `rate`. It has no threshold. In a batch, a draft forward pass and a column of
the target's cost the same whether one row wants them or all. So the live rows choose two numbers together: the target's
width w, and the depth d <= w to which the draft model drafts. With G_r(w) what copies of at most w tokens add to row r's text,
by their probabilities, a_r the acceptance of the draft's tokens in that text so far, C(w) what the target's width costs, and c
a draft forward pass, these are

    argmax over w, d of  sum over live rows r of max(G_r(w), a_r + .. + a_r^d)  -  lambda * (C(w) + d c + [d > 0] * catching up)

A row drafts where d > 0 and its right term is the larger one; the others send what they copied, as far as it fits. Drafted
tokens go on as in `batch_rate`, those after the next one by a_r, and columns up to the width of the copies are paid.

Nothing drawn is withheld: a row's text follows the target's distribution, though which text it gets depends on its neighbours
(`couples_rows`). Where one row drafts, the draft reads the text of all, so that a row which copied beside it is at most one
round behind. Costs may fall with the width, so w is d, or no wider than the longest copy.

Shapes: B rows, D deepest round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.sampling import first_maximum
from toolkit.stopping.base import State
from toolkit.stopping.best_source import BestSource
from toolkit.stopping.planner import copied, depths, pays_together, together, with_longest
from toolkit.types import Drafted, Match, Step, Verified


@dataclass(frozen=True)
class BatchBestSource(BestSource):
    """Choose width, depth and sources that all rows together gain most by. Its settings are `BestSource`'s.

    In the state are `entries`, P(all copied tokens up to k are accepted), and the batch's `width` of copies and `rate`.
    """

    name = "batch_best_source"
    couples_rows: ClassVar[bool] = True
    counts = (*BestSource.counts, "width", "rate")
    round_values: ClassVar = {**BestSource.round_values, "entries": 0.0}
    by_depth = ("entries",)

    def plan(self, match: Match, available: Tensor, live: Tensor, state: State) -> tuple[State, Tensor]:
        entries = copied(self.copies, match, available, self.deepest)
        state = {**state, "entries": pad(entries, (0, self.deepest - entries.shape[1]))}
        width, _ = self._choice(live, with_longest(state, live))
        return state, torch.minimum(available, width)

    def begin(self, live: Tensor, state: State) -> tuple[State, Tensor]:
        state = with_longest(state, live)
        width, drafts = self._choice(live, state)
        copying = torch.where(drafts.unsqueeze(1), 0.0, state["entries"]).gt(0).sum(1).amax().clamp(max=width)
        shared = {"rate": together(state, live), "width": copying.to(state["cost"].dtype)}
        shared = {name: value.expand(len(live)) for name, value in shared.items()}
        return {**state, **shared}, drafts

    def step(self, step: Step, state: State) -> tuple[State, Tensor]:
        state, following = self.score(step, state)
        prices, is_paid = self.prices_at(state), depths(self.deepest, following.device) <= state["width"][0]
        tokens = prices.forward[0] + torch.where(is_paid, 0.0, prices.columns[0])
        return state, pays_together(following, self.posterior(state), tokens, state["rate"][0], step)

    def counted(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        """Where any row drafts, the draft reads the texts of all as they were before the round."""
        counts, drafted = super().counted(proposal, verdict, state), proposal.num_calls > 0
        read = torch.where(drafted, 0, verdict.length + 1) - state["unread"]
        return {**counts, "unread": torch.where(drafted.any(), read, counts["unread"])}

    def _choice(self, live: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """The width [], and which rows draft [B]."""
        prices, numbers = self.prices_at(state), depths(self.deepest, live.device)
        entries = torch.where(live.unsqueeze(1), state["entries"], 0.0).nan_to_num(0.0)
        drafted = live.unsqueeze(1) * self.posterior(state).unsqueeze(1) ** numbers
        copying, drafted = (pad(part.cumsum(1), (1, 0)) for part in (entries, drafted))  # [B, D + 1] each
        draft_price = pad(numbers * prices.forward[0] + self.catching_up(state)[0], (1, 0))
        cost = pad(prices.columns[0].cumsum(0), (1, 0)).unsqueeze(1) + draft_price  # [w, d]
        gained = torch.maximum(copying.unsqueeze(2), drafted.unsqueeze(1)).sum(0)
        worth = (gained - together(state, live) * cost).double()
        numbers = pad(numbers, (1, 0))
        widths = numbers.unsqueeze(1)
        possible = (widths == numbers) | ((widths > numbers) & (widths <= (entries > 0).any(0).sum()))
        best = first_maximum(torch.where(possible, worth, -torch.inf).flatten())
        width, depth = best // len(numbers), best % len(numbers)
        return width, live & (drafted[:, depth] > copying[:, width])

    def catching_up(self, state: State) -> Tensor:
        """The price of what the draft has not read of the row that it is most behind [B]."""
        return self.prices_at(state).catching_up(state["unread"].amax().expand_as(state["unread"]))

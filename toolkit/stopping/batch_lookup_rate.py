"""Batch lookup rate: copied tokens for a batch whose rows are verified side by side. It has no threshold.

The rule is ours, `lookup_rate` as `batch_rate` is `rate`. A copy of one row costs all of them its columns, and what the others
put into these costs nothing more. So the rows choose one width together. With C(w) what a target forward pass over w drafted
tokens per row costs beyond one over none, and lambda what the live rows reach together, it is

    argmax over w of  sum over live rows and their copied tokens k <= w of  P(all up to k are accepted)  -  lambda * C(w)

and every row sends as many of its copied tokens as fit. All of them are known before any is decided on, and none was drawn.
So a row's text follows the target's distribution, though which text it gets depends on its neighbours (`couples_rows`). C is
read at the longest live row's context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.sampling import first_maximum
from toolkit.stopping.base import State
from toolkit.stopping.lookup_rate import LookupRate
from toolkit.stopping.planner import copied, net, together, with_longest
from toolkit.types import Match


@dataclass(frozen=True)
class BatchLookupRate(LookupRate):
    """Copy as far as the tokens that all rows gain exceed what the width costs the batch. Its settings are `LookupRate`'s.

    In its state `gain` is the sum of probabilities of the copied tokens that a row sends.
    """

    name = "batch_lookup_rate"
    couples_rows: ClassVar[bool] = True

    def plan(self, match: Match, available: Tensor, live: Tensor, state: State) -> tuple[State, Tensor]:
        state = with_longest(state, live)
        entries, columns = copied(self.estimator, match, available, self.deepest), self.prices_at(state).columns[0]
        numbers = torch.arange(entries.shape[1], device=available.device)
        gains = entries.nan_to_num(0.0).sum(0)  # NaN: a broken row
        sums = net(gains, columns[: len(numbers)], together(state, live))
        sums = torch.where(numbers < available.amax(), sums, -torch.inf)
        lengths = torch.minimum(available, first_maximum(pad(sums, (1, 0))))
        sent = numbers < lengths.unsqueeze(1)
        return {**state, "gain": torch.where(sent, entries, 0.0).sum(1)}, lengths

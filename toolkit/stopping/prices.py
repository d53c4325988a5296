"""What drafted tokens cost beyond plain decoding, by a table that is used as it was measured, and when they pay.

A table may fall: five tokens may be cheaper to read than two. So a token that costs more than it brings may still lead to
others that pay for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from toolkit.costs.load import LoadCost
from toolkit.engine.device import floats_on


@dataclass(frozen=True)
class Prices:
    """Prices in target forward passes over one token per row.

    forward  of the draft, over one token per row
    columns  what the k-th drafted token adds to the target's forward pass
    flat     every token costs the same, so that none pays for an earlier one
    """

    forward: float
    columns: tuple[float, ...]
    flat: bool

    @classmethod
    def of(cls, table: LoadCost, batch_size: int, deepest: int, flat: bool) -> Prices:
        """The prices of a table at a batch size, for rounds of at most `deepest` tokens."""
        seconds = [table.target(batch_size, width, table.middle) for width in range(1, deepest + 2)]
        columns = [(wider - narrower) / seconds[0] for narrower, wider in pairwise(seconds)]
        return cls(table.draft(batch_size, 1, table.middle) / seconds[0], tuple(columns), flat)

    def read(self, num_drafted: Tensor) -> Tensor:
        """The price of a round's columns [B]: what the target reads beyond one token."""
        columns = floats_on(num_drafted.device, [0.0, *self.columns]).cumsum(0)
        return columns[num_drafted.clamp(max=len(self.columns))]

    def pay(self, probability: Tensor, acceptance: Tensor, rate: Tensor, depth: int) -> Tensor:
        """Whether some number of tokens after the first `depth` is worth more than its price at the text's rate [B] bool.

        probability  that the next one enters the text [B];  acceptance  that each later one does, if those before it do [B]
        rate         tokens per target forward pass [B]
        """
        first = min(depth, len(self.columns) - 1)
        columns = self.columns[first : first + 1 if self.flat else None]
        powers = floats_on(rate.device, [float(power) for power in range(len(columns))])
        prices = floats_on(rate.device, [self.forward + column for column in columns]).cumsum(0)
        gains = (probability.unsqueeze(1) * acceptance.unsqueeze(1) ** powers).cumsum(1)
        return (gains > rate.unsqueeze(1) * prices).any(1)

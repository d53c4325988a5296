"""What drafted tokens cost beyond plain decoding, by a table that is used as it was measured: five may cost less than two.

The unit is a target forward pass over one token, in a batch of the configured size, after as many others as the row has.

Shapes: B rows, D deepest round, X contexts of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from toolkit.config.notes import Assumed, AtLeast
from toolkit.costs.load import LoadCost
from toolkit.engine.device import copied_to, floats_on

# Figures of a rule that has no table. Null: the costs that are measured where the pair's are, else what is assumed here.
RATIO, COLUMN, BATCH_COLUMN = 0.2, 0.05, 0.0
HOST = torch.device("cpu")
Ratio = Annotated[float | None, AtLeast(0), Assumed(RATIO)]
Column = Annotated[float | None, AtLeast(0), Assumed(COLUMN)]
BatchColumn = Annotated[float | None, AtLeast(0), Assumed(BATCH_COLUMN)]


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices of rows of some context, in target forward passes over one token per row; of one row: they hold for all.

    forward  [B] or [1], of the draft, over one token per row
    columns  [B, D] or [1, D], what the k-th drafted token adds to the target's forward pass
    tokens   likewise, both together: the price of the k-th token of a draft model. Of a block the first one pays for all
    behind   [B, F + 1] or [1, F + 1], what the draft's first forward pass costs more for 0 .. F tokens that it has not read
    """

    forward: Tensor
    columns: Tensor
    tokens: Tensor
    behind: Tensor

    def read(self, num_drafted: Tensor) -> Tensor:
        """The price of a round's columns [B]: what the target reads beyond one token."""
        read = torch.nn.functional.pad(self.columns, (1, 0)).cumsum(1)
        return _at(read, num_drafted)

    def mean_column(self, num_drafted: Tensor, more: Tensor) -> Tensor:
        """The mean price of a round's next `more` columns [B, L], of those that the prices have, or of the last one."""
        read = torch.nn.functional.pad(self.columns, (1, 0)).cumsum(1).expand(len(num_drafted), -1)
        deepest = read.shape[1] - 1
        first = num_drafted.clamp(max=deepest - 1).unsqueeze(1)
        last = (first + more).clamp(max=deepest)
        return (read.gather(1, last) - read.gather(1, first)) / (last - first).clamp(min=1)

    def catching_up(self, unread: Tensor) -> Tensor:
        """The price of the tokens [B] that the draft has not read, in its first forward pass [B]."""
        return _at(self.behind, unread.long())


def _at(prices: Tensor, number: Tensor) -> Tensor:
    """The price of each row's number [B], of prices [B, n] or [1, n]; beyond the last one that of the last one."""
    return prices.expand(len(number), -1).gather(1, number.clamp(max=prices.shape[1] - 1).unsqueeze(1)).squeeze(1)


@dataclass(frozen=True, eq=False)
class PriceTable:
    """Prices of rounds by context, at one batch size, on one device.

    width   D + 1: a context's seconds [D + 1 + F + 1] are the target's over 1 .. D + 1 tokens, then the draft's over 1 .. F + 1
    middle  the prices at the middle of the contexts, for rows whose context is not known
    ramps   seconds as sums of ramps, as `toolkit.costs.table.interpolate` reads a table: where each begins [X], its length [X],
            its largest share [X], the seconds before all of them [D + F + 2], and what each adds [X, D + F + 2]
    """

    width: int
    blocks: bool
    middle: Prices
    ramps: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        table: LoadCost,
        batch_size: int,
        deepest: int,
        furthest: int = 0,
        blocks: bool = False,
        device: torch.device = HOST,
    ) -> PriceTable:
        """What a table says of rounds of at most `deepest` tokens, of a draft that is at most `furthest` tokens behind.

        blocks  a round's tokens come from one draft forward pass
        """

        def seconds(context: float) -> Tensor:
            target = [table.target(batch_size, width, context) for width in range(1, deepest + 2)]
            draft = [table.draft(batch_size, width, context) for width in range(1, furthest + 2)]
            return floats_on(HOST, [target + draft], torch.float64)

        rows, begins = torch.cat([*map(seconds, table.contexts)]), floats_on(HOST, table.contexts, torch.float64)
        gaps, steps = begins.diff(), rows.diff(dim=0)
        ramps = (
            begins,
            torch.cat([gaps, gaps[-1:]]),
            torch.cat([torch.ones_like(gaps), gaps.new_full((1,), torch.inf)]),
            rows[0],
            torch.cat([steps, steps[-1:].clamp(min=0)]),  # beyond the last context, unless it falls
        )
        middle = vars(_prices(seconds(table.middle), deepest + 1, blocks))
        middle = {name: copied_to(device, part) for name, part in middle.items()}
        return cls(deepest + 1, blocks, Prices(**middle), tuple(copied_to(device, part.float()) for part in ramps))

    def at(self, context: Tensor | None) -> Prices:
        """The prices of rows after this many tokens [B]; None: at the middle of the contexts."""
        begins, gaps, most, first, slopes = self.ramps
        if context is None or len(begins) == 1:
            return self.middle
        share = torch.minimum(((context.unsqueeze(1) - begins) / gaps).clamp(min=0), most)
        return _prices(first + (share.unsqueeze(2) * slopes).sum(1), self.width, self.blocks)


def _prices(seconds: Tensor, width: int, blocks: bool) -> Prices:
    """Prices from seconds [B, D + 1 + F + 1], the first D + 1 of which are the target's."""
    target, draft = seconds[:, :width], seconds[:, width:]
    reading, columns = draft / target[:, :1], target.diff(dim=1) / target[:, :1]
    forwards = reading[:, :1].expand(-1, columns.shape[1]).clone()
    if blocks:
        forwards[:, 1:] = 0
    tokens, behind = forwards + columns, reading - reading[:, :1]
    return Prices(reading[:, 0].float(), columns.float(), tokens.float(), behind.float())

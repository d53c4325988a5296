"""What drafted tokens cost beyond plain decoding, by a table that is used as it was measured, and when they pay.

A table may fall: five tokens may be cheaper to read than two. So a token that costs more than it brings may still lead to
others that pay for it. The unit is a target forward pass over one token, in a batch of the configured size, after as many
others as the row has.

Shapes: B rows, D deepest round, X contexts of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor

from toolkit.config.notes import Assumed, AtLeast
from toolkit.costs.load import LoadCost
from toolkit.costs.table import CostTable
from toolkit.engine.device import copied_to, floats_on
from toolkit.errors import warn

# Figures of a rule that has no table. Null: the costs that are measured where the pair's are, else what is assumed here.
RATIO, COLUMN, BATCH_COLUMN = 0.2, 0.05, 0.0
HOST = torch.device("cpu")
Ratio = Annotated[float | None, AtLeast(0), Assumed(RATIO)]
Column = Annotated[float | None, AtLeast(0), Assumed(COLUMN)]
BatchColumn = Annotated[float | None, AtLeast(0), Assumed(BATCH_COLUMN)]


def table_of(
    costs: str | CostTable | None, ratio: float | None, column: float | None, batches: Sequence[float], widest: float
) -> LoadCost:
    """The table of a policy's `costs`, of its figures if that is None. Warns of what rounds of these sizes ask beyond it."""
    if costs is None:
        return LoadCost.ratio(RATIO if ratio is None else ratio, COLUMN if column is None else column)
    if isinstance(costs, CostTable):
        return LoadCost.of([costs])
    table = LoadCost.load(costs)
    table.warn(costs, batches, widest)
    if table.fall is not None and "processor" not in table.about:  # medians of passes in turns are taken as measured
        warn(f"policy.costs={costs}: {table.fall}")
    return table


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices of rows of some context, in target forward passes over one token per row; of one row: they hold for all.

    forward  [B] or [1], of the draft, over one token per row
    columns  [B, D] or [1, D], what the k-th drafted token adds to the target's forward pass
    tokens   likewise, both together: the price of the k-th token of a draft model. Of a block the first one pays for all
    behind   [B, F + 1] or [1, F + 1], what the draft's first forward pass costs more for 0 .. F tokens that it has not read
    flat     every token costs the same, so that none pays for an earlier one
    """

    forward: Tensor
    columns: Tensor
    tokens: Tensor
    behind: Tensor
    flat: bool

    def read(self, num_drafted: Tensor) -> Tensor:
        """The price of a round's columns [B]: what the target reads beyond one token."""
        read = torch.nn.functional.pad(self.columns, (1, 0)).cumsum(1)
        return _at(read, num_drafted)

    def catching_up(self, unread: Tensor) -> Tensor:
        """The price of the tokens [B] that the draft has not read, in its first forward pass [B]."""
        return _at(self.behind, unread.long())

    def worth(self, acceptance: Tensor, rate: Tensor) -> Tensor:
        """What the best number of drafted tokens adds at a text's rate, less its price [B]; below 0 where none pays.

        acceptance  that each token is accepted, if those before it are [B];  rate  tokens per target forward pass [B]
        """
        depths = floats_on(rate.device, [float(depth) for depth in range(1, self.tokens.shape[1] + 1)])
        gains = (acceptance.unsqueeze(1) ** depths).cumsum(1)
        return (gains - rate.unsqueeze(1) * self.tokens.cumsum(1)).amax(1)

    def pay(self, probability: Tensor, acceptance: Tensor, rate: Tensor, depth: int) -> Tensor:
        """Whether some number of tokens after the first `depth` is worth more than its price at the text's rate [B] bool.

        probability  that the next one enters the text [B];  acceptance  that each later one does, if those before it do [B]
        rate         tokens per target forward pass [B]
        """
        first = min(depth, self.tokens.shape[1] - 1)
        tokens = self.tokens[:, first : first + 1 if self.flat else None]
        powers = floats_on(rate.device, [float(power) for power in range(tokens.shape[1])])
        gains = (probability.unsqueeze(1) * acceptance.unsqueeze(1) ** powers).cumsum(1)
        return (gains > rate.unsqueeze(1) * tokens.cumsum(1)).any(1)


def _at(prices: Tensor, number: Tensor) -> Tensor:
    """The price of each row's number [B], of prices [B, n] or [1, n]; beyond the last one that of the last one."""
    return prices.expand(len(number), -1).gather(1, number.clamp(max=prices.shape[1] - 1).unsqueeze(1)).squeeze(1)


@dataclass(frozen=True, eq=False)
class PriceTable:
    """Seconds of a round's forward passes by context, at one batch size.

    contexts   [X], ascending
    target     [X, D + 1], of the target over 1 .. D + 1 tokens
    draft      [X, F + 1], of the draft over 1 .. F + 1 tokens
    middle     the prices at the middle of the contexts, for rows whose context is not known
    by_context  whether they depend on the context
    """

    contexts: tuple[float, ...]
    target: Tensor
    draft: Tensor
    middle: Prices
    flat: bool
    blocks: bool = False
    _ramps: dict[torch.device, tuple[Tensor, ...]] = field(default_factory=dict, init=False, repr=False)
    _middles: dict[torch.device, Prices] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls, table: LoadCost, batch_size: int, deepest: int, flat: bool, furthest: int = 0, blocks: bool = False
    ) -> PriceTable:
        """What a table says of rounds of at most `deepest` tokens, of a draft that is at most `furthest` tokens behind.

        blocks  a round's tokens come from one draft forward pass
        """
        table = table.apart("drafts that give blocks") if blocks else table

        def seconds(context: float) -> list[Tensor]:
            target = [table.target(batch_size, width, context) for width in range(1, deepest + 2)]
            draft = [table.draft(batch_size, width, context) for width in range(1, furthest + 2)]
            return [floats_on(HOST, [values], torch.float64) for values in (target, draft)]

        target, draft = (torch.cat(values) for values in zip(*map(seconds, table.contexts), strict=True))
        middle = seconds(table.middle)
        return cls(table.contexts, target, draft, _prices(middle[0], middle[1], flat, blocks), flat, blocks)

    @property
    def by_context(self) -> bool:
        return len(self.contexts) > 1

    def at(self, context: Tensor | None, device: torch.device) -> Prices:
        """The prices of rows after this many tokens [B]; None: at the middle of the contexts."""
        if context is None or not self.by_context:
            if device not in self._middles:
                middle = self.middle
                self._middles[device] = replace(
                    middle,
                    forward=copied_to(device, middle.forward),
                    columns=copied_to(device, middle.columns),
                    tokens=copied_to(device, middle.tokens),
                    behind=copied_to(device, middle.behind),
                )
            return self._middles[device]
        lows, gaps, most, first, slopes = self._on(device)
        share = torch.minimum(((context.unsqueeze(1) - lows) / gaps).clamp(min=0), most)
        seconds = first + (share.unsqueeze(2) * slopes).sum(1)
        width = self.target.shape[1]
        return _prices(seconds[:, :width], seconds[:, width:], self.flat, self.blocks)

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Seconds as sums of ramps, as `toolkit.costs.table.interpolate` reads a table: where each begins [X], its length [X],
        its largest share [X], the seconds before all of them [n], and what each adds [X, n]; n: D + 1 + F + 1."""
        if device not in self._ramps:
            seconds, ends = torch.cat([self.target, self.draft], 1), floats_on(HOST, self.contexts, torch.float64)
            gaps, steps = ends.diff(), seconds.diff(dim=0)
            parts = (
                ends,
                torch.cat([gaps, gaps[-1:]]),
                torch.cat([torch.ones_like(gaps), gaps.new_full((1,), torch.inf)]),
                seconds[0],
                torch.cat([steps, steps[-1:].clamp(min=0)]),  # beyond the last context, unless it falls
            )
            self._ramps[device] = tuple(copied_to(device, part.float()) for part in parts)
        return self._ramps[device]


def _prices(target: Tensor, draft: Tensor, flat: bool, blocks: bool) -> Prices:
    """Prices from seconds [B, D + 1] and [B, F + 1]."""
    reading, columns = draft / target[:, :1], target.diff(dim=1) / target[:, :1]
    forwards = reading[:, :1].expand(-1, columns.shape[1]).clone()
    if blocks:
        forwards[:, 1:] = 0
    tokens, behind = forwards + columns, reading - reading[:, :1]
    return Prices(reading[:, 0].float(), columns.float(), tokens.float(), behind.float(), flat)

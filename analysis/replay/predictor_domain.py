"""A domain of `analysis.replay.predictors`: its recordings, what every row counts on them, and the level that is best.

Shapes: L levels, T texts, M most tokens of a round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from analysis.replay.predictor_rows import Predictor
from analysis.tables.grid import FIXED
from analysis.tables.rows import Array
from toolkit.trace import Trace

Speed = Callable[[Array], Array]  # from counts [..., counts + M + 1] to tokens per cost [...]


@dataclass
class Domain:
    """The recordings of a domain, and its rows.

    home       recorded with the draft and at the temperature of `statistics`
    levels     that a row's number is chosen from; of a fixed K its number is K, from 0 on
    on_dev     [L, T, counts + M + 1] of a row on the tuning texts
    chosen     the number of each row at `cost_ratio`, as an index
    counts     [T, counts + M + 1] of a row at its chosen number, on the test texts
    """

    name: str
    dev: Trace
    test: Trace
    home: bool
    rows: dict[str, Predictor]
    levels: list[float]
    on_dev: dict[str, Array] = field(default_factory=dict)
    chosen: dict[str, int] = field(default_factory=dict)
    counts: dict[str, Array] = field(default_factory=dict)

    def best(self, row: str, speed: Speed) -> int:
        """The index of the number of a row that makes most tokens per cost on the tuning texts."""
        row = self.rows[row].at or row
        if row not in self.on_dev:
            self.on_dev[row] = self.rows[row].counts(self.dev, self.levels)
        return int(speed(self.on_dev[row].sum(1)).argmax())

    def at(self, row: str, chosen: int, trace: Trace) -> Array:
        """Counts [T, counts + M + 1] of a row at one of its numbers on a trace."""
        if row == FIXED:
            return self.rows[row].counts(trace, [])[chosen]
        return self.rows[row].counts(trace, [self.levels[chosen]])[0]

    def setting(self, row: str, chosen: int) -> str:
        """A number as tables say it."""
        return f"K={chosen}" if row == FIXED else f"h={self.levels[chosen]:g}"

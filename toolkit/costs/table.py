"""What forward passes cost at one batch size: the target's by tokens read and context, the draft's by context.

    table = CostTable.load("costs.json")
    table.target(5, context=300)     # seconds of a target forward pass over 5 tokens per row, after 300 others
    table.draft(300)                 # seconds of a draft forward pass over one token per row

Times are used as they were measured: five tokens may be cheaper than two. Reading a table needs no torch.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.files.atomic import write_text


@dataclass(frozen=True)
class CostTable:
    """Seconds of forward passes of a pair at one batch size.

    batch_size      rows of every forward pass
    widths          tokens per row of the target's forward passes, ascending
    contexts        tokens before them, ascending
    target_seconds  [contexts][widths];  draft_seconds [contexts], of one token per row; empty without a draft
    machine         what the times hold for: processor, threads, dtype, torch version
    """

    batch_size: int
    widths: Sequence[int]
    contexts: Sequence[int]
    target_seconds: Sequence[Sequence[float]]
    draft_seconds: Sequence[float] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise InputError for times that are missing or not positive, and for points that do not ascend from 1 (or 0)."""
        for name, points, least in (("widths", self.widths, 1), ("contexts", self.contexts, 0)):
            if not points or points[0] < least or list(points) != sorted(set(points)):
                raise InputError(f"cost table: expected ascending {name} from {least} on, got {list(points)}")
        if self.batch_size < 1:
            raise InputError(f"cost table: expected batch_size of at least 1, got {self.batch_size}")
        sizes = [len(row) for row in self.target_seconds]
        if sizes != [len(self.widths)] * len(self.contexts):
            raise InputError(
                f"cost table: expected {len(self.widths)} target_seconds for each of {len(self.contexts)} contexts, got {sizes}"
            )
        if len(self.draft_seconds) not in (0, len(self.contexts)):
            raise InputError(
                f"cost table: expected a time of draft_seconds for each of {len(self.contexts)} contexts, got "
                f"{len(self.draft_seconds)}"
            )
        for seconds in (value for row in self.target_seconds for value in row):
            if not isfinite(seconds) or seconds <= 0:
                raise InputError(f"cost table: expected target_seconds above 0, got {seconds}")
        for seconds in self.draft_seconds:
            if not isfinite(seconds) or seconds < 0:
                raise InputError(f"cost table: expected draft_seconds of at least 0, got {seconds}")

    @classmethod
    def ratio(cls, draft: float, column: float = 0.0, batch_size: int = 1) -> CostTable:
        """A table in units of the target's forward pass over one token, whatever the context.

        draft   of the draft's forward pass;  column  what each further token adds to the target's
        """
        return cls(batch_size, (1, 2), (0,), ((1.0, 1.0 + column),), (draft,), {"ratio": draft, "column": column})

    def target(self, width: float, context: float) -> float:
        """Seconds of a target forward pass that reads `width` tokens in each row, after `context` others.

        Linear between the measured points. Beyond the last one its slope continues, unless it falls.
        """
        return interpolate(
            self.contexts, [interpolate(self.widths, row, width) for row in self.target_seconds], context
        )

    def draft(self, context: float) -> float:
        """Seconds of a draft forward pass that reads a token in each row, after `context` others.

        Raises InputError for the table of a target without a draft.
        """
        if not self.draft_seconds:
            raise InputError("cost table: expected draft_seconds for a method that drafts with a model, got none")
        return float(interpolate(self.contexts, self.draft_seconds, context))

    def __str__(self) -> str:
        """One line: milliseconds at the first context, and where they were measured."""
        milliseconds = ", ".join(map(_milliseconds, self.target_seconds[0]))
        draft = f", draft {_milliseconds(self.draft_seconds[0])} ms" if self.draft_seconds else ""
        threads, packed = self.machine.get("threads"), ", packed weights" if self.machine.get("packed") else ""
        return (
            f"target {milliseconds} ms over {', '.join(map(str, self.widths))} tokens{draft}, batch size "
            f"{self.batch_size}; {self.machine.get('processor')}, {threads} threads, {self.machine.get('dtype')}{packed}"
        )

    def save(self, path: Path | str) -> Path:
        """Write the table as JSON, whole or not at all."""
        return write_text(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> CostTable:
        """Read a JSON that `save` wrote. Raises InputError, one line, for a file that is missing, cut off or no such table."""
        try:
            content = json.loads(Path(path).read_bytes())
            return cls(**content)
        except OSError as error:
            raise InputError(f"expected a cost table at {path}: {error.strerror}") from None
        except (ValueError, TypeError, RecursionError) as error:
            reason = error if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            raise InputError(f"{path} is not a cost table ({reason})") from None


def interpolate(points: Sequence[float], values: Any, at: float) -> Any:
    """The value at `at` of a curve through (points, values): flat before its first point; beyond the last one its last slope
    goes on, or it is flat where that falls.

    values  a sequence of numbers, or an array whose first axis belongs to `points`
    """
    if len(points) == 1:
        return values[0]
    right = min(max(bisect_left(points, at), 1), len(points) - 1)
    low, high = points[right - 1], points[right]
    step = values[right] - values[right - 1]
    inside, beyond = min(max((at - low) / (high - low), 0.0), 1.0), max((at - high) / (high - low), 0.0)
    return values[right - 1] + inside * step + beyond * (step * (step > 0))


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"

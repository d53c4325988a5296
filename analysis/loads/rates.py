"""What one recording says beyond its own machine: acceptance by draft position, and the best fixed length by context.

Acceptance does not depend on the hardware, so a recording made on a laptop drives a benchmark on any GPU (exports/).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.loads.choosing import FIXED, fixed_length
from analysis.loads.recorded import RecordedPair
from analysis.tables.bootstrap import Array
from analysis.tables.rows import acceptance_positions
from toolkit.costs.load import LoadCost


def survival(recorded: RecordedPair, greedy: bool, length: int = 0) -> Array:
    """P(the first j drafted tokens are all accepted) for j = 1 .. K [K], over all recorded texts; never rises with j.

    greedy  whether the draft proposes its top tokens;  length  K, of a fixed length that was replayed; 0: the longest
    Empty where no fixed length was replayed.
    """
    settings = [setting for setting in recorded.settings if setting.method == FIXED]
    fixed = {fixed_length(s.label): s for s in settings if (s.parameters.get("draft_temperature") == 0) == greedy}
    if not fixed:
        return np.zeros(0)
    length = length or max(fixed)
    rows = recorded.recording.rows(fixed[length])
    rates = acceptance_positions(rows.assign(dataset="", split="", method=FIXED, setting=fixed[length].label)).rate
    alive = np.zeros(length)  # beyond the last position that was ever reached, too
    alive[: len(rates)] = rates.cumprod()
    return alive


def by_context(costs: LoadCost, batch_sizes: Sequence[int], alive: Array, blocks: bool = False) -> pd.DataFrame:
    """One line per batch size and timed context: the fixed length of most tokens per second, 0 being plain decoding.

    blocks  a round's tokens come from one draft forward pass
    alive [K]  survival by position. Rounds of every length are taken to start where those of K did; there are no intervals
    """
    tokens = 1 + np.concatenate([[0.0], alive.cumsum()])
    lines = []
    for batch in batch_sizes:
        for context in costs.target.context:
            seconds = np.array([costs.round(batch, length, context, blocks) for length in range(len(tokens))])
            speeds = tokens / seconds
            best = int(speeds.argmax())
            line = {"batch": batch, "context": int(context), "num_drafted": best, "tokens_per_round": tokens[best]}
            lines.append({**line, "speedup": speeds[best] / speeds[0]})
    return pd.DataFrame(lines)

"""Measure what forward passes cost here: every width of the target and every draft, in turns, medians of several.

A forward pass is one call of a session's `extend`, its bookkeeping included, as decoding makes it. What the cache holds does
not change its time: contexts are not read, their keys and values are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from toolkit.costs.clock import Stopwatch
from toolkit.costs.table import CostTable
from toolkit.engine import BlockSession, Session
from toolkit.engine.engine import engine_of
from toolkit.files.machine import processor
from toolkit.models.pair import ModelPair

WIDTHS = (1, 2, 3, 5, 9, 17)  # tokens of a target's forward pass
CONTEXTS = (128, 512)  # tokens before them
REPEATS = 5
HELD = 2**14  # tokens of all rows, at most, that caches hold: large batches are measured at shorter contexts
WARM_UP = 6  # forward passes of a shape that are not counted, where they are captured


def measure(
    pair: ModelPair,
    batch_size: int = 1,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = REPEATS,
) -> list[CostTable]:
    """The cost table of each draft of a pair; of a target alone one without a draft's times.

    Widths and contexts that the models cannot read, or that take too much memory, are left out or cut. `machine["spread"]` is
    how far the repeats of one time lie apart, as a share of it: the median over all times.
    """
    from tqdm.auto import tqdm

    widths = [width for width in widths if width == 1 or width <= pair.max_length // 2]
    room = HELD // batch_size
    longest = max(min(pair.max_length - widths[-1], room), 1)
    contexts = sorted({min(context, longest) for context in contexts})
    if longest == room:  # times at two contexts that lie close would not show how they go on
        contexts = [*(context for context in contexts[:-1] if 2 * context <= contexts[-1]), contexts[-1]]
    with engine_of(pair).sessions(batch_size, contexts[-1] + widths[-1]) as sessions:
        device = sessions.target.index.device
        tokens = torch.arange(widths[-1], device=device).expand(batch_size, -1) % pair.vocab_size
        forwards = [*((sessions.target, width) for width in widths), *((draft, 1) for draft in sessions.drafts)]
        watches = [[Stopwatch(session.index.device) for session, _ in forwards] for _ in contexts]
        warm_up = WARM_UP if sessions.fixed_rows else 0
        for _ in tqdm(range(warm_up + repeats), desc="costs", unit="turn", delay=2, leave=False):
            for context, row in zip(contexts, watches, strict=True):
                for (session, width), watch in zip(forwards, row, strict=True):
                    _hold(sessions.target, context)
                    _hold(session, context)
                    with watch:
                        if isinstance(session, BlockSession):  # a block costs the same, however much of it is sent
                            session.draft(tokens[:, :2], [2] * batch_size)
                        else:
                            session.extend(tokens[:, :width], last=width)
        laps = [[watch.seconds[warm_up:] for watch in row] for row in watches]
    seconds = [[median(times) for times in row] for row in laps]
    spread = median((max(times) - min(times)) / median(times) for row in laps for times in row)
    target = [row[: len(widths)] for row in seconds]
    drafts = [[row[number] for row in seconds] for number in range(len(widths), len(forwards))]
    facts = {**machine_of(pair), "spread": round(spread, 3)}
    return [CostTable(batch_size, widths, contexts, target, draft, facts) for draft in drafts or [[]]]


def _hold(session: Session, length: int) -> None:
    """Let the cache of every row hold `length` tokens; those that it has not read are zeros."""
    rows = list(range(session.index.num_rows))
    session.truncate([length] * len(rows))
    if session.lengths[0] < length:
        session.index.place(rows, length - session.lengths[0], None, None)


def machine_of(pair: ModelPair) -> dict[str, Any]:
    """What the times of a pair hold for; on a GPU also whether forward passes are captured, as of the engine's last call."""
    captured = any(captures is not None for captures in engine_of(pair).captures)
    device = torch.cuda.get_device_name(pair.device) if pair.device.type == "cuda" else processor()
    return {
        "processor": device,
        "threads": torch.get_num_threads(),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "packed": bool(getattr(engine_of(pair), "packed", False)),
        **({"captured": captured} if captured or pair.device.type == "cuda" else {}),
    }

"""Seconds of draft and target forwards by batch size, tokens per row and context, measured in the decoding loop itself.

The method is ours. Every batch size decodes with every fixed draft length. The lengths are interleaved, and texts are kept
from ending. A first pass captures forwards, as a long-running decoder has captured them, and is discarded. Rounds in which all
batch slots hold a text are timed. The seconds of a draft forward are its round's draft seconds divided by the draft length. The
rest of the round, checking and the loop's own work, counts for the target forward. So the table holds the cost of a round,
Python included, and not that of a bare forward. The clock is read when the device has finished, at both boundaries between
drafting and checking.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from sklearn.isotonic import IsotonicRegression

from toolkit.decoding import ChainProposer, Method, Sampling
from toolkit.decoding.decode import decode_measured
from toolkit.errors import InputError
from toolkit.load_cost import LoadCost, grid_of
from toolkit.pair import ModelPair
from toolkit.session.capture import PROOFS, TracedForward
from toolkit.stopping import Fixed
from toolkit.types import Generation
from toolkit.verification import get

WARM_UP = 3  # rounds of a batch that are left out: the first one reads the prompts
# Rounds until a CPU's forwards are captured, with texts that grow over three windows of context (64 tokens each).
SETTLED = 3 * (TracedForward.after + PROOFS)
BRIEF = 0.02  # seconds: longer rounds gain nothing from captured forwards
WIDEST_INTERVAL = 0.4  # of an entry's median: wider ones are refused


def measured_costs(
    pair: ModelPair,
    prompts: Sequence[Any],
    sampling: Sampling,
    batch_sizes: Sequence[int],
    drafted: Sequence[int],
    num_rounds: int = 24,
    about: dict[str, Any] | None = None,
    passes: int = 4,
) -> tuple[LoadCost, pd.DataFrame]:
    """A cost table and its entries; it is measured again, up to `passes` times, while the times vary too much.

    Raises InputError if the times of the last pass still vary too much.
    """
    found: list[pd.DataFrame] = []
    for number in range(passes):
        found.append(measure_loads(pair, prompts, sampling, batch_sizes, drafted, num_rounds))
        try:
            return cost_table(pd.concat(found), about or {})
        except InputError as error:
            if number == passes - 1:
                raise
            print(f"{error}; measuring again")
    raise AssertionError("at least one pass")


def measure_loads(
    pair: ModelPair,
    prompts: Sequence[Any],
    sampling: Sampling,
    batch_sizes: Sequence[int],
    drafted: Sequence[int],
    num_rounds: int = 24,
    repeats: int = 2,
) -> pd.DataFrame:
    """One line per timed forward: model, batch, width, context (mean of the rows), seconds, repeat.

    prompts     token ids or texts; taken in turn until a batch is full
    drafted     draft lengths; 0 is added: plain decoding
    num_rounds  timed rounds per batch size, draft length and repeat
    """
    from tqdm.auto import tqdm

    lengths = sorted({0, *drafted})
    lines: list[dict[str, Any]] = []
    bar = tqdm(total=len(batch_sizes) * len(lengths) * (repeats + 1), desc="timing", unit="setting")
    for batch in batch_sizes:
        endless = replace(pair, draft=None, end_ids=())  # with room for captured forwards of this batch size
        chosen = [prompts[i % len(prompts)] for i in range(batch)]
        decoded = partial(_decoded, endless, chosen, sampling, rounds=WARM_UP + num_rounds)
        for repeat, length in itertools.product(range(repeats + 1), lengths):
            timed = decoded(length)
            if repeat:
                lines += [{**line, "repeat": repeat} for line in _forwards(timed, length)]
            elif min((one.target_seconds for one in timed[0].rounds), default=BRIEF) < BRIEF:
                for _ in range(SETTLED // (WARM_UP + num_rounds) + 1):  # of the same shapes
                    decoded(length)
            bar.update()
    bar.close()
    return pd.DataFrame(lines)


def cost_table(forwards: pd.DataFrame, about: dict[str, Any]) -> tuple[LoadCost, pd.DataFrame]:
    """The table, and its entries: median seconds with a 95 % interval, at two lengths of context.

    In the table more tokens per row never take less time: medians that say otherwise are noise, and isotonic regression
    gives them a common value.

    Raises InputError if an entry's interval is wider than 40 % of its median: the machine is not quiet enough.
    """
    contexts = [float(part.mean()) for part in _halves(forwards.context)]
    contexts = sorted({round(context) for context in contexts})
    cells: list[dict[str, Any]] = []
    for (model, batch, width), part in forwards.groupby(["model", "batch", "width"]):
        middle, low, high = _median(part.seconds.to_numpy())
        slope = _slope(part)
        cells.append({
            "model": model, "batch": batch, "width": width, "context": part.context.mean(), "seconds": middle,
            "low": low, "high": high, "per_context": slope, "forwards": len(part),
        })  # fmt: skip
    table = pd.DataFrame(cells)
    noisy = table[(table.high - table.low) > WIDEST_INTERVAL * table.seconds]
    if len(noisy):
        one = noisy.iloc[0]
        raise InputError(
            f"the times of {len(noisy)} of {len(table)} settings vary too much for a cost table (first: {one.model}, batch "
            f"{one.batch}, {one.width} tokens per row: {one.low:.2g} to {one.high:.2g} s); expected intervals below "
            f"{WIDEST_INTERVAL:.0%} of the median: use a quieter machine or raise num_rounds"
        )
    draft, target = (grid_of(_points(table[table.model == name], contexts), name) for name in ("draft", "target"))
    return LoadCost(draft, target, "measured", about), table


# -- inside -----------------------------------------------------------------------------------------------------------


def _fixed(length: int) -> Method:
    return Method(
        f"K={length}", Fixed(max(length, 1)), get("rejection"), ChainProposer(), min_drafted=0, max_drafted=length
    )


def _decoded(pair: ModelPair, prompts: Sequence[Any], sampling: Sampling, length: int, rounds: int) -> list[Generation]:
    """At least this many timed rounds of every prompt, all side by side."""
    limit = replace(sampling, max_new_tokens=rounds * (length + 1) + 1, max_length=None, stop=())
    return decode_measured(pair, prompts, _fixed(length), limit, batch_size=len(prompts), timed=True).generations


def _forwards(generations: Sequence[Generation], length: int) -> list[dict[str, Any]]:
    """The timed forwards of rounds that all rows took part in, with full drafts."""
    failed = next((g.error for g in generations if g.error), None)
    if failed is not None:
        raise InputError(f"a prompt cannot be timed: {failed}")
    lines: list[dict[str, Any]] = []
    texts = [len(g.prompt_ids) for g in generations]
    for number in range(min(len(g.rounds) for g in generations) - 1):
        rounds = [g.rounds[number] for g in generations]
        if number >= WARM_UP and min(r.num_drafted for r in rounds) == length:
            shared = {"batch": len(generations), "context": float(np.mean(texts))}
            first = rounds[0]
            lines.append({"model": "target", "width": length + 1, **shared, "seconds": first.target_seconds})
            if length:
                lines.append({"model": "draft", "width": 1, **shared, "seconds": first.draft_seconds / length})
        texts = [text + r.num_produced for text, r in zip(texts, rounds, strict=True)]
    return lines


def _points(entries: pd.DataFrame, contexts: Sequence[float]) -> dict[tuple[float, float, float], float]:
    """Seconds at (batch, width, context), not falling in the width."""
    points: dict[tuple[float, float, float], float] = {}
    for context in contexts:
        seconds = entries.seconds + entries.per_context * (context - entries.context)
        for batch, part in entries.assign(seconds=seconds.clip(lower=entries.seconds / 10)).groupby("batch"):
            rising = IsotonicRegression().fit_transform(part.width, part.seconds, sample_weight=part.forwards)
            for width, value in zip(part.width, rising, strict=True):
                points[float(batch), float(width), float(context)] = float(value)
    return points


def _halves(values: pd.Series) -> tuple[pd.Series, pd.Series]:
    middle = values.median()
    return values[values <= middle], values[values >= middle]


def _slope(part: pd.DataFrame) -> float:
    """Seconds per token of context: between the medians of the shorter and the longer half; never below 0."""
    middle = part.context.median()
    near, far = part[part.context <= middle], part[part.context > middle]
    if len(far) < 5 or far.context.mean() - near.context.mean() < 16:
        return 0.0
    rise = far.seconds.median() - near.seconds.median()
    return float(max(rise / (far.context.mean() - near.context.mean()), 0.0))


def _median(values: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float, float]:
    """The median and its 95 % interval by order statistics (binomial, normal approximation)."""
    ordered = np.sort(values)
    count = len(ordered)
    reach = 0.98 * math.sqrt(count)
    low = ordered[max(0, math.floor(count / 2 - reach))]
    high = ordered[min(count - 1, math.ceil(count / 2 + reach))]
    return float(np.median(ordered)), float(low), float(high)

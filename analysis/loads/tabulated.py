"""A cost table from timed rounds (`analysis.loads.measured`): the changes of the machine's speed out, means, a grid.

The method is ours. The speed of a shared machine changes within seconds, and a setting is timed for a fraction of a second at
a time. All settings are timed once per repeat. So a repeat's speed is known from all of them: it is the median, over settings,
of their seconds in this repeat over their usual seconds. Every round's seconds are divided by it. What is left are the
differences between settings, which is what advice needs.

The rounds of a setting do not all take the same time: caches settle behind a prompt, and contexts grow. A response takes their
sum, so a setting's seconds are the mean. A single round counts for at most twice the median: interruptions by others are as
rare as they are long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from sklearn.isotonic import IsotonicRegression

from toolkit.errors import InputError
from toolkit.load_cost import LoadCost, grid_of

NEAR, FAR, PROMPT = "near", "far", "prompt"  # the texts behind which forwards are timed
APART = 16  # tokens: closer contexts do not show what a token of context costs
WIDEST_INTERVAL = 0.4  # of an entry's mean: wider intervals are refused
SETTING = ["draft", "drafted", "model", "texts"]  # what is timed in every repeat
CAP = 2.0  # times the median: what a single round counts for at most
POLISHED = 3  # alternations between the speeds of repeats and the usual seconds of settings


def steady(rounds: pd.DataFrame) -> pd.DataFrame:
    """Rounds of all drafts and repeats, with the speed of each repeat taken out of their seconds, batch size by batch size.

    Readings of prompts are scaled, too. They do not count for the speed, because they vary more than rounds do.
    """
    found = rounds.reset_index(drop=True)
    for _, part in found.groupby("batch"):
        medians = part[part.texts != PROMPT].groupby([*SETTING, "repeat"]).seconds.median().unstack("repeat")
        slowness = pd.Series(1.0, medians.columns)
        for _ in range(POLISHED):
            usual = (medians / slowness).median(axis=1)
            slowness = medians.div(usual, axis=0).median(axis=0)
        found.loc[part.index, "seconds"] /= part.repeat.map(slowness).fillna(1.0)
    return found


def cost_table(forwards: pd.DataFrame, about: dict[str, Any]) -> tuple[LoadCost, pd.DataFrame]:
    """The table and its entries: mean seconds with a 95 % interval.

    The table's contexts are the shortest one that was timed, and the means of near and of far texts. Responses start at short
    contexts, where forwards take less time than at the mean. That counts most for plain decoding.

    In the table a longer context never takes less time. More tokens per row take less only where the two means' intervals lie
    apart, as processors are faster at some widths than at others. Other means that fall are noise and get a common value. For
    widths it comes from isotonic regression, for contexts it is the mean.

    Raises InputError if an entry's interval is wider than 40 % of its mean: the machine is not quiet enough.
    """
    table = entries_of(forwards)
    noisy = noisy_of(table)
    if len(noisy):
        one = noisy.iloc[0]
        raise InputError(
            f"the times of {len(noisy)} of {len(table)} settings vary too much for a cost table (first: {one.model}, batch "
            f"{one.batch}, {one.width} tokens per row: {one.low:.2g} to {one.high:.2g} s); expected intervals below "
            f"{WIDEST_INTERVAL:.0%} of the mean: use a quieter machine or raise num_rounds"
        )
    rounds = forwards[forwards.texts != PROMPT]
    contexts = sorted({round(context) for context in (rounds.context.min(), *rounds.groupby("texts").context.mean())})
    shortest = rounds.groupby("batch").context.min().to_dict()
    draft, target = (
        grid_of(_points(table[table.model == name], contexts, shortest), name) for name in ("draft", "target")
    )
    return LoadCost(draft, target, "measured", about), table


def entries_of(rounds: pd.DataFrame) -> pd.DataFrame:
    """Mean seconds of every model, batch size, width and kind of texts, with intervals."""
    cells: list[dict[str, Any]] = []
    for (model, batch, width, where), part in _of_forwards(rounds).groupby(["model", "batch", "width", "texts"]):
        middle, low, high = _mean(part.seconds.to_numpy())
        cells.append({
            "model": model, "batch": batch, "width": width, "texts": where, "context": part.context.mean(),
            "seconds": middle, "low": low, "high": high, "forwards": len(part),
        })  # fmt: skip
    return pd.DataFrame(cells)


def noisy_of(entries: pd.DataFrame) -> pd.DataFrame:
    """The entries whose interval is too wide. Readings of prompts may vary more: they are few and happen once per text."""
    return entries[(entries.high - entries.low > WIDEST_INTERVAL * entries.seconds) & (entries.texts != PROMPT)]


def capped(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Seconds of rounds [n] of one setting; one counts for at most `CAP` times their median."""
    return np.minimum(values, CAP * np.median(values))


# -- inside -----------------------------------------------------------------------------------------------------------


def _of_forwards(rounds: pd.DataFrame) -> pd.DataFrame:
    """Seconds of a round's draft forwards as those of one; what its first one takes beyond the others goes to the target."""
    found = rounds.reset_index(drop=True)
    for (batch, texts), part in found[found.texts != PROMPT].groupby(["batch", "texts"]):
        of_lengths = (
            part[part.model == "draft"].groupby("drafted").seconds.agg(lambda one: capped(one.to_numpy()).mean())
        )
        first = _first(of_lengths.index.to_numpy(dtype=np.float64), of_lengths.to_numpy())
        here = (found.batch == batch) & (found.texts == texts) & (found.drafted > 0)
        draft, target = here & (found.model == "draft"), here & (found.model == "target")
        found.loc[draft, "seconds"] = (found.seconds - first) / found.drafted
        found.loc[target, "seconds"] += first
    return found


def _first(drafted: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]) -> float:
    """The intercept of a round's draft seconds [n] over the draft length [n]: at least 0, at most 90 % of the least seconds."""
    if len(drafted) < 2:
        return 0.0
    start = float(np.polynomial.polynomial.polyfit(drafted, seconds, 1)[0])
    return min(max(start, 0.0), 0.9 * float(seconds.min()))


def _points(
    entries: pd.DataFrame, contexts: Sequence[float], shortest: Mapping[int, float]
) -> dict[tuple[float, float, float], float]:
    """Seconds at (batch, width, context), not falling in the context, and in the width only where the means clearly do.

    shortest  by batch size, the shortest context that was timed: shorter ones count as this one
    """
    points: dict[tuple[float, float, float], float] = {}
    for batch, part in entries.groupby("batch"):
        lines, runs = _lines(part), _runs(part)
        widths = list(lines)
        for context in contexts:
            behind = max(context, shortest[batch])
            seconds = [max(start + slope * (behind - at), start / 2) for start, slope, at in lines.values()]
            for run in runs:
                rising = IsotonicRegression().fit_transform(widths[run], seconds[run])
                for width, value in zip(widths[run], rising, strict=True):
                    points[float(batch), float(width), float(context)] = float(value)
    return points


def _runs(entries: pd.DataFrame) -> list[slice]:
    """Of a batch size's ascending widths, runs that end where the mean of the nearest texts clearly falls to the next one."""
    nearest = entries.sort_values(["width", "context"]).groupby("width").first()
    low, high = nearest.low.to_numpy(), nearest.high.to_numpy()
    ends = [*(np.flatnonzero(low[:-1] > high[1:]) + 1).tolist(), len(nearest)]
    return [slice(first, end) for first, end in pairwise([0, *ends])]


Line = tuple[float, float, float]  # seconds at a context, seconds that a further token of context adds, that context


def _lines(entries: pd.DataFrame) -> dict[int, Line]:
    """Of every width of a batch size. Rounds that were timed at one context only get a slope between their neighbours'."""
    by_width = {int(width): part for width, part in entries.groupby("width")}
    lines = {width: _line(part) for width, part in by_width.items()}
    sloped = {width: lines[width][1] for width, part in by_width.items() if _apart(part)}
    for width, part in by_width.items():
        if sloped and width not in sloped and not (part.texts == PROMPT).any():
            seconds, _, at = lines[width]
            lines[width] = seconds, float(np.interp(width, list(sloped), list(sloped.values()))), at
    return lines


def _line(entries: pd.DataFrame) -> Line:
    """Of one width. The slope is never below 0, and 0 if the contexts are not far enough from each other."""
    near, far = entries.iloc[entries.context.argmin()], entries.iloc[entries.context.argmax()]
    slope = max((far.seconds - near.seconds) / (far.context - near.context), 0.0) if _apart(entries) else 0.0
    return float(near.seconds if slope else entries.seconds.mean()), float(slope), float(near.context)


def _apart(entries: pd.DataFrame) -> bool:
    """Whether the contexts are far enough from each other to show what a token of context costs."""
    return bool(entries.context.max() - entries.context.min() >= APART)


def _mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float, float]:
    """The mean and its 95 % interval (normal approximation). A single value counts for at most `CAP` times the median."""
    kept = capped(values)
    middle, half = float(kept.mean()), 1.96 * float(kept.std()) / math.sqrt(len(kept))
    return middle, middle - half, middle + half

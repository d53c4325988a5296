"""Within rounds: acceptance by position, with numerator and denominator, and how long rounds were.

A round that drafts K tokens and accepts n reaches the positions 1..min(K, n + 1) with everything before accepted. Of
the rounds that reach position k, those accept it that accept at least k tokens. Trees and beams have no such positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from analysis.tables.bootstrap import Bootstrap
from analysis.tables.rows import LENGTHS, SETTING, Array


def acceptance_positions(rows: pd.DataFrame, bootstrap: Bootstrap | None = None) -> pd.DataFrame:
    """One line per setting and position: reached, accepted (rounds), rate = accepted / reached, and its interval over prompts.

    rows  of a sweep. Settings without chains are left out; an empty table has the columns all the same.
    """
    lines = []
    for about, lengths in _chains(rows):
        accepted, _, judged = (_at_least(values)[:, 1:] for values in lengths)  # [prompts, positions]
        width = int(np.flatnonzero(judged.sum(0)).max(initial=-1)) + 1
        samples = None if bootstrap is None else bootstrap.totals(np.hstack([accepted[:, :width], judged[:, :width]]))
        lines += [{**about, **_position(k, accepted[:, k], judged[:, k])} for k in range(width)]
        if samples is not None and bootstrap is not None:
            for k, line in enumerate(lines[-width:]):
                passed, reached = samples[:, k], samples[:, width + k]
                known = reached > 0
                line["rate_low"], line["rate_high"] = bootstrap.interval(passed[known] / reached[known])
    ends = [] if bootstrap is None else ["rate_low", "rate_high"]
    return pd.DataFrame(lines, columns=[*SETTING, "position", "reached", "accepted", "rate", *ends])


def _position(k: int, accepted: Array, reached: Array) -> dict[str, float]:
    """A position's counts over prompts [n], and their ratio."""
    totals = int(reached.sum()), int(accepted.sum())
    return {"position": k + 1, "reached": totals[0], "accepted": totals[1], "rate": totals[1] / totals[0]}


def length_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per setting and length: how many rounds drafted, and accepted, so many tokens."""
    lines = []
    for about, (accepted, drafted, _) in _chains(rows):
        for n in range(drafted.shape[1]):
            lines.append(
                {**about, "length": n, "drafted": int(drafted[:, n].sum()), "accepted": int(accepted[:, n].sum())}
            )
    return pd.DataFrame(lines, columns=[*SETTING, "length", "drafted", "accepted"])


def _chains(rows: pd.DataFrame) -> Iterator[tuple[dict[str, str], list[Array]]]:
    """Every setting of chains that drafted, with its LENGTHS as histograms [prompts, longest + 1]."""
    if not set(LENGTHS) <= set(rows.columns):
        return
    for key, part in rows.groupby(SETTING, sort=False):
        width = max((len(line) for name in LENGTHS for line in part[name]), default=0)
        lengths = [np.array([[*line, *[0] * (width - len(line))] for line in part[name]], float) for name in LENGTHS]
        if width > 1 and lengths[1][:, 1:].sum() > 0:
            yield dict(zip(SETTING, map(str, key), strict=True)), lengths


def _at_least(histogram: Array) -> Array:
    """How many are at least n, from how many are n: [prompts, longest + 1]."""
    return histogram[:, ::-1].cumsum(1)[:, ::-1]

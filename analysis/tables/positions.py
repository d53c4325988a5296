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

SELDOM = 0.01  # share of rounds


def acceptance_positions(rows: pd.DataFrame, bootstrap: Bootstrap | None = None) -> pd.DataFrame:
    """One line per setting of chains and position: reached and accepted rounds, rate = accepted / reached, its interval."""
    lines = []
    for labels, lengths in _chains(rows):
        accepted, _, judged = (at_least(values)[:, 1:] for values in lengths)  # [prompts, positions]
        width = int(np.flatnonzero(judged.sum(0)).max(initial=-1)) + 1
        for k in range(width):
            counts = np.stack([accepted[:, k], judged[:, k]], 1)
            passed, tried = map(int, counts.sum(0))
            line = {**labels, "position": k + 1, "reached": tried, "accepted": passed, "rate": passed / tried}
            if bootstrap is not None:
                line |= bootstrap.figures(counts, lambda sums: {"rate": sums[..., 0] / sums[..., 1]}, "probability")
            lines.append(line)
    ends = [] if bootstrap is None else ["rate_low", "rate_high"]
    return pd.DataFrame(lines, columns=[*SETTING, "position", "reached", "accepted", "rate", *ends])


def length_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per setting and length: how many rounds drafted, and how many accepted, that many tokens."""
    lines = []
    for labels, (accepted, drafted, _) in _chains(rows):
        counted = zip(drafted.sum(0).astype(int), accepted.sum(0).astype(int), strict=True)
        lines += [
            {**labels, "length": n, "drafted": num_drafted, "accepted": num_accepted}
            for n, (num_drafted, num_accepted) in enumerate(counted)
        ]
    return pd.DataFrame(lines, columns=[*SETTING, "length", "drafted", "accepted"])


def bound_notes(lengths: pd.DataFrame, settings: pd.DataFrame, bound: int) -> list[str]:
    """One line per method whose best setting ends more than SELDOM of its rounds at the bound, not by its own choice."""
    drafting = lengths.groupby(list(SETTING[-2:]), sort=False)
    shares = {}
    for (method, setting), rounds in drafting:
        drafted = rounds[rounds.drafted > 0]
        at_bound = drafted[drafted.length >= bound].drafted.sum() / max(drafted.drafted.sum(), 1)
        if len(drafted) > 1 and at_bound > SELDOM:  # all rounds of one length: a fixed K
            shares[method, setting] = at_bound
    best = settings.loc[settings.groupby("method", sort=False).throughput.idxmax()]
    return [
        f"{method} {setting}: the bound of {bound} drafted tokens ended {shares[method, setting]:.0%} of its rounds; a larger "
        "max_drafted may pay"
        for method, setting in zip(best.method, best.setting, strict=True)
        if (method, setting) in shares
    ]


def _chains(rows: pd.DataFrame) -> Iterator[tuple[dict[str, str], list[Array]]]:
    """Every setting of chains that drafted, with its LENGTHS as histograms [prompts, longest + 1]."""
    if not set(LENGTHS) <= set(rows.columns):
        return
    for key, part in rows.groupby(SETTING, sort=False):
        width = max((len(line) for name in LENGTHS for line in part[name]), default=0)
        lengths = [np.array([[*line, *[0] * (width - len(line))] for line in part[name]], float) for name in LENGTHS]
        if width > 1 and lengths[1][:, 1:].sum() > 0:
            yield dict(zip(SETTING, map(str, key), strict=True)), lengths


def at_least(histogram: Array) -> Array:
    """Numbers of rounds with at least n tokens, from those with n: [..., longest + 1]."""
    return np.flip(np.flip(histogram, -1).cumsum(-1), -1)

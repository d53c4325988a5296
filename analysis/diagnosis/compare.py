"""Counted rounds against those of replays: which replay explains them.

A round accepts what the replay says, or, with the small probability ROUNDING, any other number of tokens, all equally probable.
ROUNDING is fixed: about the share of rounds that bfloat16 changes. Texts are the unit. One replay is better than another if the
log-likelihood ratio exceeds PENALTY, and its t over texts the quantile of BETTER (Vuong 1989, doi:10.2307/1912557). A replay
explains the counts if it has EXPLAINS of the rounds equal. Where no cause is better, the draft is as it should be if, too,
accepted tokens do not differ in one direction: t over texts is below the quantile of DIFFERENT.

Shapes: r rounds, n texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtrit

from analysis.tables.bootstrap import Array
from toolkit.drafts.causes import Cause

ROUNDING = 0.01
PENALTY = math.log(20)
EXPLAINS = 0.95
BETTER, DIFFERENT = 0.99, 0.999
Accepted = NDArray[np.int64]


@dataclass(frozen=True)
class Explanation:
    """Causes that predict the same counts: one answer with several names.

    accepted [r]    tokens that their replay accepts; equal: in how many rounds the engine counted as many
    likelihood [r]  log-likelihoods of the counts
    """

    causes: list[Cause]
    accepted: Accepted
    equal: int
    likelihood: Array

    @property
    def name(self) -> str:
        return ", or ".join(cause.meaning for cause in self.causes)

    @property
    def rounding(self) -> bool:
        """Whether nothing is wrong."""
        return any(cause.rounding for cause in self.causes)


def explanations(rounds: pd.DataFrame, replays: Mapping[Cause, Accepted]) -> list[Explanation]:
    """An explanation per prediction. rounds: a line per round, with `text`, `drafted` and `accepted`."""
    causes: dict[bytes, list[Cause]] = {}
    for cause, accepted in replays.items():
        causes.setdefault(accepted.tobytes(), []).append(cause)
    otherwise, several = math.log(ROUNDING) - np.log(rounds.drafted.to_numpy()), []
    for group in causes.values():
        equal = replays[group[0]] == rounds.accepted.to_numpy()
        likelihood = np.where(equal, math.log1p(-ROUNDING), otherwise)
        several.append(Explanation(group, replays[group[0]], int(equal.sum()), likelihood))
    return several


def best_of(rounds: pd.DataFrame, several: Sequence[Explanation]) -> Explanation | None:
    """What explains the counts; None: nothing. The first is as it should be. A mistake has to be better than rounding, too."""
    right, text = several[0], rounds.text.to_numpy()
    best = right
    for rounding in (True, False):
        causes = [each for each in several[1:] if each.rounding is rounding and better(each, best, text)]
        best = max(causes, key=lambda each: each.likelihood.sum(), default=best)
    one_way = abs(t_over_texts((rounds.accepted - right.accepted).to_numpy(), text)) > quantile(text, DIFFERENT)
    return best if best.equal >= EXPLAINS * len(rounds) and not (best is right and one_way) else None


def better(first: Explanation, second: Explanation, text: Accepted) -> bool:
    """Whether the counts speak for one explanation and against another; text [r]: the text of each round."""
    ratios = first.likelihood - second.likelihood
    return bool(ratios.sum() > PENALTY) and t_over_texts(ratios, text) > quantile(text, BETTER)


def t_over_texts(values: Array, text: Accepted) -> float:
    """Student's t of the sums [n] by text of values [r]; not a number where all are 0."""
    sums = np.bincount(text, values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(sums.mean() / (sums.std(ddof=1) / math.sqrt(len(sums))))


def quantile(text: Accepted, level: float) -> float:
    """Student's quantile of texts that are numbered from 0."""
    return float(stdtrit(text.max(), level))

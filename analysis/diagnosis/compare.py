"""Counted rounds against those of replays: which replay explains them.

A round accepts what the replay says, or, with the small probability ROUNDING, any other number of tokens, all equally probable.
ROUNDING is fixed: about the share of rounds that bfloat16 changes. Texts are the unit. One replay is better than another if the
log-likelihood ratio exceeds PENALTY, and its t over texts the quantile of BETTER (Vuong 1989, doi:10.2307/1912557). A replay
explains the counts if it has EXPLAINS of the rounds equal. Where no cause is better, the draft is as it should be if, too,
accepted tokens do not differ in one direction: t over texts is below the quantile of DIFFERENT.

Above temperature 0 a replay gives every round a distribution of its count and its text, and the rest holds: only that no rounds
are equal, so a replay explains the counts if accepted tokens do not differ from its expectation in one direction; and that the
replays are many and alike, so the likelihood ratio of a mistake has to be as many times larger.

Shapes: r rounds, n texts, K tokens of the longest round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtrit

from analysis.diagnosis.replay import Terms
from analysis.tables.bootstrap import Array
from toolkit.drafts.causes import Cause

ROUNDING = 0.01
PENALTY = math.log(20)
EXPLAINS = 0.95
BETTER, DIFFERENT = 0.99, 0.999
TINY = 1e-12  # probability of what cannot be
Accepted = NDArray[np.int64]


@dataclass(frozen=True)
class Explanation:
    """Causes that predict the same counts: one answer with several names.

    accepted [r]    tokens that their replay accepts; above temperature 0 those that it expects of the tested ones
    equal           in how many rounds the engine counted as many; 0 above temperature 0, where no number is certain
    likelihood [r]  log-likelihoods of the counts, above temperature 0 those of the text in proportion to its probability
    tested [r, K]   above temperature 0: P(accepted) at the positions that the engine tested, else 0
    """

    causes: list[Cause]
    accepted: Array | Accepted
    equal: int
    likelihood: Array
    tested: Array | None = None

    @property
    def name(self) -> str:
        return ", or ".join(cause.meaning for cause in self.causes)

    @property
    def sampled(self) -> bool:
        return self.tested is not None

    @property
    def rounding(self) -> bool:
        """Whether nothing is wrong."""
        return any(cause.rounding for cause in self.causes)


def explanations(rounds: pd.DataFrame, replays: Mapping[Cause, Accepted]) -> list[Explanation]:
    """An explanation per prediction. rounds: a line per round, with `text`, `drafted` and `accepted`."""
    causes: dict[bytes, list[Cause]] = {}
    for cause, accepted in replays.items():
        causes.setdefault(accepted.tobytes(), []).append(cause)
    several = []
    for group in causes.values():
        accepted = replays[group[0]]
        equal = int((accepted == rounds.accepted).sum())
        several.append(Explanation(group, accepted, equal, log_likelihood(rounds, accepted)))
    return several


def log_likelihood(rounds: pd.DataFrame, accepted: Accepted) -> Array:
    """Log-likelihoods [r] of the counts, where a replay accepts `accepted` [r]."""
    otherwise = math.log(ROUNDING) - np.log(rounds.drafted.to_numpy())
    return np.where(accepted == rounds.accepted.to_numpy(), math.log1p(-ROUNDING), otherwise)


def sampled_explanations(rounds: pd.DataFrame, terms: Mapping[Cause, Terms]) -> list[Explanation]:
    """An explanation per prediction, above temperature 0."""
    groups: dict[bytes, tuple[Terms, list[Cause]]] = {}
    for cause, each in terms.items():
        groups.setdefault(each.accepted.tobytes() + each.rejected.tobytes(), (each, []))[1].append(cause)
    drafted, count = (rounds[name].to_numpy()[:, None] for name in ("drafted", "accepted"))
    several = []
    for each, causes in groups.values():
        position = np.arange(each.text.shape[1])
        kept, last = position < count, (position == count) & (count < drafted)
        accepted, rejected, text = (
            np.log(np.maximum(values, TINY)) for values in (each.accepted, each.rejected, each.text)
        )
        own = (accepted * kept + rejected * last - text * (kept | last)).sum(1)
        likelihood = np.logaddexp(math.log1p(-ROUNDING) + own, math.log(ROUNDING) - np.log(drafted[:, 0] + 1))
        tested = (kept | last) * each.accepted / np.maximum(each.accepted + each.rejected, TINY)
        several.append(Explanation(causes, tested.sum(1), 0, likelihood, tested))
    return several


def best_of(rounds: pd.DataFrame, several: Sequence[Explanation]) -> Explanation | None:
    """What explains the counts; None: nothing. The first is as it should be. A mistake has to be better than rounding, too."""
    right, text = several[0], rounds.text.to_numpy()
    best, penalty = right, PENALTY + (math.log(len(several)) if right.sampled else 0)
    for rounding in (True, False):
        causes = [each for each in several[1:] if each.rounding is rounding and better(each, best, text, penalty)]
        best = max(causes, key=lambda each: each.likelihood.sum(), default=best)

    def one_way(each: Explanation) -> bool:
        return abs(t_over_texts((rounds.accepted - each.accepted).to_numpy(), text)) > quantile(text, DIFFERENT)

    if right.sampled:
        return None if one_way(best) else best
    return best if best.equal >= EXPLAINS * len(rounds) and not (best is right and one_way(best)) else None


def better(first: Explanation, second: Explanation, text: Accepted, penalty: float) -> bool:
    """Whether the counts speak for one explanation and against another; text [r]: the text of each round."""
    ratios = first.likelihood - second.likelihood
    return bool(ratios.sum() > penalty) and t_over_texts(ratios, text) > quantile(text, BETTER)


def t_over_texts(values: Array, text: Accepted) -> float:
    """Student's t of the sums [n] by text of values [r]; not a number where all are 0."""
    sums = np.bincount(text, values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(sums.mean() / (sums.std(ddof=1) / math.sqrt(len(sums))))


def quantile(text: Accepted, level: float) -> float:
    """Student's quantile of texts that are numbered from 0."""
    return float(stdtrit(text.max(), level))

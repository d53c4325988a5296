"""Whether an engine's acceptance has fallen below a recording's: a test that may be read after every page of counters.

Robbins, Statistical Methods Related to the Law of the Iterated Logarithm (1970): a likelihood ratio, mixed over the size of the
change, exceeds 1 / alpha with probability alpha at most (Ville), whenever and however often it is read. Here, of one position:

counts    between two pages, X accepted of R that reached it: beta-binomial with mean R m and variance R D m (1 - m). D is the
          design effect (Kish 1965) over texts: how many texts a page holds is not counted, and this needs not know it
baseline  m and D over n texts of a recording, by the ratio estimator: texts of many rounds may be accepted less. Posterior:
          D by a scaled inverse chi-square of n - 1 degrees, given D the logit of m normal
change    from some page on, the logit is lower by one of FALLS, equally probable; the j-th page with prior 1 / (j (j + 1))
evidence  probability of all counts under the change / under none, both mixed over the same posterior; its mean over positions

Approximate: the posterior in the place of the true m (the 2 % hold on average over recordings), D constant, the logit normal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.special import betaln, expit, logit, logsumexp
from scipy.stats import chi2, norm

from analysis.loads.engine_counts import PositionCounts
from analysis.tables.bootstrap import Array
from toolkit.errors import InputError

FALSE_ALARMS = 0.02
FALLS = 0.05 * 2.0 ** np.arange(6)  # of the logit: .05 to 1.6, at m = .5 a fall of .01 to .33
EFFECTS = np.arange(1, 10, 2) / 10  # quantiles of D's posterior
FEWEST_TEXTS, FEWEST_ROUNDS = 20, 40
STEP = 10  # pages are joined until a position has so many rounds times D
WIDTH, FINEST = 6, 0.001  # of the grid of logits: standard deviations on each side, distance


@dataclass(frozen=True)
class Estimate:
    """A position's acceptance in a recording: its mean m, the design effect D, and what they rest on."""

    mean: float
    effect: float
    texts: int
    rounds: float

    @classmethod
    def of(cls, reached: Array, accepted: Array) -> Estimate:
        """Of rounds [n] of n texts; half a round more of either outcome keeps m within (0, 1)."""
        reached, accepted = reached[reached > 0], accepted[reached > 0]
        texts, rounds = len(reached), reached.sum()
        mean = (accepted.sum() + 0.5) / (rounds + 1)
        variance = ((accepted - mean * reached) ** 2).sum() * texts / max(texts - 1, 1)
        return cls(mean, max(1.0, variance / (max(rounds, 1) * mean * (1 - mean))), texts, rounds)

    @property
    def is_enough(self) -> bool:
        return self.texts >= FEWEST_TEXTS and self.rounds >= FEWEST_ROUNDS

    def effects(self) -> Array:
        """Quantiles of D's posterior [E, 1], at least 1; a little more, for the beta-binomial."""
        freedom = self.texts - 1
        return np.maximum(1.01, self.effect * freedom / chi2.isf(EFFECTS, freedom))[:, None]

    def spread(self, effect: Any, rounds: float) -> Any:
        """Standard deviation of the logit over so many rounds."""
        return np.sqrt(effect / (rounds * self.mean * (1 - self.mean)))

    def interval(self) -> list[float]:
        """Where m is with 95 %."""
        margin = 1.96 * self.spread(self.effect, self.rounds)
        return [float(expit(logit(self.mean) + sign * margin)) for sign in (-1, 1)]


def evidence(baseline: Estimate, reached: Array, accepted: Array) -> tuple[Array, Array]:
    """Log evidence [T] that a position has fallen, after each of T pages, and the page [T] since which it most likely has."""
    effects = baseline.effects()  # [E, 1]
    spread = baseline.spread(effects, baseline.rounds)
    step = max(FINEST, min(spread.min(), baseline.spread(1, max(reached.sum(), 1))) / 3)
    half, shifts = int(np.ceil(WIDTH * spread.max() / step)), np.maximum(1, np.round(FALLS / step)).astype(int)
    edge, size = shifts.max(), 2 * half + 1
    logits = logit(baseline.mean) + step * np.arange(-half - edge, half + 1)
    # log probabilities of all counts so far: with no change [E, size], with one, by the fall [FALLS, E, size]
    unchanged = norm.logpdf(logits[edge:], logit(baseline.mean), spread)
    unchanged -= logsumexp(unchanged, axis=1, keepdims=True) + np.log(len(effects))
    changed = np.full((len(shifts), *unchanged.shape), -np.inf)
    best_change, since = changed.copy(), np.zeros(changed.shape, dtype=int)  # the best page alone
    logs, starts, first, steps, rounds, kept = np.zeros(len(reached)), np.zeros(len(reached), dtype=int), 0, 0, 0.0, 0.0
    for page, (more_rounds, more_kept) in enumerate(zip(reached, accepted, strict=True)):
        rounds, kept = rounds + more_rounds, kept + more_kept
        if rounds >= STEP * baseline.effect:
            steps += 1
            begins = unchanged - np.log(steps * (steps + 1) * len(shifts))
            since = np.where(begins > best_change, first, since)
            terms = _log_likelihood(logits, effects, rounds, kept)
            fallen = np.stack([terms[:, edge - shift :][:, :size] for shift in shifts])
            changed = np.logaddexp(changed, begins) + fallen
            best_change = np.maximum(best_change, begins) + fallen
            unchanged = unchanged + terms[:, edge:]
            first, rounds, kept = page + 1, 0.0, 0.0
        if steps:
            logs[page] = np.logaddexp(logsumexp(changed) - logsumexp(unchanged), -np.log(steps + 1))
            starts[page] = since.flat[best_change.argmax()]
    return logs, starts


def _log_likelihood(logits: Array, effects: Array, rounds: float, kept: float) -> Array:
    """Beta-binomial of the design effects [E, 1], but for what is the same everywhere; [E, G]."""
    means, weight = expit(logits), np.maximum(rounds - effects, 1) / (effects - 1)
    a, b = means * weight, (1 - means) * weight
    return betaln(kept + a, rounds - kept + b) - betaln(a, b)


def watch(baseline: PositionCounts, pages: Sequence[PositionCounts], names: Sequence[str]) -> dict[str, Any]:
    """What `diagnosis.json` holds of pages of counters, in order, beside a recording. Raises InputError for too few counts."""
    reached, accepted = _between(baseline, pages, names)
    estimates = [Estimate.of(*counts) for counts in zip(baseline.reached.T, baseline.accepted.T, strict=True)]
    watched = [at for at, estimate in enumerate(estimates) if estimate.is_enough]
    if not estimates[0].is_enough:
        got = f"{estimates[0].rounds:g} rounds of {estimates[0].texts} texts"
        raise InputError(f"baseline: too few, {got}: {FEWEST_ROUNDS} of {FEWEST_TEXTS} are needed")
    if (size := reached[:, 0].sum()) < (needed := max(FEWEST_ROUNDS, STEP * estimates[0].effect)):
        raise InputError(f"counts: too few, {size:g} rounds between the pages: {needed:.0f} are needed")
    several = [evidence(estimates[at], reached[:, at], accepted[:, at]) for at in watched]
    logs, starts = (np.array(each) for each in zip(*several, strict=True))  # [positions, T]
    mean = logsumexp(logs, axis=0) - np.log(len(watched))
    alarms = np.flatnonzero(mean >= -np.log(FALSE_ALARMS))
    fell = len(alarms) > 0
    page = int(alarms[0]) if fell else len(mean) - 1
    row = int(logs[:, page].argmax()) if fell else 0
    since = int(starts[row, page]) if fell else 0
    positions = [
        {
            "position": at + 1,
            "counted": accepted[since:, at].sum() / max(reached[since:, at].sum(), 1),
            "recorded": estimates[at].mean,
            "interval": estimates[at].interval(),
        }
        for at in watched
    ]
    counted, recorded, (low, high) = (positions[row][key] for key in ("counted", "recorded", "interval"))
    what = f"has fallen by {recorded - counted:.3f}" if fell else "has not fallen"
    shares = f"accepted {counted:.3f} since {names[since]}, recorded {recorded:.3f} [{low:.3f}, {high:.3f}]"
    limit = f"evidence {np.exp(min(mean[page], 700)):.3g}, an alarm at {1 / FALSE_ALARMS:g}"
    return {
        "sentence": f"position {watched[row] + 1} {what}: {shares}; {limit}",
        "fell": fell,
        "position": watched[row] + 1 if fell else None,
        "since": names[since],
        "alarm": names[page + 1] if fell else None,
        "log_evidence": mean.tolist(),
        "positions": positions,
    }


def _between(baseline: PositionCounts, pages: Sequence[PositionCounts], names: Sequence[str]) -> tuple[Array, Array]:
    """Rounds [T, K] that reached a position, and accepted it, between pages. Rounds that drafted less count where they may."""
    if len(pages) < 2:
        raise InputError("counts: expected two /metrics pages or more, in order; got one")
    if baseline.whole_server:
        raise InputError("baseline: expected answers, a line per text with counts by round; got sums over all texts")
    for page, name in zip(pages, names, strict=True):
        if not page.whole_server:
            raise InputError(f"{name}: expected a /metrics page, got answers: give those as responses=")
        if page.longest != baseline.longest:
            raise InputError(f"{name}: expected the baseline's {baseline.longest} positions, got {page.longest}")
    reached, accepted = [], []
    for (before, page), name in zip(pairwise(pages), names[1:], strict=True):
        kept, rounds = page.accepted[0] - before.accepted[0], page.reached[0] - before.reached[0]
        drafted = page.drafted - before.drafted
        missing = page.longest * (page.rounds - before.rounds) - drafted
        if kept.min() < 0 or np.diff([rounds[0], *kept]).max() > 0 or missing < 0 or drafted < kept.sum():
            raise InputError(
                f"{name}: counters below those of the page before, or more accepted since than rounds can: a server began "
                "again; give pages since"
            )
        fewer = missing / np.arange(page.longest, 0, -1) * (np.arange(page.longest) > 0)
        reached.append(np.maximum(kept, rounds - fewer))
        accepted.append(kept)
    return np.array(reached), np.array(accepted)

"""The rows of `analysis.replay.predictors`: what predicts acceptance, how it is replayed at many levels, and what it says.

    confidence        q of the drawn token; `tail product`: the product over the round
    online, cold      the online logistic, begun again with every text
    online, carried   its weights carried from text to text; the level is the one that `online, cold` chose
    online, warm      carried through the domain's tuning texts, then fixed
    log odds, fitted  its form, fitted to the domain's tuning texts at once; `and log ratio`: with the second number of q
    statistics        fitted to the recordings of `statistics`; `of DOMAIN`: to that domain's tuning texts alone; `that ship`:
                      the weights of the package
    heads             trained ones, by kind and positions of training
    perfect confidence  sum min(p, q) of this position known, and nothing of the drawn token or of later positions

Shapes: n tokens, M most tokens of a round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.replay.fit_samples import Samples
from analysis.replay.fit_statistics import chosen_fit
from analysis.replay.head_folders import CandidateHead
from analysis.tables.grid import FIXED, ORACLE, UPPER_BOUND
from analysis.tables.rows import COUNTS, Array
from toolkit.acceptance import Confidence as ConfidenceEstimator
from toolkit.acceptance import OnlineLogistic, PrereadHead, StatisticsEstimator
from toolkit.acceptance.calibration.by_depth import ByDepth, Calibration
from toolkit.acceptance.folder import scorer_with
from toolkit.acceptance.online import RowLogistic
from toolkit.acceptance.statistics import OUTPUTS
from toolkit.costs.load import LoadCost
from toolkit.stopping import Bounded, Confidence, OnlineRate, Rate, Tail
from toolkit.trace import Trace, bounds
from toolkit.trace.replay import Replayed, by_rounds, carried, sweep_levels
from toolkit.trace.steps import RecordedStep, step_after
from toolkit.types import DraftStep

CARRIED, COLD, WARM, STATISTICS = "online, carried", "online, cold", "online, warm", "statistics"
SHIPPED = "statistics that ship"
NAMES = {FIXED: "best fixed K", UPPER_BOUND: "upper bound"}  # of rows, where tables call them otherwise


@dataclass(frozen=True)
class Predictor:
    """One row of the table.

    counts     of a trace at every level, `counted` [levels, texts, counts + M + 1]
    estimator  gives `drawn_probs`, or `read_prob`, of recorded steps; None: it predicts none
    call       one estimate of a token, to be timed; None: nothing is estimated
    positions  of training; None: not known, or none
    at         the row whose chosen level this one takes
    """

    counts: Callable[[Trace, list[float]], Array]
    estimator: Any = None
    call: Callable[[DraftStep], Any] | None = None
    needs_states: bool = False
    positions: int | None = None
    at: str | None = None


@dataclass(frozen=True)
class PerfectConfidence:
    """sum min(p, q) of recorded positions: what the best estimator before the draw would say."""

    def bind(self, pair: Any) -> PerfectConfidence:
        """Return the estimator itself."""
        return self

    def drawn_probs(self, step: Any) -> tuple[Tensor, Tensor]:
        """alpha of the step [B], and 1: nothing is known of the next one."""
        alpha = step.trace.alpha[step.index]
        return alpha, torch.ones_like(alpha)


def counted(replayed: Replayed) -> Array:
    """Every text's counts, then its rounds that drafted 0, 1, 2, ... tokens [texts, counts + M + 1]."""
    return np.concatenate([replayed.per_text, replayed.drafted], 1)


def of_policy(policy: Any, **facts: Any) -> Predictor:
    """The row of a threshold policy without memory."""

    def counts(trace: Trace, levels: list[float]) -> Array:
        return np.stack([counted(replayed) for replayed in sweep_levels(trace, policy, levels, 1)])

    return Predictor(counts, **facts)


def of_estimator(estimator: Any, **facts: Any) -> Predictor:
    """The row of the rate rule with an estimator."""
    facts = {"call": estimator.drawn_probs, **facts}
    return of_policy(Rate(estimator, rate=1.0), estimator=estimator, **facts)


def of_statistics(part: Samples, form: str, seed: int) -> Predictor:
    """The row of statistics fitted to all samples."""
    outputs = {name: chosen_fit(name, part, form, seed) for name in OUTPUTS}
    return of_estimator(StatisticsEstimator(outputs=outputs), positions=len(part.depth))


def of_head(head: CandidateHead, own: Any) -> Predictor:
    """The row of a trained head."""
    policy = head.policy(corrected=True)
    return of_policy(
        policy, estimator=policy.estimator, call=scorer_with(head.head, own, "cpu"), needs_states=True,
        positions=head.card.get("num_positions"),
    )  # fmt: skip


def head_labels(heads: list[CandidateHead]) -> dict[str, CandidateHead]:
    """Heads by what a reader tells them apart by: kind, positions of training, products; else their folder, too."""
    labelled: dict[str, CandidateHead] = {}
    for head in heads:
        kind = "pre-read head" if isinstance(head.head, PrereadHead) else "SpecDec++ head"
        kind += " with products" if getattr(head.head, "products", False) else ""
        name = f"{kind}, {positions:,}" if (positions := head.card.get("num_positions")) else kind
        labelled[name if name not in labelled else f"{name} {head.name}"] = head
    return labelled


def online(trace: Trace, level: float) -> Bounded:
    """The online logistic's policy at a level."""
    return Bounded(OnlineRate(OnlineLogistic(), cost_ratio=1.0, rate=level), 1, trace.max_drafted).bind(None)


def warm(dev: Trace, level: float) -> Predictor:
    """The online logistic with the weights that it has after the texts of a recording."""
    _, state = carried(dev, online(dev, level))
    return of_estimator(RowLogistic(state["slope"], state["intercepts"]), positions=dev.num_positions)


def untrained() -> dict[str, Predictor]:
    """The rows that nothing is fitted for before."""

    def expected(trace: Trace, levels: list[float]) -> Array:
        counts = np.array([[text[name] for name in COUNTS] for text in bounds.oracle(trace, trace.max_drafted)])
        return np.stack([np.concatenate([counts, bounds.oracle_lengths(trace)], 1)] * len(levels))

    def replayed(of: Callable[[Trace, float], Any]) -> Callable[[Trace, list[float]], Array]:
        return lambda trace, levels: np.stack([counted(of(trace, level)) for level in levels])

    confidence = ConfidenceEstimator()
    return {
        FIXED: Predictor(lambda trace, levels: np.stack([counted(each) for each in bounds.fixed(trace).values()])),
        "confidence": of_policy(Confidence(0.5), estimator=confidence, call=confidence.drawn_probs),
        "tail product": of_policy(Tail(0.5), call=confidence.drawn_probs),
        SHIPPED: of_estimator(StatisticsEstimator().bind(None)),
        COLD: Predictor(replayed(lambda trace, level: by_rounds(trace, online(trace, level)))),
        CARRIED: Predictor(replayed(lambda trace, level: carried(trace, online(trace, level))[0]), at=COLD),
        "perfect confidence": of_policy(Rate(PerfectConfidence(), rate=1.0), estimator=PerfectConfidence()),
        UPPER_BOUND: Predictor(replayed(bounds.at_price)),
        ORACLE: Predictor(expected),
    }


def estimated(estimator: Any, trace: Trace, part: Samples) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Logits of P(accepted), labels and depths [n] each, of the positions that are read and labelled: `drawn`, `following`.

    An estimator that scores tokens once they are read says nothing of the following one.
    """
    columns = torch.full((2, len(part.depth)), torch.nan, dtype=torch.float64)
    for level in part.depth.unique().tolist():
        at_level = part.depth == level
        if hasattr(estimator, "drawn_probs"):
            probs = torch.stack(estimator.drawn_probs(RecordedStep(trace, level, part.steps[at_level])))
        else:
            reading, exists = step_after(trace, part.steps[at_level])
            read = estimator.read_prob(RecordedStep(trace, level + 1, reading)).where(exists, torch.nan)
            probs = torch.stack([read, torch.full_like(read, torch.nan)])
        columns[:, at_level] = probs.double().logit(eps=1e-6)
    labelled = {}
    for name, logits in zip(("drawn", "following"), columns, strict=True):
        chosen = ~(logits.isnan() | part.labels[name].isnan())
        if bool(chosen.any()):
            labelled[name] = (logits[chosen], part.labels[name][chosen], part.depth[chosen])
    return labelled


def without_level(trace: Trace, estimator: Any, cost: float | LoadCost) -> Array | None:
    """What an estimator's own rule counts at c or at a table of costs, no level chosen; None: it has no such rule."""
    if not hasattr(estimator, "drawn_probs"):
        return None
    if isinstance(cost, LoadCost):
        table = cost.apart("drafts that give blocks") if trace.blocks else cost
        rule = Rate(estimator, deepest=trace.max_drafted, table=table, blocks=trace.blocks)
    else:
        rule = Rate(estimator, cost)
    return counted(by_rounds(trace, Bounded(rule, 1, trace.max_drafted)))


def with_calibration(estimator: Any, calibration: Calibration) -> Any:
    """The estimator with a calibration of what it gives, after its own one; None for one that has none."""
    if not hasattr(estimator, "calibration"):
        return None
    own = dict(estimator.calibration.outputs)
    own |= {name: by_depth.after(own.get(name, ByDepth())) for name, by_depth in calibration.outputs.items()}
    return replace(estimator, calibration=Calibration(own))

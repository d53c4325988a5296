"""The stopping problem of SpecDec++ (Theorems 4.2 and 4.3), solved on recordings of the toy pair, against the rate rule.

The rate rule looks one token ahead. The value function looks ahead to the end of the round. A threshold on
P(some rejection) is the form that the paper's theorem gives. All three see the same head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from analysis.replay import dynamic_program, upper_bound
from analysis.replay.policies import replay_starts, sweep_levels
from analysis.tables.rows import throughput
from analysis.tables.standing import gain_over
from benchmarks.recorded import reading
from benchmarks.standing import BOOTSTRAP, DOMAINS, LEVELS, MAX_DRAFTED, AcceptedOnly, Array, recording
from toolkit import ModelPair, metrics
from toolkit.acceptance import HeadEstimator, PrereadEstimator
from toolkit.stopping import Bounded, Rate, Survival
from toolkit.trace import Trace, join
from toolkit.trace.rounds import Geometry

COST = 0.2  # draft forward / target forward
SPLITS = {"dev": 100, "test": 200}
DEPTHS = (1, 2, 4, 8)
HEADS = ("pre-read head", "acceptance head")


def mdp() -> str:
    """The rate rule against the solved stopping problem: tokens per target-forward time, and thresholds by tokens drafted."""
    pair = ModelPair.toy()
    traces = {d: tuple(recording(pair, d, split, count) for split, count in SPLITS.items()) for d in DOMAINS}
    lines = [
        "| head | domain | rate rule | one h | DP value | DP / rate rule | DP / one h |",
        "|---|---|" + "---:|" * 5,
    ]
    thresholds = [
        "| head | domain | 1 - lambda c | " + " | ".join(f"h after {k}" for k in DEPTHS) + " |",
        "|---|---|" + "---:|" * (1 + len(DEPTHS)),
    ]
    for head in HEADS:
        for domain, (dev, test) in traces.items():
            row, levels = _solved(pair, head, dev, test, COST)
            lines.append(f"| {head} | {domain} | {row} |")
            thresholds.append(f"| {head} | {domain} | {levels} |")
    about = f"""\
{SPLITS["test"]} test prompts per domain. Lambda of the rate rule and the one threshold h on P(some rejection) are those that
are best on {SPLITS["dev"]} dev prompts. The value function is a reference only: it is fitted to the texts of both, and each
text is decided by fits to others. c = {COST:g}, rounds of 1 to {MAX_DRAFTED} tokens, T = 1. In brackets 95 % intervals, paired
bootstrap over prompts. Below: h after k drafted tokens by the value function (Theorem 4.3), beside what the rate rule's
lambda says."""
    return "\n".join([about, "", *lines, "", *thresholds])


def _policies(pair: ModelPair, head: str) -> tuple[Any, Any]:
    """The rate rule and the threshold on survival, by one head."""
    if head == HEADS[0]:
        rate = reading(pair, Rate(PrereadEstimator()))
        return rate, Rate(AcceptedOnly(rate.estimator), rate=1.0)
    corrected = HeadEstimator(corrected=True)
    rate = reading(pair, Rate(PrereadEstimator(instead=corrected.bind(pair))))
    return rate, reading(pair, Survival(corrected))


def _solved(pair: ModelPair, head: str, dev: Trace, test: Trace, cost_ratio: float) -> tuple[str, str]:
    """One entry of both tables."""
    rate, survival = _policies(pair, head)
    solved = upper_bound.solve_policy(dev, rate, cost_ratio)
    priced = replace(rate, cost_ratio=cost_ratio, rate=solved.price)
    found = {"rate": replay_starts(test, Bounded(priced, 1, MAX_DRAFTED)).per_text}
    reached = [metrics.throughput(one.total, cost_ratio) for one in sweep_levels(dev, survival, LEVELS, 1)]
    (one,) = sweep_levels(test, survival, [LEVELS[int(np.argmax(reached))]], 1)
    found["h"] = one.per_text
    both = join([dev, test])
    estimator = rate.estimator if head == HEADS[0] else survival.estimator
    seen = dynamic_program.head_inputs(both, Geometry.of(both), estimator, MAX_DRAFTED)
    whole = dynamic_program.best_policy(both, seen, cost_ratio)
    found["dp"] = whole.replayed.per_text[dev.num_texts :]
    values = dynamic_program.stopping_values(both, seen, cost_ratio, whole.price)
    rates = [f"{float(throughput(found[name].sum(0), cost_ratio)):.3f}" for name in ("rate", "h", "dp")]
    over = [_over(found["dp"], found[name], cost_ratio) for name in ("rate", "h")]
    levels = [f"{1 - solved.price * cost_ratio:.2f}", *(f"{values.threshold(k):.2f}" for k in DEPTHS)]
    return " | ".join([*rates, *over]), " | ".join(levels)


def _over(counted: Array, others: Array, cost_ratio: float) -> str:
    ratio, low, high = gain_over(counted, others, cost_ratio, BOOTSTRAP).values()
    return f"{ratio:+.1%} [{low:+.1%}, {high:+.1%}]"

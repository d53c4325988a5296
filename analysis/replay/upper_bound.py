"""How good could a policy be on this trace? Best fixed K, the true-probability policy, the clairvoyant oracle.

The oracle knows the acceptance draws, which no method can. The **true-probability policy** does not know them. It knows p and q
at every position, on path and along the roll-outs, and drafts one more token iff

    (product of min(1, p/q) over the drafted tokens) * alpha at the next position > lambda * c

with lambda its own rate of tokens per target-forward time (Dinkelbach). No predictor of acceptance that stops by one-step
look-ahead can do better, so this is the upper bound that policies are compared with. One step ahead is not the optimum:
drafting on also buys the right to decide again. A price below lambda c makes up for much of that; docs/log.md has numbers.
`at_price` replays one price, and sweeps try many. `solve` keeps the best price that its iteration meets.

Shapes: P positions, M most tokens of a round, G policies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from analysis.replay.oracle import expected_counts
from analysis.replay.policies import first_below, replay_starts, score_table, visits, walk
from analysis.replay.tally import Replayed
from toolkit import metrics
from toolkit.errors import InputError
from toolkit.stopping import Bounded, Fixed, Thresholded
from toolkit.trace import Trace
from toolkit.trace.rounds import Geometry


@dataclass(frozen=True)
class Solved:
    """A cost-aware policy at the best price met: the rate reached, in tokens per target-forward time, and what it counts.

    price  the lambda that was played; at the fixed point it is the rate itself
    """

    rate: float
    price: float
    replayed: Replayed


def oracle(trace: Trace, max_drafted: int | None = None) -> list[dict[str, float]]:
    """Expected counts of the clairvoyant oracle, per text; in closed form from the acceptance draws' probabilities.

    Raises InputError for recordings by start: there a position has a draw for every round that may visit it.
    """
    if trace.run is not None:
        raise InputError(
            "the oracle needs a draft whose acceptance at a position does not depend on where its round began"
        )
    texts = zip(trace.text_first[:-1].tolist(), trace.text_first[1:].tolist(), strict=True)
    probs = trace.chance.double().numpy()
    return [expected_counts(probs[first:last], max_drafted) for first, last in texts]


def fixed(trace: Trace, most: int | None = None) -> dict[int, Replayed]:
    """Every fixed K from 0 (autoregressive decoding) on."""
    limit = trace.max_drafted if most is None else most
    return {k: replay_starts(trace, Bounded(Fixed(k), min(k, 1), k)) for k in range(limit + 1)}


def best_fixed(trace: Trace, cost_ratio: float, most: int | None = None) -> tuple[int, Replayed]:
    """The K of the highest rate over all texts."""
    by_length = fixed(trace, most)
    best = max(by_length, key=lambda k: metrics.throughput(by_length[k].total, cost_ratio))
    return best, by_length[best]


def true_probability(trace: Trace, cost_ratio: float, min_drafted: int = 0) -> Solved:
    """The policy that knows p and q, but not the acceptance draws. Raises InputError if the trace does not hold them."""
    geometry = Geometry.of(trace)
    worth, possible = known_worth(trace, geometry)
    return solve(trace, geometry, worth, possible, cost_ratio, min_drafted)


def at_price(trace: Trace, price: float, min_drafted: int = 0) -> Replayed:
    """The same policy at a given price of a draft forward, lambda c, in tokens. Raises InputError likewise."""
    geometry = Geometry.of(trace)
    worth, possible = known_worth(trace, geometry)
    return play(trace, geometry, worth, possible, price, min_drafted)


def known_worth(trace: Trace, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The true worth of the next draft after 0, 1, ... drafted tokens [M + 1, P], and how many are possible [P].

    Raises InputError if the trace does not hold p and q along the roll-outs.
    """
    if bool(trace.alpha.isnan().any()):
        raise InputError(
            "this trace does not hold the target's distributions along the roll-outs: record it with upper_bound=true"
        )
    survival = torch.ones(trace.num_positions)
    possible = torch.zeros(trace.num_positions, dtype=torch.long)
    scores = []
    for _, index, can_draft in visits(trace, geometry, trace.max_drafted):
        possible += can_draft
        scores.append(torch.where(can_draft, survival * trace.alpha[index], 0.0))
        survival = survival * trace.accept_prob[index]
    # Row k is the worth of draft k + 1, known after k tokens; after the last one there is nothing to gain.
    return torch.stack([*scores, torch.zeros_like(survival)]), possible


def solve_policy(trace: Trace, policy: Thresholded, cost_ratio: float, min_drafted: int = 1) -> Solved:
    """A policy whose score is the next token's worth (`Rate`; SpecDec++, whose h it sets) at its own rate, no threshold.

    policy  bound, with recorded heads; its level is not used
    """
    geometry = Geometry.of(trace)
    scores, possible = score_table(trace, geometry, policy, trace.max_drafted)
    certain = torch.ones_like(scores[:1])
    worth = torch.cat([certain, scores[:-1], torch.zeros_like(certain)])
    return solve(trace, geometry, worth, possible, cost_ratio, min_drafted, start_counts=False)


def solve(
    trace: Trace,
    geometry: Geometry,
    worth: Tensor,
    possible: Tensor,
    cost_ratio: float,
    min_drafted: int = 0,
    start_counts: bool = True,
) -> Solved:
    """The best price met on the way to the fixed point of "draft another while its worth exceeds lambda c".

    Starts at lambda = 1. The fixed point itself can be up to 3 % worse: see docs/log.md.
    worth [M + 1, P]: after 0, 1, ... drafted tokens, the probability that the next one enters the text.
    start_counts  whether lambda = 1 may be the best: for a bound it may, but it is no lambda to decode with
    """
    rate, best = 1.0, None
    for step in range(50):
        replayed = play(trace, geometry, worth, possible, rate * cost_ratio, min_drafted)
        reached = metrics.throughput(replayed.total, cost_ratio)
        settled = abs(reached - rate) < 1e-9
        if (start_counts or step or settled) and (best is None or reached > best.rate):
            best = Solved(reached, rate, replayed)
        if settled:
            break
        rate = reached  # on one sample of acceptance draws it can end in a small cycle: the best of what was met counts
    assert best is not None
    return best


def play(
    trace: Trace, geometry: Geometry, worth: Tensor, possible: Tensor, price: float, min_drafted: int = 0
) -> Replayed:
    """What "draft another while its worth [M + 1, P] reaches the price" counts; at least `min_drafted` in a round."""
    lengths = first_below(worth, possible + 1, torch.tensor([price]), min_drafted + 1) - 1
    (replayed,) = walk(trace, geometry, lengths, lengths)
    return replayed

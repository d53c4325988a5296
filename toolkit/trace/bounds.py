"""How good could a policy be on this trace? Best fixed K, the true-probability policy, the clairvoyant oracle.

The **oracle** knows the acceptance draws, which no method can: it never drafts a token that will be rejected. Given a text
X_1..X_N of the target, position i is an accepted draft with probability

    a_i = min(1, q(X_i) / p(X_i)),        p and q warped as in decoding, given X_<i,

independently for all i. The oracle drafts exactly the accepted positions. Every other position costs a target forward, which
produces its token as the extra one of a round. The last token is never drafted, because the forward that ends the last round
yields it for free. So nothing is discarded, and

    E[draft calls]  = sum of a_i over i < N          E[target calls] = 1 + sum of (1 - a_i) over i < N

A round has at most `max_drafted` drafted tokens. The position that follows a full round is produced by the round's target
forward, whatever its acceptance draw says. The expectation then is a dynamic program over the tokens drafted so far in the
round.

The **true-probability policy** does not know them. It knows p and q
at every position, on path and along the roll-outs, and drafts one more token iff

    (product of min(1, p/q) over the drafted tokens) * alpha at the next position > lambda * c

with lambda its own rate of tokens per target-forward time (Dinkelbach). No predictor of acceptance that stops by one-step
look-ahead can do better, so this is the upper bound that policies are compared with. One step ahead is not the optimum:
drafting on also buys the right to decide again. A price below lambda c makes up for much of that; docs/log.md has numbers.
`at_price` replays one price, and sweeps try many. `solve` keeps the best price that its iteration meets.

Of a **block** the draft forward is paid for once. The policy then knows the whole block with its tokens, before it is drafted:
it is drafted iff the best number of its positions is worth more than lambda c, beyond lambda times the price of their columns.
No policy knows that much, so it stays a bound.

Shapes: N produced tokens of a text, P positions, M most tokens of a round, G policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit import metrics
from toolkit.errors import InputError
from toolkit.models.pair import ModelPair
from toolkit.models.teacher import Text, distributions_along, picked
from toolkit.sampling import Sampling
from toolkit.stopping import Bounded, Fixed, Thresholded
from toolkit.trace import Trace
from toolkit.trace.replay import Replayed, by_starts, check_no_grammar, first_below, score_table, visits, walk
from toolkit.trace.steps import Geometry

Array = NDArray[np.float64]


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
    return [expected_counts(probs, max_drafted) for probs in _text_probs(trace)]


def oracle_lengths(trace: Trace) -> Array:
    """Its expected rounds of each text by the tokens that they draft [T, M + 1]. Raises InputError likewise."""
    return np.stack([expected_lengths(probs, trace.max_drafted)[0] for probs in _text_probs(trace)])


def _text_probs(trace: Trace) -> list[Array]:
    """a_1..a_N of every text."""
    check_no_grammar(trace, "the oracle")
    if trace.run is not None:
        raise InputError(
            "the oracle needs a draft whose acceptance at a position does not depend on where its round began"
        )
    return np.split(trace.text_accept_prob.double().numpy(), trace.text_first[1:-1].numpy())


def expected_counts(accept_probs: Array, max_drafted: int | None = None) -> dict[str, float]:
    """Expected counts of the oracle on one text, from a_1..a_N, by the names of `toolkit.types.Counts`.

    max_drafted  most drafted tokens in a round; None: no limit
    """
    if max_drafted is not None and max_drafted < 0:
        raise InputError(f"oracle.max_drafted: expected 0 or more, or null, got {max_drafted}")
    free = accept_probs[:-1]
    drafted = float(free.sum())
    if max_drafted is not None:
        _, drafted = expected_lengths(accept_probs, max_drafted)
    length = float(len(accept_probs))
    counts = {"num_drafted": drafted, "num_draft_calls": drafted, "num_target_calls": length - drafted}
    return {**counts, "num_generated": length, "num_discarded": 0.0}


def expected_lengths(accept_probs: Array, max_drafted: int) -> tuple[Array, float]:
    """Its expected rounds that draft 0, 1, ... tokens [max_drafted + 1], and the tokens drafted in all of them."""
    depth = np.zeros(max_drafted + 1)  # probability of each number of tokens drafted so far in the round
    depth[0], drafted, rounds = 1.0, 0.0, np.zeros(max_drafted + 1)
    for prob in accept_probs[:-1]:
        goes_on = depth[:-1] * prob
        rounds += depth - np.append(goes_on, 0.0)
        drafted += float(goes_on.sum())
        depth = np.concatenate([[1.0 - goes_on.sum()], goes_on])
    return rounds + depth, drafted


def acceptance_probs(
    pair: ModelPair,
    sequences: Sequence[Text],
    sampling: Sampling,
    draft_temperature: float | None = None,
    batch_size: int = 8,
    on_text: Callable[[int], object] = lambda count: None,
) -> list[Array]:
    """a_1..a_N of every text, by one teacher-forced pass of the target and one of the (first) draft.

    on_text  called after each text with the number of its tokens
    """
    pair.check_has_draft("the oracle")
    for prompt, produced in sequences:
        if len(prompt) + len(produced) > pair.max_length:
            raise InputError(f"oracle: a text of {len(prompt) + len(produced)} tokens exceeds {pair.context}")
    order = [number for number, (prompt, produced) in enumerate(sequences) if len(prompt) and len(produced)]
    order.sort(key=lambda number: len(sequences[number][0]) + len(sequences[number][1]))  # little padding
    accept_probs: list[Array] = [np.zeros(0)] * len(sequences)
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        batch = [sequences[number] for number in numbers]
        distributions = distributions_along(pair, batch, sampling, draft_temperature)
        for number, (_, produced), (target_probs, draft_probs) in zip(numbers, batch, distributions, strict=True):
            tokens = torch.tensor(list(produced), device=target_probs.device)
            p, q = picked(target_probs, tokens), picked(draft_probs, tokens)
            # A token of target probability 0 comes from rounding or from elsewhere; the draft may still have it.
            ratio = torch.where(p <= 0, q.sign(), q / p)
            accept_probs[number] = ratio.clamp(max=1).double().cpu().numpy()
            on_text(len(produced))
    return accept_probs


def fixed(trace: Trace, most: int | None = None) -> dict[int, Replayed]:
    """Every fixed K from 0 (autoregressive decoding) on."""
    limit = trace.max_drafted if most is None else most
    return {k: by_starts(trace, Bounded(Fixed(k), min(k, 1), k)) for k in range(limit + 1)}


def best_fixed(trace: Trace, cost_ratio: float, most: int | None = None) -> tuple[int, Replayed]:
    """The K of the highest rate over all texts."""
    by_length = fixed(trace, most)
    best = max(by_length, key=lambda k: metrics.throughput(by_length[k].total, cost_ratio))
    return best, by_length[best]


def true_probability(
    trace: Trace, cost_ratio: float, min_drafted: int = 0, columns: Sequence[float] | None = None
) -> Solved:
    """The policy that knows p and q, but not the acceptance draws. Raises InputError if the trace does not hold them.

    columns  of blocks: what the target forward costs more for each position in turn [M], in its own passes; None: nothing
    """
    geometry = Geometry.of(trace)
    worth, possible = known_worth(trace, geometry)
    return solve(trace, geometry, worth, possible, cost_ratio, min_drafted, columns=columns)


def at_price(trace: Trace, price: float, min_drafted: int = 0) -> Replayed:
    """The same policy at a given price of a draft forward, lambda c, in tokens. Raises InputError likewise."""
    geometry = Geometry.of(trace)
    worth, possible = known_worth(trace, geometry)
    return play(trace, geometry, worth, possible, price, min_drafted)


def known_worth(trace: Trace, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The true worth of the next draft after 0, 1, ... drafted tokens [M + 1, P], and how many are possible [P].

    Raises InputError if the trace does not hold p and q along the roll-outs.
    """
    check_no_grammar(trace, "an upper bound")
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
    columns: Sequence[float] | None = None,
) -> Solved:
    """The best price met on the way to the fixed point of "draft another while its worth exceeds lambda c".

    Starts at lambda = 1. The fixed point itself can be up to 3 % worse: see docs/log.md.
    worth [M + 1, P]: after 0, 1, ... drafted tokens, the probability that the next one enters the text.
    start_counts  whether lambda = 1 may be the best: for a bound it may, but it is no lambda to decode with
    columns       as in `true_probability`
    """
    rate, best = 1.0, None
    extra = torch.zeros(trace.max_drafted) if columns is None else torch.tensor(list(columns))
    read = torch.nn.functional.pad(extra.double().cumsum(0), (1, 0)).numpy()
    for step in range(50):
        replayed = play(trace, geometry, worth, possible, rate * cost_ratio, min_drafted, rate * extra)
        total = replayed.total
        spent = metrics.cost(total.num_draft_calls, total.num_target_calls, cost_ratio) + replayed.lengths @ read
        reached = float(total.num_generated / spent)
        settled = abs(reached - rate) < 1e-9
        if (start_counts or step or settled) and (best is None or reached > best.rate):
            best = Solved(reached, rate, replayed)
        if settled:
            break
        rate = reached  # on one sample of acceptance draws it can end in a small cycle: the best of what was met counts
    assert best is not None
    return best


def play(
    trace: Trace,
    geometry: Geometry,
    worth: Tensor,
    possible: Tensor,
    price: float,
    min_drafted: int = 0,
    columns: Tensor | None = None,
) -> Replayed:
    """What "draft another while its worth [M + 1, P] reaches the price" counts; at least `min_drafted` in a round.

    Of blocks: "draft one if the best number of its positions reaches the price, beyond that of their columns [M]".
    """
    if trace.blocks:
        prices = torch.zeros(trace.max_drafted) if columns is None else columns
        gains = torch.nn.functional.pad((worth[:-1] - prices.unsqueeze(1)).cumsum(0), (0, 0, 1, 0))
        beyond = torch.arange(len(gains)).unsqueeze(1) > possible
        gain, lengths = gains.masked_fill(beyond, -torch.inf).max(0)
        lengths = torch.where(gain >= price, lengths, 0).clamp(min=min_drafted).minimum(possible)
    else:
        lengths = first_below(worth, possible + 1, torch.tensor([price]), min_drafted + 1)[0] - 1
    (replayed,) = walk(trace, geometry, lengths.unsqueeze(0), trace.calls(lengths).unsqueeze(0))
    return replayed

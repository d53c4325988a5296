"""What a head's information is worth: the best stopping policy that sees a given head's outputs, by dynamic programming.

A round is an optimal stopping problem. After k drafted tokens a policy has seen x_k, the head's outputs so far. Drafting
one more yields g_{k+1} - lambda c and the right to decide again. Here g_{k+1} is the number of tokens that the round gains
by it. It is 1 if all k + 1 drafted tokens are accepted, else 0, and it is 0 after the text's end. So the value of drafting is

    Q_k(x) = E[ g_{k+1} - lambda c + max(0, Q_{k+1}(x_{k+1})) | x_k = x ],      draft another iff Q_k(x_k) > 0

The fit goes backwards over k. Boosted trees are fitted to what the policy found so far really earns from there on. So no
maximum is taken over fitted values, and there is no optimism (Longstaff and Schwartz 2001). They correct what the head
itself says of the next token. The fit is crossed: each text is decided by functions fitted to other texts. lambda is the
rate that the policy itself achieves (Dinkelbach), as in `analysis.replay.upper_bound`.
Deviation: all starts of a round have equal weight in the fit, whether or not the policy's rounds would start there. A choice
bounds what that and the noise of the fits cost. Two simpler kinds of policy see the same outputs: the one-step look-ahead at
many prices, and the survival threshold at many levels. Each text is played by the candidate that costs least on the texts of
the other folds.

Paper: SpecDec++ (arXiv:2405.19715). By Theorem 4.2 a stationary optimal policy exists and solves the Bellman equation, Q here.
By Theorem 4.3 one stops where P(some rejection) >= (c2 + Delta)/(c1 + c2 + Delta). There c1 is the cost of a draft forward,
c1 + c2 that of a target forward, and Delta is unknown. The renewal form replaces the unknown by lambda, the policy's own rate.
Its one-step look-ahead stops where P(all drafted tokens and the next one are accepted) < lambda c. Suppose
that the next token is sure to be accepted when all before it are. Then this is Theorem 4.3 with h = 1 - lambda c and
Delta = 1/lambda - 1 target forwards.
`stopping_values` gives Q.

Shapes: P starts, M most tokens of a round, C candidates, T texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analysis.replay.policies import GROUP, first_below, visits, walk
from analysis.replay.tally import Replayed
from analysis.replay.upper_bound import Solved
from toolkit import metrics
from toolkit.trace import Trace
from toolkit.trace.rounds import Geometry
from toolkit.trace.step import RecordedStep

Array = NDArray[np.float64]
PRICES = torch.arange(0.3, 1.25, 0.01)  # of candidates, in units of lambda c
LEVELS = [0.02 * i for i in range(1, 50)]


@dataclass(frozen=True)
class Seen:
    """What a policy has seen after k = 1..M drafted tokens: inputs [M, P, 4]; and what can be drafted [P]."""

    inputs: Array
    possible: Tensor

    @property
    def survival(self) -> Array:
        """What the policy's estimates say of the tokens drafted so far: the probability that all are accepted [M, P]."""
        return self.inputs[:, :, 0]

    @property
    def worth(self) -> Array:
        """The probability that the next token enters the text [M, P]."""
        return self.inputs[:, :, -1]


@dataclass(frozen=True)
class Values:
    """Q of Theorem 4.2 on a recording: what drafting one more token is worth after k = 1..M, in tokens.

    price           lambda c, the tokens that a draft forward costs
    survival, worth [M, P]  of the head, and of going on; worth is not a number where nothing can be drafted
    """

    price: float
    survival: Array
    worth: Array

    def threshold(self, k: int) -> float:
        """h after k tokens: going on only where P(some rejection) <= h earns most. Theorem 4.3's, with the best Delta."""
        reached = ~np.isnan(self.worth[k - 1])
        rejected, worth = 1 - self.survival[k - 1][reached], self.worth[k - 1][reached]
        order = rejected.argsort(kind="stable")
        earned = worth[order].cumsum()
        if not len(earned) or earned.max() <= 0:
            return 0.0
        return float(rejected[order][earned.argmax()])

    def table(self, k: int, num_bins: int = 5) -> list[dict[str, float]]:
        """After k tokens, by P(some rejection) in even parts of [0, 1]: states, mean worth, share that goes on."""
        reached, lines = ~np.isnan(self.worth[k - 1]), []
        part = np.minimum(((1 - self.survival[k - 1]) * num_bins).astype(int), num_bins - 1)
        for number in range(num_bins):
            here = self.worth[k - 1][reached & (part == number)]
            if len(here):
                facts = {"from": number / num_bins, "to": (number + 1) / num_bins, "states": float(len(here))}
                lines.append({"k": float(k), **facts, "worth": float(here.mean()), "goes on": float((here > 0).mean())})
        return lines


def head_inputs(trace: Trace, geometry: Geometry, estimator: Any, most: int) -> Seen:
    """What a policy sees of a head: survival, the newest token's probability, the next one's, worth, k.

    estimator  a pre-read head's (`drawn_probs`), or an acceptance head's (`read_prob`). The latter has scored all but the
               newest token; its last score is used for the newest and for the next one
    """
    survival, possible = torch.ones(trace.num_positions), torch.zeros(trace.num_positions, dtype=torch.long)
    rows = []
    for depth, index, can_draft in visits(trace, geometry, most):
        possible += can_draft
        step = RecordedStep(trace, depth, index)
        if hasattr(estimator, "drawn_probs"):
            accepted, following = estimator.drawn_probs(step)
        else:
            following = estimator.read_prob(step)
            accepted = torch.ones_like(following) if depth == 1 else following
        survival = survival * accepted
        rows.append(torch.stack([survival, accepted, following, survival * following], 1).double().numpy())
    return Seen(np.stack(rows), possible)


def stopping_values(trace: Trace, seen: Seen, cost_ratio: float, rate: float, folds: int = 10) -> Values:
    """Q of Theorem 4.2 at a rate (`best_policy(...).price`), on these inputs; cross-fitted over texts."""
    text, fold_of = _folds(trace, folds)
    price = rate * cost_ratio
    _, worth = _decide(Geometry.of(trace), seen, fold_of[text].numpy(), folds, price)
    return Values(price, seen.survival, worth)


def _folds(trace: Trace, folds: int) -> tuple[Tensor, Tensor]:
    """The text of every position, and the fold of every text."""
    text = torch.repeat_interleave(torch.arange(trace.num_texts), trace.lengths())
    return text, torch.from_numpy(np.random.default_rng(0).permutation(trace.num_texts) % folds)


def best_policy(trace: Trace, seen: Seen, cost_ratio: float, folds: int = 10, rounds: int = 6) -> Solved:
    """The rate of the best policy on these inputs, and what it counts; cross-fitted over texts.

    rounds  most steps of the fixed point; at least one token is drafted in a round, as by the other policies
    """
    geometry = Geometry.of(trace)
    text, fold_of = _folds(trace, folds)
    rate, decisions = 1.0, []
    for _ in range(rounds):
        decisions.append(_decide(geometry, seen, fold_of[text].numpy(), folds, rate * cost_ratio)[0])
        reached = metrics.throughput(_played(trace, geometry, decisions[-1]).total, cost_ratio)
        if abs(reached - rate) < 1e-3:
            break
        rate = reached
    candidates = torch.cat([torch.stack(decisions), *_simple(seen, rate * cost_ratio)])
    choice = _cheapest_elsewhere(trace, geometry, candidates, fold_of, cost_ratio)
    replayed = _played(trace, geometry, candidates[choice[text], torch.arange(trace.num_positions)])
    return Solved(metrics.throughput(replayed.total, cost_ratio), rate, replayed)


def _played(trace: Trace, geometry: Geometry, lengths: Tensor) -> Replayed:
    return walk(trace, geometry, lengths.unsqueeze(0), lengths.unsqueeze(0))[0]


def _simple(seen: Seen, price: float) -> tuple[Tensor, Tensor]:
    """Tokens drafted [C, P] by policies without foresight: worth against prices around this one, survival against levels."""
    worth, survival = torch.from_numpy(seen.worth), torch.from_numpy(seen.survival)
    prices, levels = torch.tensor(price) * PRICES, torch.tensor(LEVELS)
    return first_below(worth, seen.possible, prices), first_below(survival, seen.possible, levels)


def _cheapest_elsewhere(
    trace: Trace, geometry: Geometry, candidates: Tensor, fold_of: Tensor, cost_ratio: float
) -> Tensor:
    """For every text [T], the candidate [C, P] whose rounds cost least on the texts of the other folds."""
    counted = [replayed for part in candidates.split(GROUP) for replayed in walk(trace, geometry, part, part)]
    costs = torch.from_numpy(np.stack([replayed.cost(cost_ratio) for replayed in counted]))
    elsewhere = torch.stack([costs[:, fold_of != fold].sum(1).argmin() for fold in range(int(fold_of.max()) + 1)])
    return elsewhere[fold_of]


def _decide(geometry: Geometry, seen: Seen, fold: Array, folds: int, price: float) -> tuple[Tensor, Array]:
    """Tokens drafted from every start [P], and Q after k tokens [M, P]; `price`: what one draft forward costs, in tokens."""
    most, possible = len(seen.inputs), seen.possible.numpy()
    run, left = geometry.run.numpy(), geometry.left.numpy()
    produced = np.stack([np.minimum(np.minimum(k, run) + 1, left) for k in range(most + 1)])
    earned = np.zeros(len(possible))  # by the policy so far, from k drafted tokens on
    lengths, worth = np.minimum(possible, most), np.full(seen.survival.shape, np.nan)
    for k in range(most - 1, 0, -1):
        open_ = possible > k
        value = produced[k + 1] - produced[k] - price + earned
        go_on = np.zeros(len(possible), dtype=bool)
        for held_out in range(folds):
            fit, use = open_ & (fold != held_out), open_ & (fold == held_out)
            if fit.sum() >= 50 and use.any():
                myopic = seen.worth[k - 1] - price
                worth[k - 1, use] = myopic[use] + _fitted(seen.inputs[k - 1], value - myopic, fit, use)
                go_on[use] = worth[k - 1, use] > 0
        earned = np.where(go_on, value, 0.0)
        lengths = np.where(open_ & ~go_on, k, lengths)
    return torch.from_numpy(lengths), worth


def _fitted(inputs: Array, value: Array, fit: NDArray[np.bool_], use: NDArray[np.bool_]) -> Array:
    from sklearn.ensemble import HistGradientBoostingRegressor

    model = HistGradientBoostingRegressor(
        max_iter=40, learning_rate=0.1, max_leaf_nodes=8, min_samples_leaf=100, random_state=0
    )
    prediction: Array = model.fit(inputs[fit], value[fit]).predict(inputs[use])
    return prediction

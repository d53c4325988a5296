"""What a head's information is worth: the best stopping policy that sees a given head's outputs, by dynamic programming.

A round is an optimal stopping problem. After k drafted tokens a policy has seen x_k (the head's outputs so far); drafting
one more yields g_{k+1} - lambda c, g being how many more tokens the round then produces (1 if all k + 1 drafted ones are
accepted, 0 else, cut at the text's end), and the right to decide again:

    Q_k(x) = E[ g_{k+1} - lambda c + max(0, Q_{k+1}(x_{k+1})) | x_k = x ],      draft another iff Q_k(x_k) > 0

Backwards over k, what the policy found so far really earns from there (Longstaff and Schwartz 2001: no maximum over fitted
values, so no optimism) is fitted by boosted trees, as a correction to what the head itself says of the next token;
cross-fitted: each text is decided by functions fitted to other texts. lambda is the rate the policy itself achieves
(Dinkelbach), as in `analysis.ceilings`.
Deviation: all starts of a round weigh alike in the fit, whether or not the policy's rounds would start there. What that and the
noise of the fits cost is bounded by a choice: the one-step look-ahead at many prices and the survival threshold at many
levels see the same, and each text is played by whichever candidate costs least on the texts of the other folds.

Shapes: P starts, M most tokens of a round, C candidates, T texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analysis.ceilings import Solved
from analysis.replay import GROUP, Geometry, first_below, visits, walk
from analysis.tally import Replayed
from toolkit import metrics
from toolkit.recorded import RecordedStep
from toolkit.trace import Trace

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
        """What the policy's estimates say of the tokens drafted so far: the chance that all are accepted [M, P]."""
        return self.inputs[:, :, 0]

    @property
    def worth(self) -> Array:
        """And of the next token: its chance to enter the text [M, P]."""
        return self.inputs[:, :, -1]


def head_inputs(trace: Trace, geometry: Geometry, estimator: object, most: int) -> Seen:
    """What the rate rule sees of a pre-read head: survival, the newest token's chance, the next one's, worth, k."""
    survival, possible = torch.ones(trace.num_positions), torch.zeros(trace.num_positions, dtype=torch.long)
    rows = []
    for depth, index, can_draft in visits(trace, geometry, most):
        possible += can_draft
        accepted, following = estimator.drawn_probs(RecordedStep(trace, depth, index))  # type: ignore[attr-defined]
        survival = survival * accepted
        rows.append(torch.stack([survival, accepted, following, survival * following], 1).double().numpy())
    return Seen(np.stack(rows), possible)


def best_policy(trace: Trace, seen: Seen, cost_ratio: float, folds: int = 10, rounds: int = 6) -> Solved:
    """The rate of the best policy on these inputs, and what it counts; cross-fitted over texts.

    rounds  most steps of the fixed point; at least one token is drafted in a round, as by the other policies
    """
    geometry = Geometry.of(trace)
    text = torch.repeat_interleave(torch.arange(trace.num_texts), trace.lengths())
    fold_of = torch.from_numpy(np.random.default_rng(0).permutation(trace.num_texts) % folds)
    rate, found = 1.0, []
    for _ in range(rounds):
        found.append(_decide(geometry, seen, fold_of[text].numpy(), folds, rate * cost_ratio))
        reached = metrics.throughput(_played(trace, geometry, found[-1]).total, cost_ratio)
        if abs(reached - rate) < 1e-3:
            break
        rate = reached
    candidates = torch.cat([torch.stack(found), *_simple(seen, rate * cost_ratio)])
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
    counted = [replayed.counts for part in candidates.split(GROUP) for replayed in walk(trace, geometry, part, part)]
    costs = torch.from_numpy(np.stack([cost_ratio * c["num_draft_calls"] + c["num_target_calls"] for c in counted]))
    elsewhere = torch.stack([costs[:, fold_of != fold].sum(1).argmin() for fold in range(int(fold_of.max()) + 1)])
    return elsewhere[fold_of]


def _decide(geometry: Geometry, seen: Seen, fold: Array, folds: int, price: float) -> Tensor:
    """Tokens drafted from every start [P]; `price`: what one draft forward costs, in tokens."""
    most, possible = len(seen.inputs), seen.possible.numpy()
    run, left = geometry.run.numpy(), geometry.left.numpy()
    produced = np.stack([np.minimum(np.minimum(k, run) + 1, left) for k in range(most + 1)])
    earned = np.zeros(len(possible))  # by the policy found so far, from k drafted tokens on
    lengths = np.minimum(possible, most)
    for k in range(most - 1, 0, -1):
        open_ = possible > k
        value = produced[k + 1] - produced[k] - price + earned
        go_on = np.zeros(len(possible), dtype=bool)
        for held_out in range(folds):
            fit, use = open_ & (fold != held_out), open_ & (fold == held_out)
            if fit.sum() >= 50 and use.any():
                myopic = seen.worth[k - 1] - price
                go_on[use] = myopic[use] + _fitted(seen.inputs[k - 1], value - myopic, fit, use) > 0
        earned = np.where(go_on, value, 0.0)
        lengths = np.where(open_ & ~go_on, k, lengths)
    return torch.from_numpy(lengths)


def _fitted(inputs: Array, value: Array, fit: NDArray[np.bool_], use: NDArray[np.bool_]) -> Array:
    from sklearn.ensemble import HistGradientBoostingRegressor

    model = HistGradientBoostingRegressor(
        max_iter=40, learning_rate=0.1, max_leaf_nodes=8, min_samples_leaf=100, random_state=0
    )
    found: Array = model.fit(inputs[fit], value[fit]).predict(inputs[use])
    return found

"""The best choice among candidates by the full linear program: optimal, for small vocabularies.

Paper: Khisti et al., Multi-Draft Speculative Sampling: Canonical Architectures and Theoretical Limits
(arXiv:2410.18234), Theorem 1 and the linear program after it.
theirs -> ours: p -> draft_probs (q in formulas), q -> target_probs (p), beta_y(x_1..x_K) -> choice, p_I -> chosen.

    maximise sum_y sum_S f(S, y)  with  sum_y f(S, y) <= P(candidates are S),  sum_S f(S, y) <= p(y),  y in S
    choice(S, y) = (f(S, y) + what S has left / |S|) / P(S),  P_I(y) = sum_S P(S) choice(S, y)

Then accept the chosen y with min(1, p/P_I), else draw from norm((p - P_I)+). This is exact even where the solver is not.

Deviation: variables are per **set** of values instead of per tuple; the optimum depends on sets alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.errors import InputError
from toolkit.verification.base import SelectionRule, acceptances, first_ones, residual

MAX_SETS = 20_000
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class ImportanceLP(SelectionRule):
    """Choose a candidate by the optimal weights, accept it with min(1, p/P_I), else draw from norm((p - P_I)+).

    One program per different (p, q, number of candidates), on the CPU, in float64; at most 62 tokens and
    20,000 sets of candidates. Of equal candidates the first has the probability.
    """

    name = "importance_lp"
    lossless = True
    schemes = ("iid", "independent")

    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        num_drafts, vocab_size = draft_probs.shape[-2:]
        if vocab_size > 62 or sum(comb(vocab_size, k + 1) for k in range(num_drafts)) > MAX_SETS:
            raise InputError(
                f"importance_lp is for at most 62 tokens and {MAX_SETS:,} sets of candidates, "
                f"got {vocab_size} tokens and {num_drafts} candidates: use importance"
            )
        real = first_ones(candidates, num_candidates)
        sets = torch.where(real, 1 << candidates, 0).reshape(-1, num_drafts)
        keys = np.bitwise_or.reduce(_numpy(sets), axis=-1)
        nodes = np.concatenate(
            [
                _numpy(target_probs.double().reshape(-1, vocab_size)),
                _numpy(draft_probs.double().reshape(-1, num_drafts * vocab_size)),
                _numpy(num_candidates.double().reshape(-1, 1)),
            ],
            axis=-1,
        )
        choice = np.zeros((len(keys), vocab_size))
        chosen = np.zeros((len(keys), vocab_size))
        problems, problem_of = np.unique(nodes, axis=0, return_inverse=True)
        for index, problem in enumerate(problems):
            rows = np.flatnonzero(problem_of.reshape(-1) == index)
            distributions, count = problem[:-1].reshape(1 + num_drafts, vocab_size), int(problem[-1])
            if count and np.isfinite(problem).all():
                masks, table, chosen[rows] = best_choice(distributions[0], distributions[1 : 1 + count])
                choice[rows] = table[np.searchsorted(masks, keys[rows])]
        distribution = torch.from_numpy(chosen).to(target_probs).reshape(target_probs.shape)
        weights = torch.from_numpy(choice).to(target_probs).reshape(target_probs.shape).gather(-1, candidates)
        passed = acceptances(target_probs, distribution, candidates)
        return weights * passed * real * _is_first(candidates), residual(target_probs, distribution)


def best_choice(target_probs: Floats, draft_probs: Sequence[Floats] | Floats) -> tuple[Ints, Floats, Floats]:
    """The sets of candidates that can come as bit masks [S], sorted; choice [S, V]; P_I [V].

    target_probs [V]; draft_probs [K, V], the distribution of each candidate.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    masks, probs = candidate_sets(draft_probs)
    members = (masks[:, None] >> np.arange(len(target_probs))) & 1  # [S, V]
    of_set, of_token = members.nonzero()  # one variable each
    variables = np.arange(len(of_set))
    limits = np.concatenate([probs, target_probs])
    rows = np.concatenate([of_set, len(masks) + of_token])
    matrix = coo_array((np.ones(2 * len(variables)), (rows, np.tile(variables, 2))), (len(limits), len(variables)))
    tolerances = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    solved = linprog(-np.ones(len(variables)), matrix.tocsr(), limits, method="highs-ds", options=tolerances)
    if solved.x is None:
        raise InputError(f"importance_lp: the linear program was not solved: {solved.message}")
    flow = np.zeros(members.shape)
    flow[of_set, of_token] = np.maximum(solved.x, 0)
    left = np.maximum(probs[:, None] - flow.sum(-1, keepdims=True), 0)
    flow += left * members / members.sum(-1, keepdims=True)
    flow = np.where(flow.sum(-1, keepdims=True) > 0, flow, members)  # a probability may have underflown to 0
    choice = flow / flow.sum(-1, keepdims=True)
    return masks, choice, probs @ choice


def candidate_sets(draft_probs: Sequence[Floats] | Floats) -> tuple[Ints, Floats]:
    """Sets of values of candidates drawn from draft_probs [K, V]: bit masks [S], sorted, and probabilities [S] > 0."""
    masks: Ints = np.zeros(1, dtype=np.int64)
    probs: Floats = np.ones(1)
    for distribution in draft_probs:
        tokens = np.flatnonzero(distribution)
        pairs = (masks[:, None] | (1 << tokens)).reshape(-1)
        masks, set_index = np.unique(pairs, return_inverse=True)
        joint = (probs[:, None] * distribution[tokens]).reshape(-1)
        probs = np.bincount(set_index.reshape(-1), weights=joint).astype(np.float64)
    return masks, probs


def _is_first(candidates: Tensor) -> Tensor:
    """Mask [..., K] of candidates that no earlier one equals."""
    positions = torch.arange(candidates.shape[-1], device=candidates.device)
    earlier = positions.unsqueeze(0) < positions.unsqueeze(1)
    return ~((candidates.unsqueeze(-1) == candidates.unsqueeze(-2)) & earlier).any(-1)


def _numpy(values: Tensor) -> NDArray[np.generic]:
    return np.asarray(values.detach().cpu().numpy())

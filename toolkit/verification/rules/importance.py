"""Importance-weighted choice among the candidates, then one speculative step with the distribution of the chosen one.

Paper: Khisti et al., Multi-Draft Speculative Sampling: Canonical Architectures and Theoretical Limits
(arXiv:2410.18234): Theorem 1, truncated LP (Algorithm 1), truncated alphabet, successive selection (Remark 4).
theirs -> ours: p -> draft_probs (q in formulas), q -> target_probs (p), w -> wins, |Omega_1| = s -> num_free,
its high-probability subset -> the kept tokens, p_I -> chosen.

Of two candidates with distributions q_1 and q_2 the pair {i, j} gives i with probability w_ij. Sorted by p - q_1 q_2,
decreasing, w_ij is free between the first s tokens, and otherwise 1 for i before j. The chosen candidate has the distribution
    P_I(i) = q_1(i) q_2(i) + sum_{j != i} (q_1(i) q_2(j) + q_1(j) q_2(i)) w_ij.
It is accepted with min(1, p/P_I), else the extra token comes from norm((p - P_I)+). This is exact whatever the weights.

Deviation: the LP is solved exactly through its 2^s cuts (`pair_weights`), for all nodes at once, without a solver.
Deviation: different drafts share w_ij = 1 - w_ji, too. P_I depends on what a pair gives in total: nothing is lost.
Deviation: tokens that are not kept lose against kept ones; among themselves those with p > q win, then the first
candidate. Their distribution has a closed form then, and nothing of the vocabulary's size is sorted.

The fixed order suits distributions that are concentrated on few tokens. On flat ones its first tokens win too often, and
more so with more candidates. Acceptance can then fall below a single draft's. `importance_grouped` has no such fault.

Memory of the 2^s cuts was measured on the host. The masks take 1 MiB at s = 8, 8 MiB at s = 12, and 81 MiB at s = 15
(216 MiB while they are made). Float32 numbers take 0.5 MiB per node and match at s = 15. One match of 8 nodes
takes .0002 s, .01 s and .1 s at s = 5, 12 and 15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from toolkit.config.notes import AtLeast, Between
from toolkit.config.values import check_ranges
from toolkit.verification.base import SelectionRule
from toolkit.verification.pair_weights import free_wins
from toolkit.verification.successive import accepted_of_chosen, choose_and_accept


class Importance(SelectionRule):
    """Pairs choose until one candidate is left; accept it with min(1, p/P_I), else draw from norm((p - P_I)+).

    num_free  s, how many tokens have free weights among themselves (the cuts are 2^s), see the memory above
    alphabet  how many of p's most probable tokens are kept for the choice; both at least V: optimal for two candidates

    Candidate k's probability is P(k chosen) min(1, p/P_I); equal candidates share theirs.
    """

    name = "importance"
    lossless = True
    schemes = ("iid", "independent", "top_k")

    def __init__(self, num_free: Annotated[int, Between(1, 15)] = 5, alphabet: Annotated[int, AtLeast(1)] = 40):
        self.num_free = num_free
        self.alphabet = alphabet
        check_ranges(self, "rule.")

    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        match = self._match(target_probs, draft_probs)
        return choose_and_accept(target_probs, draft_probs, candidates, num_candidates, match)

    def accepted(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
        """sum min(p, P_I) [...]."""
        return accepted_of_chosen(target_probs, draft_probs, self._match(target_probs, draft_probs))

    def _match(self, target_probs: Tensor, draft_probs: Tensor) -> Callable[[Tensor, Tensor], _Match]:
        alphabet = _Alphabet.of(target_probs, draft_probs[..., 0, :], self.alphabet)
        return lambda first, second: _Match.of(alphabet, first, second, self.num_free)


@dataclass(frozen=True)
class _Alphabet:
    """The truncated alphabet, with an axis of size 1 for the brackets.

    ids   [..., 1, a]  p's most probable tokens
    probs [..., 1, a]  p on them, renormalised
    liked [..., 1, V]  1 for other tokens with p > q, else 0
    """

    ids: Tensor
    probs: Tensor
    liked: Tensor

    @classmethod
    def of(cls, target_probs: Tensor, draft_probs: Tensor, alphabet: int) -> _Alphabet:
        top = target_probs.topk(min(alphabet, target_probs.shape[-1]), dim=-1)
        liked = (target_probs - draft_probs).sign_().clamp_(min=0).scatter_(-1, top.indices, 0.0)
        probs = top.values / top.values.sum(-1, keepdim=True)
        return cls(top.indices.unsqueeze(-2), probs.unsqueeze(-2), liked.unsqueeze(-2))


@dataclass(frozen=True)
class _Match:
    """The choice between two candidates.

    order  [..., a]     the kept tokens by p - q_1 q_2, decreasing
    wins   [..., a, a]  w: P(the row's token is chosen | it and the column's token are the candidates)
    liked  [..., V]     as in `_Alphabet`
    chosen [..., V]     P_I
    """

    order: Tensor
    wins: Tensor
    liked: Tensor
    chosen: Tensor

    @classmethod
    def of(cls, alphabet: _Alphabet, first_distribution: Tensor, second_distribution: Tensor, num_free: int) -> _Match:
        ids = alphabet.ids.expand(*first_distribution.shape[:-1], -1)
        first, second = first_distribution.gather(-1, ids), second_distribution.gather(-1, ids)
        rank = (alphabet.probs - first * second).argsort(dim=-1, descending=True, stable=True)
        order, target, first, second = (t.expand_as(ids).gather(-1, rank) for t in (ids, alphabet.probs, first, second))
        first_liked, first_rest = _masses_of_others(first_distribution, first, alphabet.liked)
        second_liked, second_rest = _masses_of_others(second_distribution, second, alphabet.liked)

        pairs = first.unsqueeze(-1) * second.unsqueeze(-2)
        pairs = pairs + pairs.mT  # P(the candidates are {i, j}), twice that on the diagonal
        wins = torch.ones_like(pairs).triu(1)
        wins.diagonal(dim1=-2, dim2=-1).fill_(0.5)
        against_others = first * (second_liked + second_rest) + second * (first_liked + first_rest)
        s = min(num_free, order.shape[-1])
        loads = against_others + pairs.diagonal(dim1=-2, dim2=-1) / 2 + pairs[..., s:].sum(-1)
        wins[..., :s, :s] = free_wins(target[..., :s], loads[..., :s], pairs[..., :s, :s])

        # liked: q_1 (liked_2 + rest_2) + q_2 rest_1;  rest: q_1 rest_2
        chosen = (alphabet.liked * second_liked).add_(second_rest).mul_(first_distribution)
        chosen.addcmul_(alphabet.liked * second_distribution, first_rest)
        chosen.scatter_(-1, order, against_others + (pairs * wins).sum(-1))
        return cls(order, wins, alphabet.liked, chosen)

    def wins_of(self, first: Tensor, second: Tensor) -> Tensor:
        """P(the first is chosen) for every pair of tokens first [..., m] and second [..., n]: [..., m, n]."""
        is_1, is_2 = ((t.unsqueeze(-1) == self.order.unsqueeze(-2)).to(self.wins.dtype) for t in (first, second))
        tier_1, tier_2 = self._tier(first, is_1).unsqueeze(-1), self._tier(second, is_2).unsqueeze(-2)
        both_kept = is_1 @ self.wins @ is_2.mT
        return torch.where((tier_1 + tier_2) == 0, both_kept, (tier_1 <= tier_2).to(both_kept.dtype))

    def _tier(self, tokens: Tensor, one_hot: Tensor) -> Tensor:
        """0 for kept tokens, 1 for others with p > q, 2 for the rest; one_hot [..., m, a] of their ids in `order`."""
        liked = self.liked.expand(*tokens.shape[:-1], -1).gather(-1, tokens)
        return (2 - liked) * (1 - one_hot.sum(-1))


def _masses_of_others(distribution: Tensor, kept_probs: Tensor, liked: Tensor) -> tuple[Tensor, Tensor]:
    """What the distribution [..., R, V] gives to tokens that are not kept: to liked ones, to the rest, both [..., R, 1]."""
    likes = distribution @ liked.mT
    rest = distribution.sum(-1, keepdim=True) - kept_probs.sum(-1, keepdim=True) - likes
    return likes, rest.clamp(min=0)

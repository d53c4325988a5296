"""Importance-weighted choice among the candidates, then one speculative step with the law of the chosen one.

Paper: Khisti et al., Multi-Draft Speculative Sampling: Canonical Architectures and Theoretical Limits
(arXiv:2410.18234): Theorem 1, truncated LP (Algorithm 1), truncated alphabet, successive selection (Remark 4).
theirs -> ours: p -> draft_probs (q in formulas), q -> target_probs (p), w -> wins, |Omega_1| = s -> num_free,
Omega_0 -> the kept tokens, p_I -> chosen.

Of two candidates with laws q_1 and q_2 the pair {i, j} gives i with chance w_ij. Sorted by p - q_1 q_2, decreasing,
w_ij is free between the first s tokens, and otherwise 1 for i before j. The chosen candidate has the law
    P_I(i) = q_1(i) q_2(i) + sum_{j != i} (q_1(i) q_2(j) + q_1(j) q_2(i)) w_ij,
and is accepted with min(1, p/P_I), else the extra token comes from norm((p - P_I)+): exact whatever the weights.

Deviation: the LP is solved exactly through its 2^s cuts (`free_wins`), for all nodes at once, without a solver.
Deviation: different drafts share w_ij = 1 - w_ji, too. P_I depends on what a pair gives in total: nothing is lost.
Deviation: tokens that are not kept lose against kept ones; among themselves those with p > q win, then the first
candidate. Their law has a closed form then, and nothing of the vocabulary's size is sorted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.verification.base import SelectionRule, acceptances, first_ones, residual


class Importance(SelectionRule):
    """Pairs choose until one candidate is left; accept it with min(1, p/P_I), else draw from norm((p - P_I)+).

    num_free  s, how many tokens have free weights among themselves: all V, and two candidates are chosen from optimally
    alphabet  how many of p's likeliest tokens are kept for the choice

    Candidate k's chance is P(k chosen) min(1, p/P_I); equal candidates share theirs.
    """

    lossless = True
    drawing = ("iid", "independent")

    def __init__(self, num_free: int = 5, alphabet: int = 40):
        if not 1 <= num_free <= 12:
            raise InputError(f"num_free must be from 1 to 12 (the cuts are 2^num_free), got {num_free}")
        if alphabet < 1:
            raise InputError(f"alphabet must be at least 1, got {alphabet}")
        self.num_free = num_free
        self.alphabet = alphabet

    def _law(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        kept = _Kept.of(target_probs, draft_probs[..., 0, :], self.alphabet)
        real = first_ones(candidates, num_candidates)
        brackets = _Brackets.of_one(draft_probs, candidates, real)
        while brackets.law.shape[-2] > 1:
            brackets = self._play(kept, brackets.every_second(0), brackets.every_second(1))
        chances, chosen = brackets.chances[..., 0, : candidates.shape[-1]], brackets.law[..., 0, :]
        passed = acceptances(target_probs, chosen, candidates)
        return chances * passed * real, residual(target_probs, chosen)

    def _play(self, kept: _Kept, first: _Brackets, second: _Brackets) -> _Brackets:
        """The choices between the winners of two brackets each."""
        match = _Match.of(kept, first.law, second.law, self.num_free)
        wins = match.wins_of(first.tokens, second.tokens)
        played = second.present.unsqueeze(-1)
        first_wins = first.chances * (wins * second.chances.unsqueeze(-2)).sum(-1)
        second_wins = second.chances * ((1 - wins) * first.chances.unsqueeze(-1)).sum(-2)
        return _Brackets(
            torch.where(played, match.chosen, first.law),
            torch.cat([first.tokens, second.tokens], -1),
            torch.cat([torch.where(played, first_wins, first.chances), torch.where(played, second_wins, 0.0)], -1),
            first.present,
        )


@dataclass(frozen=True)
class _Brackets:
    """R groups of m candidates, one of which is chosen.

    law     [..., R, V]  of the chosen one
    tokens  [..., R, m]  the candidates
    chances [..., R, m]  P(this one is chosen | candidates)
    present [..., R]     False where the node has none of these candidates
    """

    law: Tensor
    tokens: Tensor
    chances: Tensor
    present: Tensor

    @classmethod
    def of_one(cls, draft_probs: Tensor, candidates: Tensor, real: Tensor) -> _Brackets:
        """One candidate each; R is the next power of two, filled up with candidates that are not there."""
        missing = (1 << (candidates.shape[-1] - 1).bit_length()) - candidates.shape[-1]
        if missing:
            draft_probs = torch.cat([draft_probs, draft_probs[..., :missing, :]], -2)
            candidates, real = (torch.nn.functional.pad(t, (0, missing)) for t in (candidates, real))
        tokens = candidates.unsqueeze(-1)
        return cls(draft_probs, tokens, torch.ones_like(tokens, dtype=draft_probs.dtype), real)

    def every_second(self, start: int) -> _Brackets:
        """The brackets start, start + 2, ..."""
        rows = slice(start, None, 2)
        return _Brackets(
            self.law[..., rows, :], self.tokens[..., rows, :], self.chances[..., rows, :], self.present[..., rows]
        )


@dataclass(frozen=True)
class _Kept:
    """The truncated alphabet, with an axis of size 1 for the brackets.

    ids   [..., 1, a]  p's likeliest tokens
    probs [..., 1, a]  p on them, renormalised
    liked [..., 1, V]  1 for other tokens with p > q, else 0
    """

    ids: Tensor
    probs: Tensor
    liked: Tensor

    @classmethod
    def of(cls, target_probs: Tensor, draft_probs: Tensor, alphabet: int) -> _Kept:
        top = target_probs.topk(min(alphabet, target_probs.shape[-1]), dim=-1)
        liked = (target_probs - draft_probs).sign_().clamp_(min=0).scatter_(-1, top.indices, 0.0)
        probs = top.values / top.values.sum(-1, keepdim=True)
        return cls(top.indices.unsqueeze(-2), probs.unsqueeze(-2), liked.unsqueeze(-2))


@dataclass(frozen=True)
class _Match:
    """The choice between two candidates.

    order  [..., a]     the kept tokens by p - q_1 q_2, decreasing
    wins   [..., a, a]  w: P(the row's token is chosen | it and the column's token are the candidates)
    liked  [..., V]     as in `_Kept`
    chosen [..., V]     P_I
    """

    order: Tensor
    wins: Tensor
    liked: Tensor
    chosen: Tensor

    @classmethod
    def of(cls, kept: _Kept, first_law: Tensor, second_law: Tensor, num_free: int) -> _Match:
        ids = kept.ids.expand(*first_law.shape[:-1], -1)
        first, second = first_law.gather(-1, ids), second_law.gather(-1, ids)
        rank = (kept.probs - first * second).argsort(dim=-1, descending=True, stable=True)
        order, target, first, second = (t.expand_as(ids).gather(-1, rank) for t in (ids, kept.probs, first, second))
        first_liked, first_rest = _masses_of_others(first_law, first, kept.liked)
        second_liked, second_rest = _masses_of_others(second_law, second, kept.liked)

        pairs = first.unsqueeze(-1) * second.unsqueeze(-2)
        pairs = pairs + pairs.mT  # P(the candidates are {i, j}), twice that on the diagonal
        wins = torch.ones_like(pairs).triu(1)
        wins.diagonal(dim1=-2, dim2=-1).fill_(0.5)
        against_others = first * (second_liked + second_rest) + second * (first_liked + first_rest)
        s = min(num_free, order.shape[-1])
        loads = against_others + pairs.diagonal(dim1=-2, dim2=-1) / 2 + pairs[..., s:].sum(-1)
        wins[..., :s, :s] = free_wins(target[..., :s], loads[..., :s], pairs[..., :s, :s])

        # liked: q_1 (liked_2 + rest_2) + q_2 rest_1;  rest: q_1 rest_2
        chosen = (kept.liked * second_liked).add_(second_rest).mul_(first_law)
        chosen.addcmul_(kept.liked * second_law, first_rest)
        chosen.scatter_(-1, order, against_others + (pairs * wins).sum(-1))
        return cls(order, wins, kept.liked, chosen)

    def wins_of(self, first: Tensor, second: Tensor) -> Tensor:
        """P(the first is chosen) for every pair of tokens first [..., m] and second [..., n]: [..., m, n]."""
        found_1, found_2 = ((t.unsqueeze(-1) == self.order.unsqueeze(-2)).to(self.wins.dtype) for t in (first, second))
        tier_1, tier_2 = self._tier(first, found_1).unsqueeze(-1), self._tier(second, found_2).unsqueeze(-2)
        both_kept = found_1 @ self.wins @ found_2.mT
        return torch.where((tier_1 + tier_2) == 0, both_kept, (tier_1 <= tier_2).to(both_kept.dtype))

    def _tier(self, tokens: Tensor, found: Tensor) -> Tensor:
        """0 for kept tokens, 1 for others with p > q, 2 for the rest; found [..., m, a] one-hot in `order`."""
        liked = self.liked.expand(*tokens.shape[:-1], -1).gather(-1, tokens)
        return (2 - liked) * (1 - found.sum(-1))


def _masses_of_others(law: Tensor, kept_probs: Tensor, liked: Tensor) -> tuple[Tensor, Tensor]:
    """What the law [..., R, V] gives to tokens that are not kept: to liked ones, to the rest, both [..., R, 1]."""
    likes = law @ liked.mT
    rest = law.sum(-1, keepdim=True) - kept_probs.sum(-1, keepdim=True) - likes
    return likes, rest.clamp(min=0)


def free_wins(target_probs: Tensor, loads: Tensor, pairs: Tensor) -> Tensor:
    """Weights w [..., s, s], w_ij + w_ji = 1, that maximise sum_i min(p(i), load_i + sum_j pairs_ij w_ij).

    target_probs [..., s], loads [..., s] what token i has in any case, pairs [..., s, s] symmetric, to be shared out.

    By max-flow min-cut the maximum is the least of the 2^s cuts p(S) + load(S^c) + (the pairs not inside S). Fix one
    weight after the other: if pair {i, j} of mass m gives x to i, the cuts with j but not i in S change by x - m, those
    with i but not j by -x. The x that makes the least cuts of both kinds equal, or comes closest, keeps the maximum.
    """
    size = target_probs.shape[-1]
    wins = torch.full_like(pairs, 0.5)
    if size == 1:
        return wins
    cut = _Cuts.of(size, pairs.dtype, pairs.device)
    masses = pairs[..., cut.i, cut.j]
    cuts = target_probs @ cut.inside + loads @ (1 - cut.inside) - masses @ cut.both
    drops = (masses.unsqueeze(-1) * cut.either_half).unbind(-2)
    tilts: list[Tensor] = []  # 2 x - m
    for e, (mass, minus) in enumerate(zip(masses.unbind(-1), (-masses).unbind(-1), strict=True)):
        least_j, least_i = cuts[..., cut.only[e]].amin(-1).unbind(-1)
        tilts.append(torch.clamp(least_i - least_j, min=minus, max=mass))
        cuts = torch.addcmul(cuts - drops[e], tilts[e].unsqueeze(-1), cut.sign_half[e])
    share = (1 + torch.stack(tilts, -1) / masses.clamp(min=torch.finfo(masses.dtype).tiny)) / 2
    wins[..., cut.i, cut.j], wins[..., cut.j, cut.i] = share, 1 - share
    return wins


@dataclass(frozen=True)
class _Cuts:
    """Which subsets S of s tokens hold what. P pairs i < j.

    inside      [s, 2^s]         token i
    i, j        [P]              the pairs
    both        [P, 2^s]         both tokens of a pair
    only        [P][2, 2^(s-2)]  ids of the subsets with j alone, with i alone
    sign_half   [P][2^s]         1/2 with j alone, -1/2 with i alone
    either_half [P, 2^s]         1/2 in both cases
    """

    inside: Tensor
    i: Tensor
    j: Tensor
    both: Tensor
    only: tuple[Tensor, ...]
    sign_half: tuple[Tensor, ...]
    either_half: Tensor

    @classmethod
    @cache
    def of(cls, size: int, dtype: torch.dtype, device: torch.device) -> _Cuts:
        subsets = torch.arange(2**size, device=device)
        inside = (subsets >> torch.arange(size, device=device).unsqueeze(1)) & 1
        i, j = torch.triu_indices(size, size, 1, device=device)
        only_j, only_i = inside[j] & ~inside[i], inside[i] & ~inside[j]
        only = torch.stack([only_j, only_i], 1).nonzero()[:, 2].reshape(len(i), 2, -1)
        sign_half, either_half = (only_j - only_i).to(dtype) / 2, (only_j + only_i).to(dtype) / 2
        both = (inside[i] & inside[j]).to(dtype)
        return cls(inside.to(dtype), i, j, both, only.unbind(0), sign_half.unbind(0), either_half)

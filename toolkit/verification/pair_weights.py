"""The best weights for choices between pairs: a linear program, solved exactly through its cuts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


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

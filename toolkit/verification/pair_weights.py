"""The best weights for choices between pairs: a linear program, solved exactly through its cuts.

A few dozen numbers per node in many short steps: NumPy on the host is faster at that than any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def free_wins(target_probs: Tensor, loads: Tensor, pairs: Tensor) -> Tensor:
    """Weights w [..., s, s], w_ij + w_ji = 1, that maximise sum_i min(p(i), load_i + sum_j pairs_ij w_ij).

    target_probs [..., s], loads [..., s] what token i has in any case, pairs [..., s, s] symmetric, to be shared out.

    By max-flow min-cut the maximum is the least of the 2^s cuts p(S) + load(S^c) + (the pairs not inside S). Fix one
    weight after the other. If pair {i, j} of mass m gives x to i, the cuts with j but not i in S change by x - m. Those
    with i but not j change by -x. The x that makes the least cuts of both kinds equal, or comes closest, keeps the
    maximum.
    """
    p, load, mass = (t.detach().cpu().numpy() for t in (target_probs, loads, pairs))
    cut = _Cuts.of(p.shape[-1])
    mass = mass[..., cut.i, cut.j]  # [..., P]
    cuts = p @ cut.inside + load @ (1 - cut.inside) - mass @ cut.both
    negative, tilts = -mass, np.empty_like(mass)  # tilt: 2 x - m
    for e, groups in enumerate(cut.only):
        least = np.minimum.reduce(cuts.take(groups, axis=-1), axis=-1)
        tilt = np.minimum(np.maximum(least[..., 1] - least[..., 0], negative[..., e]), mass[..., e])
        cuts += tilt[..., None] * cut.sign_half[e] - mass[..., e, None] * cut.one_half[e]
        tilts[..., e] = tilt
    share = (1 + tilts / np.maximum(mass, np.finfo(mass.dtype).tiny)) / 2
    wins = np.full((*p.shape, p.shape[-1]), 0.5, dtype=p.dtype)
    wins[..., cut.i, cut.j], wins[..., cut.j, cut.i] = share, 1 - share
    return torch.from_numpy(wins).to(target_probs)


@dataclass(frozen=True)
class _Cuts:
    """Which subsets S of s tokens hold what. P pairs i < j.

    inside    [s, 2^s]         1 where S has token i, else 0
    i, j      [P]              the pairs
    both      [P, 2^s]         1 where S has both tokens of a pair
    one_half  [P, 2^s]         1/2 where S has one of them
    sign_half [P, 2^s]         1/2 where that is j, -1/2 where it is i
    only      [P, 2, 2^(s-2)]  ids of the subsets with j alone, with i alone
    """

    inside: NDArray[Any]
    i: NDArray[Any]
    j: NDArray[Any]
    both: NDArray[Any]
    one_half: NDArray[Any]
    sign_half: NDArray[Any]
    only: NDArray[Any]

    @classmethod
    @cache
    def of(cls, size: int) -> _Cuts:
        inside = np.arange(2**size) >> np.arange(size)[:, None] & 1
        i, j = np.triu_indices(size, 1)
        only_j, only_i = inside[j] & ~inside[i], inside[i] & ~inside[j]
        only = np.stack([only_j, only_i], 1).nonzero()[2].reshape(len(i), 2, 2**size // 4)
        masks = [inside, inside[i] & inside[j], (only_j + only_i) / 2, (only_j - only_i) / 2]
        # Single precision holds these exactly and leaves the format of the sums to the distributions.
        inside, both, one_half, sign_half = (mask.astype(np.float32) for mask in masks)  # type: ignore[assignment]
        return cls(inside, i, j, both, one_half, sign_half, only)

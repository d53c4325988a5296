"""Depths in the round for training: a recorded position belongs to no round, so a depth is drawn for it.

Rounds of 1 to M tokens may start at every token of a response, with equal probability. A round goes on only while all its
drafted tokens are accepted. So a position i is at depth d with a probability proportional to

    c_{i-1} c_{i-2} ... c_{i-d+1},      d = 1 .. min(i - first + 1, M)

c_j is the probability that the drafted token at j is accepted. It is 0 or 1 in a trace, where acceptance draws are known. There
d is uniform over the starts whose round reaches i. No policy is presumed, because the head shall decide how long rounds are,
and so where they start. Replay and dynamic program weigh starts alike, too. In contrast, rounds of one policy start mostly
after its rejections and are deeper there.

Shapes: n positions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def drawn_depths(probs: Tensor, first: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """A depth in 1..most of every position [n].

    probs [n]  c of every position
    first [n]    where the position's response begins
    """
    probs = probs.double()
    position = torch.arange(len(probs))
    total = weight = torch.ones_like(probs)  # sums of weights over depths
    for depth in range(1, most):
        weight = _deeper(weight, probs, position, first, depth)
        total = total + weight
    level = torch.rand(len(probs), generator=generator, dtype=torch.float64) * total
    depths, reached, weight = torch.ones_like(position), torch.zeros_like(level), torch.ones_like(level)
    for depth in range(1, most):
        reached = reached + weight
        weight = _deeper(weight, probs, position, first, depth)
        depths += (level >= reached) & (weight > 0)
    return depths


def _deeper(weight: Tensor, probs: Tensor, position: Tensor, first: Tensor, depth: int) -> Tensor:
    """From the weights of a depth [n] to those of the next one."""
    before = position - depth
    return torch.where(before >= first, weight * probs[before.clamp(min=0)], 0.0)

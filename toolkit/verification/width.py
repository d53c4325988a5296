"""Dynamic width: how many beams a layer may ask for and still be likely to get.

Paper: Dynamic-Width Speculative Beam Decoding (arXiv:2409.16560), Eq. 2-7 and Theorem 3.2.
theirs -> ours: alpha_j -> acceptance_probs, P~(m, i) -> first_acceptance, P(m, k) -> accepted_distribution,
M_S -> num_candidates, t -> threshold, W_min -> min_width, gamma -> num_layers, beta -> fill_probs[..., W_min].
Deviation: q is subtracted once per rejection, as printed; the published code subtracts it twice.
Deviation: sums start at k = 0 (Eq. 7); Eq. 5 prints 1.
Deviation: widths end at the number of candidates: at t = 0 the set of Eq. 7 has no maximum.

P(m, k) is the number accepted if the walk went through all m candidates without stopping at a width. It obeys a
recursion because every acceptance starts the walk again. The walk of the rule does stop, but up to its w-th acceptance
both are the same walk. So P(the layer of width w fills) = P(at least w accepted) = 1 - sum_{k<w} P(m, k). Of the walk
that stops, P(m, k) itself is true for k < w only.

A width may depend on p and q, never on the candidates: else the output beams no longer follow p. Where q keeps its mass on
dead pairs, m is therefore W_S, however many candidates have a living parent.

Shapes: leading dimensions `...` are free; B rows, M beam-token pairs, m candidates. Computed in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.verification.base import normalized, residual
from toolkit.verification.layer import check_width

ROUNDING = 1e-9  # a probability this close below the threshold counts as reaching it


def acceptance_probs(target_probs: Tensor, draft_probs: Tensor, num_candidates: int) -> Tensor:
    """alpha_j [..., m]: P(candidate accepted | the j - 1 before it were rejected, since the last acceptance). Eq. 4.

    target_probs, draft_probs [..., M].
    """
    left, draft_probs = (
        normalized(distribution.double(), distribution.double()) for distribution in (target_probs, draft_probs)
    )
    probs = []
    for _ in range(num_candidates):
        probs.append(torch.minimum(left, draft_probs).sum(-1).clamp(max=1.0))
        left = residual(left, draft_probs)
    return torch.stack(probs, -1)


def first_acceptance(probs: Tensor) -> Tensor:
    """P(the i-th candidate is the first accepted) [..., m], from alpha_j [..., m]. Eq. 3."""
    before = (1 - probs).cumprod(-1).roll(1, -1)
    before[..., 0] = 1.0
    return probs * before


def accepted_distribution(probs: Tensor) -> Tensor:
    """P(m, k) [..., m + 1], k = 0..m: how many of m candidates are accepted by a walk without a width. Eq. 2."""
    return accepted_distributions(probs)[-1]


def accepted_distributions(probs: Tensor) -> list[Tensor]:
    """P(n, k) [..., m + 1] for n = 0..m candidates: the steps of the recursion."""
    num_candidates = probs.shape[-1]
    first, none = first_acceptance(probs), (1 - probs).cumprod(-1)
    distributions = [torch.nn.functional.pad(torch.ones_like(probs[..., :1]), (0, num_candidates))]  # P(0, .)
    for n in range(1, num_candidates + 1):
        later = sum(first[..., i - 1 : i] * distributions[n - i] for i in range(1, n + 1))
        distributions.append(torch.cat([none[..., n - 1 : n], later[..., :-1]], -1))  # type: ignore[index]
    return distributions


def fill_probs(target_probs: Tensor, draft_probs: Tensor, num_candidates: int, counts: Tensor | None = None) -> Tensor:
    """P(a layer of width w fills) [..., m + 1], w = 0..m: at least w of the candidates are accepted.

    counts [...]  how many of the m candidates each row has; None: all
    """
    distributions = accepted_distributions(acceptance_probs(target_probs, draft_probs, num_candidates))
    distribution = distributions[-1]
    if counts is not None:
        index = counts.unsqueeze(-1).expand_as(distribution).unsqueeze(0)
        distribution = torch.stack(distributions).gather(0, index).squeeze(0)
    return distribution.flip(-1).cumsum(-1).flip(-1)


def layer_width(
    target_probs: Tensor,
    draft_probs: Tensor,
    num_candidates: int,
    threshold: float,
    min_width: int = 1,
    counts: Tensor | None = None,
) -> Tensor:
    """max(W_min, max{w : P(a layer of width w fills) >= t}) [B] from distributions [B, M]; at most m. Eq. 6 and 7.

    counts [B]  how many of the m candidates each row has, at least W_min; None: all. Fixed before they were drawn.

    Raises InputError if t is outside [0, 1], or W_min outside 1..m.
    """
    check_threshold(threshold)
    check_width("min_width", min_width, num_candidates)
    reached = fill_probs(target_probs, draft_probs, num_candidates, counts)[..., 1:] >= threshold - ROUNDING
    if counts is not None:  # at t = 0 every width is reached
        reached &= torch.arange(1, num_candidates + 1, device=counts.device) <= counts.unsqueeze(-1)
    return reached.sum(-1).clamp(min=min_width)


def check_threshold(threshold: float) -> None:
    """Raises InputError unless t is in [0, 1]."""
    if not 0 <= threshold <= 1:
        raise InputError(f"threshold: expected a probability in [0, 1], got {threshold}")

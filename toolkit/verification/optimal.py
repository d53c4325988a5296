"""The best any exact rule can do: the optimal probability that the emitted token is one of the candidates.

Paper: Hu et al., Towards Optimal Multi-draft Speculative Decoding (arXiv:2502.18779).
    alpha* = 1 + min over H of [p(H) - Q(H)],  Q(H) = P(all candidates in H).
The minimiser is empty or a prefix of the tokens by p/q, increasing, so sorting finds it.

    iid                  Q(H) = q(H)^K
    without_replacement  K = 2: Q(H) = q(H) - q(H^c) sum_H q/(1 - q).
                         Any K, with an exponential clock of rate q(x) at every token:
                         Q(H) = integral over t > 0 of P(K of H have rung by t) q(H^c) exp(-q(H^c) t) dt
    greedy               T = the K - 1 most probable of q, r = q/(1 - q(T)) on the rest: alpha* = p(T) + sum_rest min(p, r)

Where q has fewer than K tokens, all of them are candidates.

Draws from K different distributions (`independent_bounds`) have Q(H) = q_1(H) ... q_K(H). Sorting does not find its
minimiser: the least value over the prefixes of a few orders bounds the optimum from above.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from toolkit.errors import InputError, unknown_name
from toolkit.verification.base import check_distribution
from toolkit.verification.schemes import num_distinct, top_tokens

STEP = 0.25  # of the integral's grid in log t: the trapezoid rule converges like exp(-pi^2/step)
ROUNDS = 4  # orders that `independent_bounds` tries
CERTAIN = 45.0  # a clock that should have rung this often has rung, within 1e-19


def optimal_acceptance(target_probs: Tensor, draft_probs: Tensor, num_drafts: int, scheme: str = "iid") -> float:
    """The optimum for one pair of distributions [V]; schemes as in the head of this file. O(V log V)."""
    return float(optimal_acceptances(torch.as_tensor(target_probs), torch.as_tensor(draft_probs), num_drafts, scheme))


def optimal_acceptances(target_probs: Tensor, draft_probs: Tensor, num_drafts: int, scheme: str = "iid") -> Tensor:
    """The optimum [...] for every pair of distributions [..., V], float64. Raises InputError if these are not distributions."""
    if num_drafts < 1:
        raise InputError(f"num_drafts must be at least 1, got {num_drafts}")
    if scheme not in SCHEMES:
        raise unknown_name("scheme", scheme, SCHEMES)
    check_distribution("draft_probs", draft_probs, draft_probs.shape[:-1])
    check_distribution("target_probs", target_probs, draft_probs.shape[:-1], draft_probs.shape[-1])
    return SCHEMES[scheme](target_probs.double(), draft_probs.double(), num_drafts).clamp(0.0, 1.0)


def independent_bounds(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Upper bounds [...] of the optimum with one draw from each of K distributions: [..., V] and [..., K, V], float64.

    A minimiser H holds the tokens whose p is below what Q gains by them: p(x) < sum_k q_k(x) prod_{j != k} q_j(H). So
    tokens are ordered by p over that sum, for the H found last. With equal distributions the bound is the optimum itself.
    """
    p, q = target_probs.double(), draft_probs.double()
    weights = torch.ones_like(q[..., :1])  # prod of the others' q_j(H), up to scale
    best = torch.ones_like(p[..., 0])
    for _ in range(ROUNDS):
        gained = (weights * q).sum(-2)
        order = torch.where(gained > 0, p / gained, torch.inf).argsort(dim=-1, stable=True)
        inside = q.gather(-1, order.unsqueeze(-2).expand_as(q)).cumsum(-1)  # q_k of every prefix [..., K, V]
        values = p.gather(-1, order).cumsum(-1) - inside.prod(-2)
        least, at = values.min(-1, keepdim=True)
        best = torch.minimum(best, 1 + least.squeeze(-1))
        inside_at = inside.gather(-1, at.unsqueeze(-2).expand(*inside.shape[:-1], 1)).clamp(min=1e-300)
        weights = inside_at.log().neg().exp()
        weights = weights / weights.amax(-2, keepdim=True)
    return best.clamp(min=0.0)


def _iid(target_probs: Tensor, draft_probs: Tensor, num_drafts: int) -> Tensor:
    p, q = _by_ratio(target_probs, draft_probs)
    return _cut(p, q.cumsum(-1) ** num_drafts)


def _greedy(target_probs: Tensor, draft_probs: Tensor, num_drafts: int) -> Tensor:
    counts = num_distinct(draft_probs, num_drafts).unsqueeze(-1)
    top = top_tokens(draft_probs, num_drafts)
    ranks = torch.arange(top.shape[-1], device=top.device)
    is_fixed = torch.zeros_like(draft_probs, dtype=torch.bool).scatter(-1, top, ranks < counts - 1)
    rest = draft_probs.masked_fill(is_fixed, 0.0)
    rest = rest / rest.sum(-1, keepdim=True)
    return torch.where(is_fixed, target_probs, torch.minimum(target_probs, rest)).sum(-1)


def _without_replacement(target_probs: Tensor, draft_probs: Tensor, num_drafts: int) -> Tensor:
    if num_drafts == 1:
        return _iid(target_probs, draft_probs, 1)
    p, q = _by_ratio(target_probs, draft_probs)
    if num_drafts > 2:
        pairs = zip(p.reshape(-1, p.shape[-1]), q.reshape(-1, q.shape[-1]), strict=True)
        cuts = [_cut(p_row, _all_inside(q_row, num_drafts)) for p_row, q_row in pairs]
        return torch.stack(cuts).reshape(p.shape[:-1]) if cuts else p.sum(-1)
    inside, outside = q.cumsum(-1), _sums_after(q)
    others = (inside - q) + outside  # 1 - q without its cancellation
    odds = q / others.clamp(min=torch.finfo(q.dtype).tiny)
    return _cut(p, torch.where(outside > 0, inside - outside * odds.cumsum(-1), 1.0))


def _all_inside(draft_probs: Tensor, num_drafts: int) -> Tensor:
    """Q of every prefix of draft_probs [V]: [V]. If there are no K tokens: 0 for all prefixes that leave one out.

    P(exactly j of a prefix have rung by t) is exp(-q(prefix) t) times an elementary symmetric sum: the j-th one of the
    exp(q t) - 1. These sums are nested cumulative ones, here of logarithms. The grid is even in log t and common to all
    prefixes.
    """
    outside = _sums_after(draft_probs)
    slowest = outside[outside > 0]
    if len(slowest) == 0:  # one token
        return torch.ones_like(draft_probs)
    start = math.log(1e-17) / (num_drafts + 1)
    stop = math.log(CERTAIN) - float(slowest.min().log())
    inside = torch.zeros_like(draft_probs)
    for log_time in torch.arange(start, stop + STEP, STEP, dtype=draft_probs.dtype, device="cpu").tolist():
        time = math.exp(log_time)
        expected = (draft_probs * time).clamp(max=CERTAIN)
        odds, none = torch.expm1(expected).log(), -expected.cumsum(0)
        too_few = none.exp()
        sums, of_nothing = torch.zeros_like(odds), 0.0  # of no tokens: one, of logarithm 0
        for _ in range(num_drafts - 1):
            before = torch.cat([sums.new_full((1,), of_nothing), sums[:-1]])
            sums, of_nothing = (before + odds).logcumsumexp(0), -torch.inf
            too_few = too_few + (sums + none).exp()
        density = outside * time * torch.exp(-outside * time)
        inside += STEP * density * (1 - too_few).clamp(min=0)
    return torch.where(outside > 0, inside, 1.0)


def _by_ratio(target_probs: Tensor, draft_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Both distributions [..., V] with their tokens by p/q, increasing; those that q cannot draw come last."""
    ratio = torch.where(draft_probs > 0, target_probs / draft_probs, torch.inf)
    order = ratio.argsort(dim=-1, stable=True)
    return target_probs.gather(-1, order), draft_probs.gather(-1, order)


def _cut(target_probs: Tensor, all_inside: Tensor) -> Tensor:
    """1 + min over prefixes of p(H) - Q(H), at the whole 0: [..., V] sorted, Q per prefix [..., V]."""
    return 1 + (target_probs.cumsum(-1) - all_inside).amin(-1)


def _sums_after(probs: Tensor) -> Tensor:
    """Sum of everything after each position [..., V], exactly 0 at the end."""
    return torch.cat([probs.flip(-1).cumsum(-1).flip(-1)[..., 1:], torch.zeros_like(probs[..., :1])], -1)


SCHEMES = {"iid": _iid, "without_replacement": _without_replacement, "greedy": _greedy}

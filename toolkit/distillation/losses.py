"""Losses: how far a draft is from its target at each position, as functions of log p and log q.

    forward KL     sum_x p log(p / q)                                                     DistillSpec (arXiv:2310.08461)
    reverse KL     sum_x q log(q / p)                                                     DistillSpec
    JSD(beta)      beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q     GKD (arXiv:2306.13649), section 2
    TVD            1/2 sum_x |p - q| = 1 - alpha                                          DistillSpec
    LK             -log alpha, alpha = sum_x min(p, q): the probability of acceptance          LK losses (arXiv:2602.23881)
    cross entropy  -log q of the text's token; no target is needed

A `Mixture` has several at once, with weights that may change over the training.

p: target, q: draft, both at the temperature of the training. In nats (TVD apart). Gradients go to q alone.

Where only k tokens of p are known, the KLs and JSD take all the others as one token: lower bounds of the true losses (data
processing inequality). TVD and LK count the overlap of the k tokens alone: upper bounds.

Where the draft has rows for V' tokens alone, q is 0 at all others. So forward KL is that of p renormalised over the V', and
cross entropy leaves out the tokens that have no row. All other losses are finite, and count p's mass outside of V'. Where only
k tokens of p are known, how much of the others' mass lies in V' is not: forward KL takes the share that makes it smallest.

Shapes: n positions, C categories: the vocabulary, or k tokens and the rest (`DistillBatch`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from toolkit.config.notes import AtLeast, Between
from toolkit.config.values import check_ranges
from toolkit.errors import InputError

LOWEST = -1e4  # log of a probability that is exactly 0 in every format; finite, so that 0 times it is 0


@dataclass(frozen=True)
class DistillBatch:
    """The distributions of target and draft at n positions.

    target_log_probs [n, C], draft_log_probs [n, C]  log p and log q; C categories that add up to 1.
    token_log_probs [n]  log q of the token that the text has there
    has_rest  whether the last category is not a token but all the others together
    reduced  whether the draft has no row for some tokens: LOWEST stands for their log q
    """

    target_log_probs: Tensor
    draft_log_probs: Tensor
    token_log_probs: Tensor
    has_rest: bool = False
    reduced: bool = False

    @property
    def alpha(self) -> Tensor:
        """sum_x min(p, q) [n], the probability of acceptance. It takes the whole vocabulary: no `has_rest`."""
        assert not self.has_rest
        return torch.minimum(self.target_log_probs, self.draft_log_probs).exp().sum(-1)

    @property
    def has_row(self) -> Tensor:
        """Whether the draft can draw the text's token [n]."""
        return self.token_log_probs > LOWEST

    @property
    def disjoint(self) -> tuple[Tensor, Tensor]:
        """log p and log q, the rest of each as a category that the other has not."""
        p, q = self.target_log_probs, self.draft_log_probs
        if not self.has_rest:
            return p, q
        nothing = torch.full_like(p[:, :1], LOWEST)
        return torch.cat([p, nothing], -1), torch.cat([q[:, :-1], nothing, q[:, -1:]], -1)


class Loss(ABC):
    @abstractmethod
    def __call__(self, batch: DistillBatch, progress: float = 0.0) -> Tensor:
        """The loss [n]; `progress` is the share of the training that is done, for schedules."""


@dataclass(frozen=True)
class ForwardKL(Loss):
    """sum p log(p / q): the draft covers whatever the target may say."""

    name = "forward_kl"

    def __call__(self, batch: DistillBatch, progress: float = 0.0) -> Tensor:
        p, q = batch.target_log_probs, batch.draft_log_probs
        if batch.reduced:
            p = p.masked_fill(q <= LOWEST, -torch.inf)
            if batch.has_rest:
                p = torch.cat([p[:, :-1], torch.minimum(p[:, -1:], _smallest_rest(p, q))], -1)
            p = p.log_softmax(-1).clamp(min=LOWEST)
        return _kl(p, q)


def _smallest_rest(p: Tensor, q: Tensor) -> Tensor:
    """log m [n, 1]: the mass m of the rest, beside that of the tokens of p, at which KL(p / sum p || q) is smallest.

    With a = p / A of the tokens alone, A their mass: m / A = q(rest) exp(sum a log(a / q)), where the derivative is 0.
    """
    mass = p[:, :-1].logsumexp(-1, keepdim=True).clamp(min=LOWEST)
    alone = (p[:, :-1] - mass).clamp(min=LOWEST)
    return (mass + q[:, -1:] + _kl(alone, q[:, :-1]).unsqueeze(-1)).detach()


@dataclass(frozen=True)
class ReverseKL(Loss):
    """sum q log(q / p): the draft says nothing that the target would not."""

    name = "reverse_kl"

    def __call__(self, batch: DistillBatch, progress: float = 0.0) -> Tensor:
        return _kl(batch.draft_log_probs, batch.target_log_probs)


@dataclass(frozen=True)
class JensenShannon(Loss):
    """Between the two: KL to the mixture m = beta p + (1 - beta) q.

    beta  near 0 its gradient is forward KL's times beta, near 1 reverse KL's times 1 - beta
    """

    name = "jsd"
    beta: Annotated[float, Between(0, 1, "()")] = 0.5

    def __post_init__(self) -> None:
        check_ranges(self, "loss.")

    def __call__(self, batch: DistillBatch, progress: float = 0.0) -> Tensor:
        p, q = batch.target_log_probs, batch.draft_log_probs
        share = torch.tensor(self.beta, dtype=p.dtype, device=p.device)
        mixed = torch.logaddexp(p + share.log(), q + torch.log1p(-share))
        return share * _kl(p, mixed) + (1 - share) * _kl(q, mixed)


@dataclass(frozen=True)
class TotalVariation(Loss):
    """The probability of rejection itself. Its gradient vanishes where p and q share no mass: warm starts, or mixtures."""

    name = "tvd"

    def __call__(self, batch: DistillBatch, progress: float = 0.0) -> Tensor:
        p, q = batch.disjoint
        return (p.exp() - q.exp()).abs().sum(-1) / 2


@dataclass(frozen=True)
class AcceptanceLikelihood(Loss):
    """-log alpha: total variation's direction, with a gradient 1 / alpha times as long."""

    name = "lk"

    def __call__(self, batch: DistillBatch, progress: float = 0.0) -> Tensor:
        return -torch.minimum(*batch.disjoint).logsumexp(-1)


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """-log q(token): ordinary training on the texts, the control of every other loss."""

    name = "cross_entropy"

    def __call__(self, batch: DistillBatch, progress: float = 0.0) -> Tensor:
        return -batch.token_log_probs.masked_fill(~batch.has_row, 0.0)


@dataclass(frozen=True)
class Term:
    """A loss in a mixture. Its weight goes in a straight line over the training.

    loss    any loss
    weight  at the beginning
    final   at the end; None: as at the beginning
    """

    loss: Loss
    weight: Annotated[float, AtLeast(0)] = 1.0
    final: Annotated[float, AtLeast(0)] | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "loss.terms.")

    def at(self, progress: float) -> float:
        """The weight when this share of the training is done."""
        final = self.weight if self.final is None else self.final
        return self.weight + (final - self.weight) * progress


@dataclass(frozen=True)
class Mixture(Loss):
    """The weighted sum of losses.

    terms  {NAME: loss and weight}
    """

    terms: Mapping[str, Term]

    def __post_init__(self) -> None:
        terms = self.terms.values()
        if not any(term.weight for term in terms) or not any(term.at(1.0) for term in terms):
            raise InputError("loss.terms: expected a weight above 0 at the beginning and at the end, got none")

    def __call__(self, batch: DistillBatch, progress: float = 0.0) -> Tensor:
        at_work = [term for term in self.terms.values() if term.at(progress)]
        first, *others = (term.at(progress) * term.loss(batch, progress) for term in at_work)
        return sum(others, first)


def _kl(left: Tensor, right: Tensor) -> Tensor:
    """sum left log(left / right) [n], from logs; categories of probability 0 add nothing."""
    return (left.exp() * (left - right)).sum(-1)

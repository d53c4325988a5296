"""What a rule emits, exactly: its distribution summed over every tuple of candidates. For small vocabularies.

Shapes: P pairs of distributions, K candidates, V vocabulary, T = V^K tuples; of layers M beam-token pairs, W_S candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.errors import unknown_name
from toolkit.verification.base import SelectionRule
from toolkit.verification.layer import LayerRule
from toolkit.verification.schemes import SCHEMES, num_distinct


@dataclass(frozen=True)
class Emission:
    """What a rule emits at a node.

    distribution      [P, V]  of the emitted token: p itself if the rule is exact
    accepted [P]     P(it was a candidate, by acceptance)
    drafted  [P]     P(it was a candidate, by acceptance or as the extra token)
    """

    distribution: Tensor
    accepted: Tensor
    drafted: Tensor


@dataclass(frozen=True)
class Tuples:
    """Every tuple of candidates.

    tokens  [T, K]  positions after a pair's count are 0
    probs   [P, T]  P(tuple)
    counts  [P]     real candidates: fewer than K where q has fewer different tokens
    """

    tokens: Tensor
    probs: Tensor
    counts: Tensor

    @property
    def members(self) -> Tensor:
        """1 for tokens among the tuple's real candidates, else 0: [P, T, V]."""
        pairs, vocab_size = len(self.counts), int(self.tokens.max()) + 1
        real = torch.arange(self.tokens.shape[1], device=self.counts.device) < self.counts.unsqueeze(1)
        index = self.tokens.expand(pairs, -1, -1)
        zeros = self.probs.new_zeros(pairs, len(self.tokens), vocab_size)
        return zeros.scatter_reduce(-1, index, real.unsqueeze(1).expand_as(index).to(zeros.dtype), "amax")


def candidate_tuples(scheme: str, draft_probs: Tensor) -> Tuples:
    """All tuples of candidates and their probabilities under draft_probs [P, K, V] (row 0 of K unless independent or top_k)."""
    if scheme not in SCHEMES:
        raise unknown_name("scheme", scheme, SCHEMES)
    num_drafts, vocab_size = draft_probs.shape[1:]
    tokens = torch.cartesian_prod(*[torch.arange(vocab_size, device=draft_probs.device)] * num_drafts)
    tokens = tokens.reshape(-1, num_drafts)
    repeats = scheme in ("iid", "independent", "top_k")
    counts = num_distinct(draft_probs[:, 0], num_drafts)
    counts = torch.full_like(counts, num_drafts) if repeats else counts
    left = draft_probs[:, :1].expand(-1, len(tokens), -1)
    tuple_probs = torch.ones_like(left[..., 0])
    for k, column in enumerate(tokens.unbind(1)):
        if scheme in ("independent", "top_k"):  # of top_k, row k is a point mass
            left = draft_probs[:, k : k + 1].expand_as(left)
        distribution = left / left.sum(-1, keepdim=True).clamp(min=torch.finfo(left.dtype).tiny)
        if scheme == "greedy":
            most_probable = torch.zeros_like(distribution).scatter(-1, distribution.argmax(-1, keepdim=True), 1.0)
            distribution = torch.where((k < counts - 1).view(-1, 1, 1), most_probable, distribution)
        index = column.expand_as(tuple_probs).unsqueeze(-1)
        drawn = distribution.gather(-1, index).squeeze(-1)
        tuple_probs = tuple_probs * torch.where((k < counts).unsqueeze(1), drawn, (column == 0).to(drawn.dtype))
        left = left if repeats else left.scatter(-1, index, 0.0)
    return Tuples(tokens, tuple_probs, counts)


def emission(
    rule: SelectionRule, scheme: str, target_probs: Tensor, draft_probs: Tensor, *, checked: bool = True
) -> Emission:
    """What the rule emits when candidates are drawn so: target_probs [P, V], draft_probs [P, K, V].

    `checked=False` skips the checks of `SelectionRule.distribution`: to see what a rule does under another scheme than its own.
    """
    tuples = candidate_tuples(scheme, draft_probs)
    pair, which = (tuples.probs > 0).nonzero(as_tuple=True)
    tuple_probs, candidates = tuples.probs[pair, which], tuples.tokens[which]
    distribution = rule.distribution if checked else rule._distribution_or_target
    accept, residuals = distribution(target_probs[pair], draft_probs[pair], candidates, tuples.counts[pair])
    accepted = accept.sum(-1)
    emitted = (residuals * (1 - accepted).unsqueeze(-1)).scatter_add(-1, candidates, accept)
    drafted = (emitted * tuples.members[pair, which]).sum(-1)

    def mean(values: Tensor) -> Tensor:
        zeros = values.new_zeros(len(target_probs), *values.shape[1:])
        return zeros.index_add(0, pair, values * tuple_probs.view(-1, *[1] * (values.dim() - 1)))

    return Emission(mean(emitted), mean(accepted), mean(drafted))


def optimum(tuples: Tuples, target_probs: Tensor) -> Tensor:
    """1 + min over all sets H of tokens of p(H) - P(all candidates in H): [P], from target_probs [P, V]. O(2^V)."""
    vocab_size = target_probs.shape[1]
    subsets = torch.arange(2**vocab_size, device=target_probs.device).unsqueeze(1)
    holds = (subsets >> torch.arange(vocab_size, device=target_probs.device) & 1).to(target_probs.dtype)  # [2^V, V]
    inside = (tuples.members @ (1 - holds).T == 0).to(target_probs.dtype)  # [P, T, 2^V]
    return 1 + (target_probs @ holds.T - torch.einsum("pt,pts->ps", tuples.probs, inside)).amin(-1)


def beam_distribution(
    rule: LayerRule, target_probs: Tensor, draft_probs: Tensor, num_candidates: int, width: int, scheme: str = "iid"
) -> Tensor:
    """Joint distribution of a layer's output beams, in their order: [M] * width from target_probs, draft_probs [M].

    The kept candidates as they were walked, one beam from the residual, the rest from p. Lossless: the product of p's.
    """
    pair_distributions = draft_probs.expand(1, num_candidates, -1)
    tuples = candidate_tuples(scheme, pair_distributions)
    which = (tuples.probs[0] > 0).nonzero().squeeze(1)
    candidates, real = tuples.tokens[which], torch.arange(num_candidates, device=which.device) < tuples.counts
    p, q = (distribution.expand(len(which), -1) for distribution in (target_probs, draft_probs))
    joint = target_probs.new_zeros([len(target_probs)] * width)
    for accepted, probs, residuals in rule.distribution(p, q, candidates, width, real.expand_as(candidates)):
        beams = [torch.nn.functional.one_hot(candidates[:, k], p.shape[1]) for k in accepted.nonzero()[:, 0]]
        beams = (beams + [residuals] + [p] * width)[:width]
        weight = tuples.probs[0, which] * probs
        for beam in beams:
            weight = weight.unsqueeze(-1) * beam.view(len(beam), *[1] * (weight.dim() - 1), -1)
        joint = joint + weight.sum(0)
    return joint

"""What every rule shares: distributions without random numbers, and verdicts drawn from them.

p is the target's distribution after warping, q the distribution a candidate was drawn from. Uniforms of a round are one
row of 3 M + 1 numbers (`num_uniforms`, `split_uniforms`). M is the most nodes a round of the method can have:

    n          draws node n
    M + n      tests node n; siblings are tested together, with the first one's
    2 M        draws the extra token if the walk ends, or goes on by it, at the context
    2 M + 1 + n   ... at node n

Every decision has its own slot, so no number is used twice however the walk goes.

Shapes: leading dimensions `...` are free; K candidates or chain positions, V vocabulary, N nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.errors import InputError
from toolkit.sampling import draw
from toolkit.types import Proposal, Verdict


class Rule(ABC):
    """Decides acceptance from p, q and the candidates.

    name      what `toolkit.verification.get` and `rule=` call it; declared by each concrete rule
    lossless  the emitted text follows the target's distribution exactly
    schemes   the sampling schemes of candidates under which that holds (`toolkit.verification.schemes`)
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    schemes: ClassVar[tuple[str, ...]]


class TextRule(Rule):
    """A rule for one text per row: its tree of candidates is verified at once."""

    @abstractmethod
    def verify(self, proposal: Proposal, target_probs: Tensor, uniforms: Tensor) -> Verdict:
        """Draw a verdict. target_probs [B, N + 1, V]: index 0 after the context, n + 1 after node n.

        A row is not `valid` if p after any of its nodes, or the q of any of its candidates, is not a number.
        """


class PathRule(TextRule):
    """A rule for chains: how long a prefix of the drafted tokens is kept."""

    schemes: ClassVar[tuple[str, ...]] = ("iid", "independent")

    def distribution(
        self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, num_drafted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """P(accepted length = n) [..., K + 1] and the distribution of the extra token at each length [..., K + 1, V].

        target_probs [..., K + 1, V], draft_probs [..., K, V], tokens [..., K], num_drafted [...] (None: K).
        float64 in, float64 out. Raises InputError if these are not distributions, or a token is outside the support of its q.
        """
        num_drafted = (
            full_lengths(tokens) if num_drafted is None else torch.as_tensor(num_drafted, device=tokens.device)
        )
        check_distribution("target_probs", target_probs, (*tokens.shape[:-1], tokens.shape[-1] + 1))
        check_distribution("draft_probs", draft_probs, tokens.shape, target_probs.shape[-1])
        check_support(draft_probs, tokens, first_ones(tokens, num_drafted))
        return self._distribution(target_probs, draft_probs, tokens, num_drafted)

    @abstractmethod
    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, num_drafted: Tensor
    ) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def accept(
        self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, num_drafted: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw the accepted length [B] with uniforms [B, K]; also the (unnormalised) distribution of the extra token [B, V]."""

    def verify(self, proposal: Proposal, target_probs: Tensor, uniforms: Tensor) -> Verdict:
        num_nodes = proposal.num_nodes
        _, tests, extras = split_uniforms(uniforms)
        length, extra_distribution = self.accept(
            target_probs, proposal.draft_probs, proposal.tokens, proposal.num_drafted, tests[:, :num_nodes]
        )
        steps = torch.arange(num_nodes, device=length.device)
        path = torch.where(steps < length.unsqueeze(1), steps, -1)
        valid = holds_numbers(proposal, target_probs) & (extra_distribution.sum(-1) > 0)
        extra = draw(extra_distribution.nan_to_num(1.0), extras.gather(1, length.unsqueeze(1)).squeeze(1))
        return Verdict(path, length, extra, length == proposal.num_drafted, valid)


class SelectionRule(TextRule):
    """A rule for one node of a draft tree: which of its K children is emitted, if any."""

    def distribution(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """P(candidate k is emitted by acceptance) [..., K], and the distribution of the extra token if none is [..., V].

        target_probs [..., V], draft_probs [..., K, V] (row k: the distribution candidate k was drawn from; without replacement
        the distribution before removals), candidates [..., K], num_candidates [...] (None: K). float64 in, float64 out.
        Equal candidates (i.i.d. draws repeat) share their token's probability; what counts is its sum over them.
        Raises InputError if these are not distributions, or if the candidates could not have been drawn.
        """
        if candidates.dim() == 0 or candidates.shape[-1] < 1:
            raise InputError(f"candidates: expected at least 1 per node, got shape {list(candidates.shape)}")
        if num_candidates is None:
            num_candidates = full_lengths(candidates)
        num_candidates = torch.as_tensor(num_candidates, device=candidates.device)
        check_counts("num_candidates", num_candidates, candidates)
        check_distribution("target_probs", target_probs, candidates.shape[:-1])
        check_distribution("draft_probs", draft_probs, candidates.shape, target_probs.shape[-1])
        self._check_candidates(draft_probs, candidates, first_ones(candidates, num_candidates))
        return self._distribution_or_target(target_probs, draft_probs, candidates, num_candidates)

    def accepted(self, target_probs: Tensor, draft_probs: Tensor) -> Tensor | None:
        """P(a candidate is emitted by acceptance) [...], summed over all candidates drawn from draft_probs [..., K, V].

        The candidates are i.i.d. or independent. None: the rule has no such sum.
        """
        return None

    @abstractmethod
    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`distribution` without checks, K >= 1. Rows without candidates may get any residual: they are given p."""

    def _distribution_or_target(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`_distribution`, and p itself where there are no candidates: a leaf's extra token is the bonus."""
        if candidates.shape[-1] == 0:
            return target_probs.new_zeros(candidates.shape), target_probs
        candidates = candidates.masked_fill(~first_ones(candidates, num_candidates), 0)
        accept, residuals = self._distribution(target_probs, draft_probs, candidates, num_candidates)
        return accept, torch.where(num_candidates.unsqueeze(-1) > 0, residuals, target_probs)

    def _check_candidates(self, draft_probs: Tensor, candidates: Tensor, real: Tensor) -> None:
        """Raises InputError if the rule's scheme cannot produce these candidates."""
        check_support(draft_probs, candidates, real)

    def verify(self, proposal: Proposal, target_probs: Tensor, uniforms: Tensor) -> Verdict:
        """Walk from the context down the tree, all rows in step, until a node emits a token that is not its child."""
        _, tests, extras = split_uniforms(uniforms)
        table = candidate_table(proposal)
        nodes = pad(candidate_nodes(proposal), (0, 1), value=-1)  # the last one stands for none
        rows = torch.arange(len(target_probs), device=target_probs.device)
        node = torch.full_like(rows, -1)
        path = torch.full_like(proposal.tokens, -1)
        length, extra = torch.zeros_like(rows), torch.zeros_like(rows)
        walking = torch.ones_like(rows, dtype=torch.bool)
        bonus = torch.zeros_like(walking)
        valid = holds_numbers(proposal, target_probs)
        for _ in range(proposal.num_nodes + 1):
            at_node = table[rows, node + 1]
            chosen, token, good = self._emit(
                proposal, nodes, target_probs[rows, node + 1], at_node, node, tests, extras
            )
            following = nodes.gather(1, chosen.unsqueeze(1) % nodes.shape[1]).squeeze(1)
            valid &= good | ~walking
            ends = walking & (following < 0)
            extra = torch.where(ends, token, extra)
            bonus |= ends & (at_node < 0).all(-1)
            walking &= ~ends
            if not bool(walking.any()):
                break
            slot = torch.where(walking, length, 0)
            path[rows, slot] = torch.where(walking, following, path[rows, slot])
            node = torch.where(walking, following, node)
            length = length + walking
        return Verdict(path, length, extra, bonus, valid)

    def _emit(
        self,
        proposal: Proposal,
        nodes: Tensor,
        target_probs: Tensor,
        at_node: Tensor,
        node: Tensor,
        tests: Tensor,
        extras: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Visit one node per row. Returns the candidate the walk goes on with [B] (-1: none), the extra token [B], and
        whether that comes from a distribution [B].

        nodes [B, M] of the candidates, target_probs [B, V] after the nodes [B], at_node [B, K] its candidates (-1 after
        the last). A candidate is reached by acceptance, or because the extra token is that candidate.
        """
        real = at_node >= 0
        index = at_node.clamp(min=0)
        tokens = proposal.tokens.gather(1, nodes.gather(1, index).clamp(min=0))
        drawn_from = index if proposal.drawn_from is None else proposal.drawn_from.gather(1, index)
        draft_probs = proposal.draft_probs[torch.arange(len(real), device=real.device).unsqueeze(1), drawn_from]
        accept, residuals = self._distribution_or_target(target_probs, draft_probs, tokens, real.sum(-1))
        extra = draw(residuals.nan_to_num(1.0), extras.gather(1, (node + 1).unsqueeze(1)).squeeze(1))
        below = tests.gather(1, index[:, :1]) < accept.cumsum(-1)  # false for not-a-number as well
        redrawn = real & (tokens == extra.unsqueeze(1)) & ~below.any(-1, keepdim=True)
        reached = torch.where(below, real, redrawn)
        chosen = torch.full_like(node, -1)
        for k in reversed(range(at_node.shape[1])):
            chosen = torch.where(reached[:, k], at_node[:, k], chosen)
        return chosen, extra, residuals.sum(-1) > 0


class TreeRule(TextRule):
    """A rule for a whole draft tree: at which node the accepted path ends."""

    def distribution(self, proposal: Proposal, target_probs: Tensor) -> tuple[Tensor, Tensor]:
        """P(the path ends at a node) [B, N + 1], and the extra token's distribution there [B, N + 1, V]; index 0: the context.

        target_probs [B, N + 1, V]. float64 in, float64 out. A parent stands before its children among the candidates.
        Raises InputError if these are not distributions, or if the candidates could not have been drawn.
        """
        nodes, draft_probs = candidate_nodes(proposal), candidate_probs(proposal)
        check_distribution("target_probs", target_probs, (len(nodes), proposal.num_nodes + 1))
        check_distribution("draft_probs", draft_probs, nodes.shape, target_probs.shape[-1] if nodes.shape[1] else None)
        tokens = proposal.tokens.gather(1, nodes.clamp(min=0))
        self._check_candidates(draft_probs, tokens, nodes >= 0, candidate_parents(proposal))
        return self._distribution(proposal, target_probs)

    def _check_candidates(self, draft_probs: Tensor, tokens: Tensor, real: Tensor, parents: Tensor) -> None:
        """Raises InputError for candidates [B, M] that could not have been drawn."""
        check_support(draft_probs, tokens, real)

    @abstractmethod
    def _distribution(self, proposal: Proposal, target_probs: Tensor) -> tuple[Tensor, Tensor]:
        """`distribution` without checks; 0 at nodes that fill the batch."""

    def verify(self, proposal: Proposal, target_probs: Tensor, uniforms: Tensor) -> Verdict:
        """Draw the last node with the first test, then the extra token with the node's own number."""
        _, tests, extras = split_uniforms(uniforms)
        ends, residuals = self._distribution(proposal, target_probs)
        rows = torch.arange(len(ends), device=ends.device)
        end = draw(ends.nan_to_num(1.0), pad(tests, (0, 1))[:, 0])  # nothing drafted: any number will do
        distribution = residuals[rows, end]
        extra = draw(distribution.nan_to_num(1.0), extras.gather(1, end.unsqueeze(1)).squeeze(1))
        below = (candidate_parents(proposal) == (end - 1).unsqueeze(1)) & (candidate_nodes(proposal) >= 0)
        valid, path = holds_numbers(proposal, target_probs) & (distribution.sum(-1) > 0), path_to(proposal, end - 1)
        return Verdict(path, (path >= 0).sum(1), extra, ~below.any(1), valid)


def acceptance(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """min(1, p(y)/q(y)): distributions [..., V], tokens [...]. A token neither model can produce is not accepted."""
    return acceptances(target_probs, draft_probs, tokens.unsqueeze(-1)).squeeze(-1)


def acceptances(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """min(1, p(y)/q(y)) for several tokens of one distribution: distributions [..., V], tokens [..., K].

    Not a number where p(y) or q(y) is not.
    """
    p, q = target_probs.gather(-1, tokens), draft_probs.gather(-1, tokens)
    return torch.where(q <= 0, p.sign(), p / q.clamp(min=torch.finfo(q.dtype).tiny)).clamp(max=1.0)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """norm((p - q)+) [..., V]; where p never exceeds q (the residual is then reached by rounding alone), p."""
    return normalized((target_probs - draft_probs).clamp(min=0), target_probs)


def normalized(weights: Tensor, otherwise: Tensor) -> Tensor:
    """weights [..., V] scaled to sum 1; `otherwise` where they are all 0."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=torch.finfo(weights.dtype).tiny), otherwise)


def num_uniforms(max_nodes: int) -> int:
    """How many uniforms a row needs for a round of at most `max_nodes` nodes."""
    return 3 * max_nodes + 1


def split_uniforms(uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """uniforms [B, 3 M + 1] by use: draws [B, M], tests [B, M], extras [B, M + 1] (index 0: after the context)."""
    most = (uniforms.shape[1] - 1) // 3
    return uniforms[:, :most], uniforms[:, most : 2 * most], uniforms[:, 2 * most :]


def first_ones(tokens: Tensor, counts: Tensor) -> Tensor:
    """Mask [..., K] of the first `counts` [...] of tokens [..., K]."""
    return torch.arange(tokens.shape[-1], device=tokens.device) < counts.unsqueeze(-1)


def full_lengths(tokens: Tensor) -> Tensor:
    """K for every leading index of tokens [..., K]."""
    return torch.full(tokens.shape[:-1], tokens.shape[-1], device=tokens.device)


def check_distribution(name: str, probs: Tensor, leading: tuple[int, ...], vocab_size: int | None = None) -> None:
    """Raises InputError unless probs [*leading, V] are distributions: not negative, each summing to 1 within 1e-4."""
    if tuple(probs.shape[:-1]) != tuple(leading) or (vocab_size is not None and probs.shape[-1] != vocab_size):
        expected = [*leading, "V" if vocab_size is None else vocab_size]
        raise InputError(f"{name}: expected shape {expected}, got {list(probs.shape)}")
    if not bool((probs >= 0).all()):
        raise InputError(f"{name}: expected probabilities of at least 0, got {float(probs.min())}")
    if probs.numel() and bool(((probs.sum(-1) - 1).abs() > 1e-4).any()):
        sums = probs.sum(-1).flatten()
        raise InputError(
            f"{name}: expected distributions that sum to 1 within 1e-4, got {float(sums[(sums - 1).abs().argmax()])}"
        )


def check_counts(name: str, counts: Tensor, tokens: Tensor) -> None:
    """Raises InputError unless counts [...] lie in 0..K for tokens [..., K]."""
    if counts.shape != tokens.shape[:-1]:
        raise InputError(f"{name}: expected shape {list(tokens.shape[:-1])}, got {list(counts.shape)}")
    if bool(((counts < 0) | (counts > tokens.shape[-1])).any()):
        raise InputError(f"{name}: expected 0 to {tokens.shape[-1]}, got {counts.tolist()}")


def check_support(draft_probs: Tensor, tokens: Tensor, real: Tensor) -> None:
    """Raises InputError if a token that counts (mask `real`) could not have been drawn from its distribution."""
    if tokens.numel() == 0:
        return
    if bool(((tokens < 0) | (tokens >= draft_probs.shape[-1]))[real].any()):
        raise InputError(f"candidates: expected token ids below {draft_probs.shape[-1]}, got {tokens.tolist()}")
    drawn = draft_probs.gather(-1, tokens.masked_fill(~real, 0).unsqueeze(-1)).squeeze(-1)
    if bool((drawn[real] <= 0).any()):
        raise InputError(
            f"candidates: expected tokens that their draft distribution can produce, got {tokens.tolist()}"
        )


def check_distinct(tokens: Tensor, real: Tensor, parents: Tensor | None = None) -> None:
    """Raises InputError if a token that counts comes twice among the candidates [..., K] of a node, or of one of `parents`."""
    earlier = torch.ones(tokens.shape[-1], tokens.shape[-1], dtype=torch.bool, device=tokens.device).tril(-1)
    equal = (tokens.unsqueeze(-1) == tokens.unsqueeze(-2)) & real.unsqueeze(-1) & real.unsqueeze(-2) & earlier
    if parents is not None:
        equal &= parents.unsqueeze(-1) == parents.unsqueeze(-2)
    if bool(equal.any()):
        raise InputError(f"candidates: expected different tokens, got {tokens.tolist()}")


def holds_numbers(proposal: Proposal, target_probs: Tensor) -> Tensor:
    """Rows [B] whose p after the context and every node, and whose q of every candidate, hold numbers alone.

    What fills the batch is not looked at: a row alone has none of it.
    """
    p, q = (torch.isfinite(probs.sum(-1)) for probs in (target_probs, proposal.draft_probs))
    if proposal.drawn_from is not None:
        q = q.gather(1, proposal.drawn_from)
    real = candidate_nodes(proposal) >= 0
    return (p | ~first_ones(p, proposal.num_drafted + 1)).all(1) & (q[:, : real.shape[1]] | ~real).all(1)


def candidate_nodes(proposal: Proposal) -> Tensor:
    """The node [B, M] that each candidate is; -1 after the last."""
    if proposal.candidates is not None:
        return proposal.candidates
    nodes = torch.arange(proposal.num_nodes, device=proposal.tokens.device)
    return torch.where(nodes < proposal.num_drafted.unsqueeze(1), nodes, -1)


def candidate_parents(proposal: Proposal) -> Tensor:
    """The node [B, M] above each candidate, -1: the context; any node after the last."""
    nodes = candidate_nodes(proposal)
    return nodes - 1 if proposal.parents is None else proposal.parents.gather(1, nodes.clamp(min=0))


def candidate_probs(proposal: Proposal) -> Tensor:
    """The distribution [B, M, V] that each candidate was drawn from."""
    if proposal.drawn_from is None:
        return proposal.draft_probs[:, : candidate_nodes(proposal).shape[1]]
    return proposal.draft_probs[
        torch.arange(len(proposal.tokens), device=proposal.tokens.device).unsqueeze(1), proposal.drawn_from
    ]


def path_to(proposal: Proposal, end: Tensor) -> Tensor:
    """The nodes [B, N] from the root to node `end` [B], -1 after it; `end` -1: none."""
    nodes = torch.arange(proposal.num_nodes, device=end.device).expand_as(proposal.tokens)
    parents = nodes - 1 if proposal.parents is None else proposal.parents
    on_path = torch.zeros_like(nodes, dtype=torch.bool)
    for _ in range(proposal.num_nodes):
        on_path |= nodes == end.unsqueeze(1)
        end = torch.where(end >= 0, parents.gather(1, end.clamp(min=0).unsqueeze(1)).squeeze(1), -1)
    path = torch.where(on_path, nodes, proposal.num_nodes).sort(1).values  # a parent stands before its children
    return torch.where(path < proposal.num_nodes, path, -1)


def candidate_table(proposal: Proposal) -> Tensor:
    """Candidate ids [B, N + 1, K]: row 0 those at the context, row n + 1 those at node n; -1 after the last.

    K is the largest number of candidates at a node of the batch. They keep their order.
    """
    num_rows, num_nodes = proposal.tokens.shape
    nodes = candidate_nodes(proposal)
    order, real = torch.arange(nodes.shape[1], device=nodes.device), nodes >= 0
    above = candidate_parents(proposal)
    elder = (above.unsqueeze(2) == above.unsqueeze(1)) & real.unsqueeze(1) & (order < order.unsqueeze(1))
    rank = elder.sum(2)  # [B, M]: candidates of the same node before this one
    most = int(torch.where(real, rank + 1, 0).max()) if nodes.shape[1] else 0
    slot = torch.where(real, (above + 1) * most + rank, (num_nodes + 1) * most)  # the last slot is thrown away
    table = torch.full((num_rows, (num_nodes + 1) * most + 1), -1, device=nodes.device)
    table.scatter_(1, slot, order.expand(num_rows, -1))
    return table[:, :-1].reshape(num_rows, num_nodes + 1, most)

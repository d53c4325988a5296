"""Traversal verification: a draft tree is verified from its leaves up, each path as a whole; exact.

Paper: Weng et al., Traversal Verification for Speculative Tree Decoding (arXiv:2505.12398), Algorithm 2; restated in
docs/papers/traversal.md. On a chain it is block verification (arXiv:2403.10444).
theirs -> ours: M_b -> p, target_probs; M_s -> q, draft_probs; p^ini and p_acc -> weight; M_b' -> left.
Deviations: no leaf is tested. The weights do not depend on the tests, so P(the path ends at a node) is summed up, and the last
node is one draw. Chains may share nodes: a candidate that repeats an earlier sibling is never accepted, as p has nothing
left there; it only counts for its parent's residual.

Shapes: B rows, N nodes, M candidates, V vocabulary. Index 0 of N + 1 is the context. Time O(M V) per row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.types import Proposal
from toolkit.verification.base import (
    TreeRule,
    acceptance,
    candidate_nodes,
    candidate_parents,
    candidate_probs,
    check_distinct,
    check_support,
    normalized,
)


class Traversal(TreeRule):
    """weight(child) = min(weight p(x) / q(x), 1). If the child's subtree keeps nothing: p <- norm((weight p - q)+) and
    weight <- S / (S + 1 - weight), S = sum (weight p - q)+, for the next child, at last for the node itself."""

    name = "traversal"
    lossless = True
    schemes = ("iid", "independent", "top_k")

    def _distribution(self, proposal: Proposal, target_probs: Tensor) -> tuple[Tensor, Tensor]:
        nodes, above = candidate_nodes(proposal), candidate_parents(proposal) + 1
        tokens = proposal.tokens.gather(1, nodes.clamp(min=0))
        draft_probs = self._left_to_draw(candidate_probs(proposal), tokens, above)
        rows, tiny = torch.arange(len(nodes), device=nodes.device), torch.finfo(target_probs.dtype).tiny
        left = target_probs.clone()  # what the extra token would be drawn from, up to `scale`
        weight = torch.zeros_like(target_probs[..., 0])
        weight[:, 0] = 1.0
        scale = weight.clone()  # weight * p = scale * left
        rank = torch.full_like(weight, proposal.num_nodes + 1, dtype=torch.long)  # in the order from the leaves up
        rank[:, 0] = 0
        inner = torch.zeros_like(rank, dtype=torch.bool)
        for m, (node, parent) in enumerate(zip((nodes + 1).unbind(1), above.unbind(1), strict=True)):
            real = node > 0
            new = real & (rank[rows, node] > proposal.num_nodes)
            whole = scale[rows, parent].unsqueeze(1) * left[rows, parent]
            kept = acceptance(whole, draft_probs[:, m], tokens[:, m])
            rest = (whole - draft_probs[:, m]).clamp(min=0)
            total = rest.sum(1)
            below = (total + (1 - weight[rows, parent])).clamp(min=tiny)
            for values, of_node, of_parent in ((weight, kept, total / below), (scale, kept, 1 / below)):
                values[rows, node] = torch.where(new, of_node, values[rows, node])
                values[rows, parent] = torch.where(real, of_parent, values[rows, parent])
            left[rows, parent] = torch.where(real.unsqueeze(1), rest, left[rows, parent])
            inner[rows, parent] |= real
            before = rank[rows, parent]  # right before the parent, after its earlier children's subtrees
            rank += new.unsqueeze(1) & (rank >= before.unsqueeze(1))
            rank[rows, node] = torch.where(new, before, rank[rows, node])
        weight[:, 0] = 1.0
        order = rank.argsort(1)
        ends = weight.gather(1, order)
        ends = ends * pad((1 - ends).cumprod(1), (1, -1), value=1.0)
        ends = torch.where(rank <= proposal.num_nodes, torch.zeros_like(weight).scatter(1, order, ends), 0.0)
        return ends, torch.where(inner.unsqueeze(2), normalized(left, target_probs), target_probs)

    def _left_to_draw(self, draft_probs: Tensor, tokens: Tensor, above: Tensor) -> Tensor:
        """The distribution of each candidate [B, M, V], given its earlier siblings."""
        return draft_probs


class TraversalWithoutReplacement(Traversal):
    """The same for candidates without replacement: q is without the node's earlier candidates."""

    name = "traversal_without_replacement"
    lossless = True
    schemes = ("without_replacement",)

    def _left_to_draw(self, draft_probs: Tensor, tokens: Tensor, above: Tensor) -> Tensor:
        left = draft_probs.clone()
        for m in range(tokens.shape[1]):
            younger = (above[:, m + 1 :] == above[:, m : m + 1]).unsqueeze(2)
            later, index = left[:, m + 1 :], tokens[:, m].view(-1, 1, 1).expand_as(younger)
            later.scatter_(2, index, later.gather(2, index).masked_fill(younger, 0.0))
        return normalized(left, left)

    def _check_candidates(self, draft_probs: Tensor, tokens: Tensor, nodes: Tensor, real: Tensor) -> None:
        check_support(draft_probs, tokens, real)
        check_distinct(nodes, real)

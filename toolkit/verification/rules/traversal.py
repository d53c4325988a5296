"""Traversal verification: a draft tree is verified from its leaves up, each path as a whole; exact.

Paper: Weng et al., Traversal Verification for Speculative Tree Decoding (arXiv:2505.12398); restated in
docs/papers/traversal.md. On a chain it is block verification (arXiv:2403.10444).
theirs -> ours: M_b -> p, target_probs; M_s -> q, draft_probs; p^ini and p_acc -> weight; M_b' -> left.
Deviations: the weights do not depend on the tests, so P(the path ends at a node) is a product, and the last node one draw.
Chains may share nodes: p has nothing left for a candidate that repeats an earlier sibling. It counts for the residual alone.

Shapes: B rows, N nodes, M candidates, V vocabulary. Index 0 of N + 1 is the context. Time O(M V) per row.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.types import Proposal
from toolkit.verification import base


class Traversal(base.TreeRule):
    """weight(child) = min(weight p(x) / q(x), 1). If the child's subtree keeps nothing: p <- norm((weight p - q)+) and
    weight <- S / (S + 1 - weight), S = sum (weight p - q)+, for the next child, at last for the node itself."""

    name = "traversal"
    lossless = True
    schemes: ClassVar[tuple[str, ...]] = ("iid", "independent", "top_k")

    def _distribution(self, proposal: Proposal, target_probs: Tensor) -> tuple[Tensor, Tensor]:
        nodes, above = base.candidate_nodes(proposal), base.candidate_parents(proposal) + 1
        tokens = proposal.tokens.gather(1, nodes.clamp(min=0))
        draft_probs = self._left_to_draw(base.candidate_probs(proposal), tokens, above)
        rows, tiny = torch.arange(len(nodes), device=nodes.device), torch.finfo(target_probs.dtype).tiny
        left, weight = target_probs.clone(), torch.zeros_like(target_probs[..., 0])
        weight[:, 0] = 1.0
        rank = torch.full_like(weight, proposal.num_nodes + 1, dtype=torch.long)  # in the order from the leaves up
        rank[:, 0] = 0
        for m, (node, parent) in enumerate(zip((nodes + 1).unbind(1), above.unbind(1), strict=True)):
            real = node > 0
            new = real & (rank[rows, node] > proposal.num_nodes)
            whole = weight[rows, parent].unsqueeze(1) * left[rows, parent]
            rest = (whole - draft_probs[:, m]).clamp(min=0)
            total = rest.sum(1)
            after = total / (total + (1 - weight[rows, parent])).clamp(min=tiny)
            kept = base.acceptance(whole, draft_probs[:, m], tokens[:, m])
            weight[rows, node] = torch.where(new, kept, weight[rows, node])
            weight[rows, parent] = torch.where(real, after, weight[rows, parent])
            left[rows, parent] = torch.where(
                real.unsqueeze(1), base.normalized(rest, target_probs[rows, parent]), left[rows, parent]
            )
            before = rank[rows, parent]  # right before the parent, after its earlier children's subtrees
            rank += new.unsqueeze(1) & (rank >= before.unsqueeze(1))
            rank[rows, node] = torch.where(new, before, rank[rows, node])
        weight[:, 0] = 1.0
        order = rank.argsort(1)
        ends = weight.gather(1, order)
        ends = ends * pad((1 - ends).cumprod(1), (1, -1), value=1.0)
        return torch.where(rank <= proposal.num_nodes, ends.gather(1, order.argsort(1)), 0.0), left

    def _left_to_draw(self, draft_probs: Tensor, tokens: Tensor, above: Tensor) -> Tensor:
        """The distribution of each candidate [B, M, V], given its earlier siblings."""
        return draft_probs


class TraversalWithoutReplacement(Traversal):
    """The same for candidates without replacement: q is without the node's earlier candidates."""

    name = "traversal_without_replacement"
    schemes = ("without_replacement",)

    def _check_candidates(self, draft_probs: Tensor, tokens: Tensor, real: Tensor, parents: Tensor) -> None:
        super()._check_candidates(draft_probs, tokens, real, parents)
        base.check_distinct(tokens, real, parents)

    def _left_to_draw(self, draft_probs: Tensor, tokens: Tensor, above: Tensor) -> Tensor:
        left = draft_probs.clone()
        for m in range(tokens.shape[1]):
            younger = (above[:, m + 1 :] == above[:, m : m + 1]).unsqueeze(2)
            later, index = left[:, m + 1 :], tokens[:, m].view(-1, 1, 1).expand_as(younger)
            later.scatter_(2, index, later.gather(2, index).masked_fill(younger, 0.0))
        return base.normalized(left, left)

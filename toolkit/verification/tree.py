"""The children of every node, from the flat arrays of a proposal."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.types import Proposal


def child_table(proposal: Proposal) -> Tensor:
    """Node ids [B, N + 1, K]: row 0 the children of the context, row n + 1 those of node n; -1 behind the last.

    K is the largest number of children in the batch. Siblings keep the order of their node ids; nodes behind
    `num_drafted` are nobody's children.
    """
    num_rows, num_nodes = proposal.tokens.shape
    nodes = torch.arange(num_nodes, device=proposal.tokens.device)
    parents = (nodes - 1).expand(num_rows, -1) if proposal.parents is None else proposal.parents
    real = nodes < proposal.num_drafted.unsqueeze(1)
    elder = (parents.unsqueeze(2) == parents.unsqueeze(1)) & real.unsqueeze(1) & (nodes < nodes.unsqueeze(1))
    rank = elder.sum(2)  # [B, N]: siblings before this node
    most = int(torch.where(real, rank + 1, 0).max()) if num_nodes else 0
    place = torch.where(real, (parents + 1) * most + rank, (num_nodes + 1) * most)  # the last place is thrown away
    table = torch.full((num_rows, (num_nodes + 1) * most + 1), -1, device=nodes.device)
    table.scatter_(1, place, nodes.expand(num_rows, -1))
    return table[:, :-1].reshape(num_rows, num_nodes + 1, most)

"""The candidates at every node, from the flat arrays of a proposal."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.types import Proposal


def candidate_nodes(proposal: Proposal) -> Tensor:
    """The node [B, M] that each candidate is; -1 behind the last."""
    if proposal.candidates is not None:
        return proposal.candidates
    nodes = torch.arange(proposal.num_nodes, device=proposal.tokens.device)
    return torch.where(nodes < proposal.num_drafted.unsqueeze(1), nodes, -1)


def candidate_table(proposal: Proposal) -> Tensor:
    """Candidate ids [B, N + 1, K]: row 0 those at the context, row n + 1 those at node n; -1 behind the last.

    K is the largest number of candidates at a node of the batch. They keep their order.
    """
    num_rows, num_nodes = proposal.tokens.shape
    nodes = candidate_nodes(proposal)
    order, real = torch.arange(nodes.shape[1], device=nodes.device), nodes >= 0
    above = nodes - 1 if proposal.parents is None else proposal.parents.gather(1, nodes.clamp(min=0))
    elder = (above.unsqueeze(2) == above.unsqueeze(1)) & real.unsqueeze(1) & (order < order.unsqueeze(1))
    rank = elder.sum(2)  # [B, M]: candidates of the same node before this one
    most = int(torch.where(real, rank + 1, 0).max()) if nodes.shape[1] else 0
    place = torch.where(real, (above + 1) * most + rank, (num_nodes + 1) * most)  # the last slot is thrown away
    table = torch.full((num_rows, (num_nodes + 1) * most + 1), -1, device=nodes.device)
    table.scatter_(1, place, order.expand(num_rows, -1))
    return table[:, :-1].reshape(num_rows, num_nodes + 1, most)

"""The distinct nodes of drafted chains: what a cache holds, and what a model reads once.

Draws with replacement repeat: chains that have drawn the same tokens share a node. A `DistinctNodes` keeps in which
node each of some chains of a tree ends. For the target these are all chains, for a draft model those that it drafts.

Shapes: B rows, C chains of a level, W distinct nodes of a level (the most of any row; rows with fewer are padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toolkit.engine.device import most_of
from toolkit.grammar.text import TextGrammar
from toolkit.grammar.walk import stacked


@dataclass
class DistinctNodes:
    """Nodes level by level. A node's id is its index among all levels so far, padding included, as in a cache.

    tokens, parents, real   per level [B, W]: token, id of the parent (-1: the context), whether it is a node
    ids                     per level [B, C]: the node each chain ends in; -1 for a chain that has stopped
    """

    tokens: list[Tensor] = field(default_factory=list)
    parents: list[Tensor] = field(default_factory=list)
    real: list[Tensor] = field(default_factory=list)
    ids: list[Tensor] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of ids so far."""
        return self.first(len(self.tokens))

    def first(self, level: int) -> int:
        """The first id of a level, counted from 0."""
        return sum(tokens.shape[1] for tokens in self.tokens[:level])

    def newest(self, num_rows: int, num_chains: int, device: torch.device) -> Tensor:
        """Where each chain [B, C] ends among the newest level's nodes; 0 at the context and for chains that stopped."""
        if not self.ids:
            return torch.zeros(num_rows, num_chains, dtype=torch.long, device=device)
        return (self.ids[-1] - self.first(len(self.ids) - 1)).clamp(min=0)

    def add(self, tokens: Tensor, parents: Tensor, alive: Tensor) -> None:
        """Add a level: the tokens that chains have drawn, after the nodes with these ids, all [B, C]."""
        first, num_chains = self.size, tokens.shape[1]
        order = torch.arange(num_chains, device=tokens.device)
        same = (tokens.unsqueeze(2) == tokens.unsqueeze(1)) & (parents.unsqueeze(2) == parents.unsqueeze(1))
        same &= alive.unsqueeze(1)
        leader = torch.where(same, order, num_chains).amin(2)  # the first chain that ends in the same node
        leads = alive & (leader == order)
        rank = leads.cumsum(1) - 1
        ids = first + rank.gather(1, leader.clamp(max=num_chains - 1))
        width = most_of(leads.sum(1), num_chains)
        chosen = (~leads).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        self.tokens.append(tokens.gather(1, chosen))
        self.parents.append(parents.gather(1, chosen))
        self.real.append(leads.gather(1, chosen))
        self.ids.append(torch.where(alive, ids, -1))

    def cut(self, levels: int) -> None:
        """Leave the first levels."""
        for part in (self.tokens, self.parents, self.real, self.ids):
            del part[levels:]

    def allowed(self, grammars: Sequence[TextGrammar | None], vocab_size: int) -> Tensor:
        """Which tokens may come after each node of the newest level [B, W, V] bool, by the grammars after the contexts [B]."""
        rows, first = [[grammar] for grammar in grammars], -1
        for tokens, parents in zip(self.tokens, self.parents, strict=True):
            above = [
                [states[max(parent - first, 0)] for parent in row]
                for states, row in zip(rows, parents.tolist(), strict=True)
            ]
            first += len(rows[0])
            rows = [
                [None if state is None else state.after(token) for state, token in zip(*pair, strict=True)]
                for pair in zip(above, tokens.tolist(), strict=True)
            ]
        return torch.stack([stacked(states, vocab_size) for states in rows])

    def seen(self, context: Tensor) -> Tensor:
        """Tokens of the text up to each node of the newest level [B, W, V] bool, from those of the context [B, V]."""
        seen, first = context.unsqueeze(1), -1
        for tokens, parents in zip(self.tokens, self.parents, strict=True):
            rows = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
            before = seen[rows, (parents - first).clamp(min=0)]
            first += seen.shape[1]
            seen = before.scatter(2, tokens.unsqueeze(2), True)
        return seen

"""A session: one causal language model reading B texts at once, each as a tree of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.engine.device import tensor_on
from toolkit.engine.packing import PackedLinears
from toolkit.engine.tree import Placement, TreeIndex
from toolkit.errors import InputError


@dataclass(frozen=True)
class Reading:
    """What a forward pass returned for the last T' tokens of its block.

    logits [b, T', V]   next-token logits, unwarped
    hidden [b, T', D]   final hidden states (after the final norm): the state that has read the token; earlier layers after
                        it, where the model gives them (`toolkit.engine.hidden_states`)
    """

    logits: Tensor
    hidden: Tensor


class Session(ABC):
    """One model plus one tree-structured, preallocated cache for B rows.

    `extend` reads tokens, `truncate` and `keep` forget them; rows are independent of each other. `num_calls` counts
    forward passes. Subclasses compute; where tokens live and what they see is the TreeIndex's.

    spoilt  [B] bool: rows that have read, since `clear`, a token whose state is not a number. Until then it may leak out of
            slots that are masked
    linears  packed weights that the model's forward passes multiply by; None: its own
    """

    linears: PackedLinears | None = None
    reads_states = False  # True for a draft that reads the target's states of the text

    def __init__(self, num_rows: int, capacity: int, device: torch.device):
        self.index = TreeIndex(num_rows, capacity, device)
        self.num_calls = 0
        self.spoilt = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.clips_tokens = False  # True where the other model of a pair has a larger vocabulary

    @property
    def lengths(self) -> list[int]:
        """Tokens the cache holds, per row."""
        return self.index.lengths

    def extend(
        self,
        tokens: Tensor,
        *,
        counts: list[int] | None = None,
        parents: Tensor | None = None,
        last: int = 1,
        rows: list[int] | None = None,
    ) -> Reading:
        """Read a block of tokens [b, T] in one forward pass; returns logits and states of the `last` tokens of the block.

        counts   how many tokens of each row are real, right-aligned in front of the tree nodes; None: all
        parents  [b, N] node ids of the last N tokens' parents (-1: the end of the context); None: the block is a chain
        rows     the session's rows that the block belongs to; None: all, in order
        Raises InputError if a row would overflow the cache.
        """
        rows = list(range(self.index.num_rows)) if rows is None else rows
        if tokens.shape[0] != len(rows):
            raise InputError(f"extend: expected tokens for {len(rows)} rows, got {tokens.shape[0]}")
        more = self._widened(tokens.shape[1]) - tokens.shape[1]
        if more:
            chain = tokens.shape[1] - (0 if parents is None else parents.shape[1])
            counts = [chain] * len(rows) if counts is None else counts
            tokens = torch.nn.functional.pad(tokens, (more, 0))
        placement = self.index.place(rows, tokens.shape[1], counts, parents)
        self.num_calls += 1
        reading = self._forward(tokens, rows, placement, parents, last)
        spoilt = reading.hidden[..., 0].isnan().any(1).to(self.index.device)
        if len(rows) < self.index.num_rows:
            spoilt = torch.zeros_like(self.spoilt).index_copy(0, tensor_on(self.index.device, rows), spoilt)
        self.spoilt = self.spoilt | spoilt
        return reading

    def truncate(self, lengths: list[int]) -> None:
        """Forget everything after the first `lengths[row]` tokens of each row. For chains; costs nothing."""
        self.index.truncate(lengths)

    def forget(self, lengths: list[int]) -> None:
        """Forget and wipe the tree nodes after the first `lengths[row]` tokens of each row."""
        self.index.lengths = list(lengths)
        for row in range(self.index.num_rows):
            self.clear(row)

    def keep(self, nodes: Tensor) -> Tensor:
        """Forget every tree node that is not on a path to one of `nodes` [B, W]; returns their new ids.

        With W = 1 the path becomes part of the context, and the returned id is -1.
        """
        contexts = list(self.index.context_lengths)
        moved, new_nodes = self.index.keep(nodes)
        self._move(contexts, moved)
        return new_nodes

    @property
    def fixed_rows(self) -> bool:
        """Whether dropping rows costs more than it saves: what has been captured belongs to all of them."""
        return False

    def _widened(self, width: int) -> int:
        """The block's width with padding: sessions that replay forward passes use few widths."""
        return width

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` tokens per row, with a quarter to spare if the cache has to grow."""
        if capacity > self.index.capacity:
            self._grow(max(capacity, self.index.capacity * 5 // 4))

    def _grow(self, capacity: int) -> None:
        """Enlarge the cache; subclasses move what they hold."""
        self.index.grow(capacity)

    @abstractmethod
    def _forward(
        self, tokens: Tensor, rows: list[int], placement: Placement, parents: Tensor | None, last: int
    ) -> Reading: ...

    @abstractmethod
    def _move(self, contexts: list[int], nodes: list[list[int]]) -> None:
        """Move node nodes[row][i] of each row to slot contexts[row] + i."""

    def select(self, rows: list[int]) -> None:
        """Keep these rows only, in this order."""
        self.index.select(rows)
        self.spoilt = self.spoilt[rows]

    def reset(self, row: int) -> None:
        """Empty one row for another text."""
        self.index.reset(row)

    def clear(self, row: int) -> None:
        """Wipe the slots after a row's tokens; subclasses wipe what they hold there."""
        self.spoilt = self.spoilt.index_fill(0, tensor_on(self.index.device, [row]), False)

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Memory of the keys and values."""


class BlockSession(Session):
    """The session of a draft that gives a block of tokens in one forward pass. Its cache holds the text, never a draft."""

    @abstractmethod
    def draft(self, tokens: Tensor, counts: list[int]) -> None:
        """Read what is missing of the texts, and compute a block after each of them.

        tokens, counts  as of `extend`; the newest token of every row, which begins its block, stays unread
        """

    @abstractmethod
    def position(self, depth: int, before: Tensor | None) -> Reading:
        """What predicts the token at a depth of the blocks, from 1: logits [B, 1, V], hidden [B, 1, D].

        before [B]  the token before it; None at depth 1: the text's newest
        """

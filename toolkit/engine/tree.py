"""Where nodes of a draft tree live in a flat cache, and which of them a new node may see.

A row's slots are filled from 0 without gaps. The first `context` of them are a chain; every later slot holds a **node**
of a tree whose root is the end of the context. Node i of a row lives in slot context + i; its parent is an earlier node or
-1, the end of the context. A chain is the case without nodes, and costs no masks beyond the causal one.

Shapes: b rows of a call, T tokens of a block, N tree nodes at the block's end, R most nodes of a row. S slots are visible.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.engine.device import tensor_on
from toolkit.errors import InputError


@dataclass(frozen=True)
class Placement:
    """Where a block of tokens goes.

    slots [b, T]      slot of each token in its row; padding goes to the scratch slot, which is masked
    positions [b, T]  distance from the start of the text: siblings share one
    mask [b, T, S]    True where a token may look
    visible           S: at least the slots any row of this call uses
    start             the first slot if all rows write the same consecutive slots, else None
    """

    slots: Tensor
    positions: Tensor
    mask: Tensor
    visible: int
    start: int | None


class TreeIndex:
    """Bookkeeping of one cache: slots, positions and ancestors; no keys and values, no model."""

    def __init__(self, num_rows: int, capacity: int, device: torch.device):
        self.num_rows, self.capacity, self.device = num_rows, capacity, device
        self.lengths = [0] * num_rows
        self.context_lengths = [0] * num_rows
        self.ancestors: Tensor | None = None  # [num_rows, R, R] bool: node i descends from node j, or is it
        self.granule = 1  # visible slots are rounded up to a multiple of it
        self._columns = torch.arange(capacity + 1, device=device)

    def grow(self, capacity: int) -> None:
        """Make room for more tokens per row."""
        self.capacity = capacity
        self._columns = torch.arange(capacity + 1, device=self.device)

    def num_nodes(self, row: int) -> int:
        """Tree nodes the row holds after its context."""
        return self.lengths[row] - self.context_lengths[row]

    def place(self, rows: list[int], width: int, counts: list[int] | None, parents: Tensor | None) -> Placement:
        """Slots, positions and masks of a block [b, T = width]; the tokens are then part of the cache.

        counts[b]      tokens of the block that extend the context, right-aligned before the nodes; None: all of them
        parents [b, N] node ids of the last N tokens' parents, -1 for the end of the (extended) context
        """
        num_tree = 0 if parents is None else parents.shape[1]
        chain = width - num_tree
        counts = [chain] * len(rows) if counts is None else counts
        self._check(rows, counts, chain, num_tree)
        starts = [self.lengths[row] for row in rows]
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count + num_tree
            self.context_lengths[row] += count
        uniform = all(count == chain for count in counts) and len(set(starts)) == 1
        slots = self._slots(starts, counts, chain, width)
        visible = max(max(self.lengths[row] for row in rows), 1)
        visible = min(-(-visible // self.granule) * self.granule, self.capacity)
        columns = self._columns[:visible]
        if parents is None:
            mask = columns <= slots.unsqueeze(-1)
            return Placement(slots, slots, mask, visible, starts[0] if uniform else None)
        context = tensor_on(self.device, [self.context_lengths[row] for row in rows]).view(-1, 1, 1)
        node_rows = self._grow(rows, parents)  # [b, N, R]
        relative = (columns - context).expand(-1, num_tree, -1)
        of_tree = node_rows.gather(2, relative.clamp(0, node_rows.shape[2] - 1)) & (relative >= 0)
        tree_mask = of_tree & (relative < node_rows.shape[2]) | (columns < context)
        mask = torch.cat([columns <= slots[:, :chain].unsqueeze(-1), tree_mask], dim=1)
        tree_positions = context[:, :, 0] + node_rows.sum(-1) - 1
        positions = torch.cat([slots[:, :chain], tree_positions], dim=1)
        return Placement(slots, positions, mask, visible, starts[0] if uniform else None)

    def slot_positions(self, rows: list[int], visible: int) -> Tensor:
        """Text position of what each slot holds: [b, visible] (sliding windows compare positions, not slots)."""
        positions = self._columns[:visible].expand(len(rows), -1)
        if self.ancestors is None:
            return positions
        context = tensor_on(self.device, [self.context_lengths[row] for row in rows]).view(-1, 1)
        chosen = self.ancestors if len(rows) == self.num_rows else self.ancestors[tensor_on(self.device, rows)]
        depth = chosen.sum(-1)  # [b, R]
        relative = positions - context
        of_node = context + depth.gather(1, relative.clamp(0, depth.shape[1] - 1)) - 1
        return torch.where(relative >= 0, of_node, positions)

    def truncate(self, lengths: list[int]) -> None:
        """Keep the first slots of each row; rows must hold a chain (no tree nodes remain)."""
        for row, length in enumerate(lengths):
            if length < self.lengths[row]:
                self.lengths[row] = length
            self.context_lengths[row] = self.lengths[row]
        self.ancestors = None

    def keep(self, nodes: Tensor) -> tuple[list[list[int]], Tensor]:
        """Drop every node that is neither one of `nodes` [num_rows, W] (-1: the end of the context) nor its ancestor.

        What all of them share becomes context. Returns, per row, the kept node ids in their new order, and the new ids
        [num_rows, W] of `nodes`. The caller moves keys and values accordingly, before the next `place`.
        """
        if self.ancestors is None:
            if bool((nodes >= 0).any()):
                raise InputError(f"keep: the cache holds no tree nodes, got node ids {nodes.tolist()}")
            return [[] for _ in range(self.num_rows)], nodes
        index = torch.arange(self.num_rows, device=self.device).unsqueeze(1)
        paths = self.ancestors[index, nodes.clamp(min=0)] & (nodes >= 0).unsqueeze(-1)  # [B, W, R]
        on_path, shared = paths.any(1), paths.all(1)
        order = (~on_path).to(torch.uint8).argsort(dim=1, stable=True)  # kept ones first, order kept
        rank = on_path.cumsum(1) - 1
        num_shared = shared.sum(1, keepdim=True)
        new_nodes = torch.where(nodes >= 0, rank.gather(1, nodes.clamp(min=0)) - num_shared, nodes)
        num_kept, shared_list = on_path.sum(1).tolist(), num_shared.squeeze(1).tolist()
        moved = [row[:count] for row, count in zip(order.tolist(), num_kept, strict=True)]
        self._compact(order, num_kept, shared_list)
        return moved, new_nodes.clamp(min=-1)

    def select(self, rows: list[int]) -> None:
        """Keep these rows only, in this order."""
        self.num_rows = len(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self.context_lengths = [self.context_lengths[row] for row in rows]
        if self.ancestors is not None:
            self.ancestors = self.ancestors[rows]

    def reset(self, row: int) -> None:
        """Empty one row."""
        self.lengths[row] = self.context_lengths[row] = 0
        if self.ancestors is not None:
            self.ancestors[row] = False

    # -- inside ---------------------------------------------------------------------------------------------------

    def _check(self, rows: list[int], counts: list[int], chain: int, num_tree: int) -> None:
        for row, count in zip(rows, counts, strict=True):
            if not 0 <= count <= chain:
                raise InputError(f"row {row}: expected 0 to {chain} tokens for the context, got {count}")
            if count and self.num_nodes(row):
                raise InputError(f"row {row}: its context cannot grow while it holds {self.num_nodes(row)} tree nodes")
            if self.lengths[row] + count + num_tree > self.capacity:
                need = self.lengths[row] + count + num_tree
                raise InputError(f"row {row}: the cache holds {self.capacity} tokens, {need} were asked for")

    def _slots(self, starts: list[int], counts: list[int], chain: int, width: int) -> Tensor:
        """[b, T] slots; padding in front of the chain part goes to the scratch slot `capacity`."""
        if counts[0] == chain and len(set(counts)) == len(set(starts)) == 1:  # all alike: nothing to build
            return self._columns[starts[0] : starts[0] + width].expand(len(starts), -1)
        first = tensor_on(self.device, [s - (chain - c) for s, c in zip(starts, counts, strict=True)])
        slots = first.unsqueeze(1) + self._columns[:width]
        if all(count == chain for count in counts):
            return slots
        begin = tensor_on(self.device, starts).unsqueeze(1)
        return torch.where(slots < begin, self.capacity, slots)

    def _grow(self, rows: list[int], parents: Tensor) -> Tensor:
        """Record the ancestors of N new nodes per row; returns their rows [b, N, R]."""
        num_rows, num_new = parents.shape
        old = [self.num_nodes(row) - num_new for row in rows]
        size = max(max(self.num_nodes(row) for row in range(self.num_rows)), 1)
        self._reserve(size)
        assert self.ancestors is not None
        first = tensor_on(self.device, old).view(-1, 1)
        inside = parents - first  # index in this block where >= 0, else an older node or the context
        block = torch.zeros(num_rows, num_new, num_new + 1, dtype=torch.float32, device=self.device)
        block.scatter_(2, inside.clamp(min=-1).add(1).unsqueeze(-1), 1.0)
        closure = block[:, :, 1:] + torch.eye(num_new, dtype=torch.float32, device=self.device)
        for _ in range(max(num_new - 1, 1).bit_length()):  # paths of length 1, 2, 4, ...
            closure = (closure @ closure).clamp_(max=1.0)
        older = (parents >= 0) & (inside < 0)
        row_index = tensor_on(self.device, rows).unsqueeze(1)
        from_old = self.ancestors[row_index, parents.clamp(min=0)] & older.unsqueeze(-1)  # [b, N, R]
        new_rows = (closure @ from_old.float()) > 0
        ids = first + self._columns[:num_new]
        new_rows.scatter_(2, ids.unsqueeze(1).expand(-1, num_new, -1), closure > 0)
        self.ancestors[row_index, ids] = new_rows
        return new_rows

    def _reserve(self, size: int) -> None:
        have = 0 if self.ancestors is None else self.ancestors.shape[1]
        if size <= have:
            return
        grown = torch.zeros(self.num_rows, 2 * size, 2 * size, dtype=torch.bool, device=self.device)
        if self.ancestors is not None:
            grown[:, :have, :have] = self.ancestors
        self.ancestors = grown

    def _compact(self, order: Tensor, num_kept: list[int], num_shared: list[int]) -> None:
        assert self.ancestors is not None
        for row in range(self.num_rows):
            self.lengths[row] = self.context_lengths[row] + num_kept[row]
            self.context_lengths[row] += num_shared[row]
        if num_kept == num_shared:  # one path per row: a chain again
            self.ancestors = None
            return
        packed = torch.zeros_like(self.ancestors)
        for row, (end, shared) in enumerate(zip(num_kept, num_shared, strict=True)):
            ids = order[row, shared:end]
            packed[row, : end - shared, : end - shared] = self.ancestors[row][ids][:, ids]
        self.ancestors = packed

"""The session of a block draft (DFlash, DSpark), whose cache holds keys and values of the target's states of the text.

A block's own keys are computed in the forward pass that drafts it, and never kept. So nothing has to be forgotten after a
round. The next one reads the states of the tokens that came, all but the newest one, which the target has not read either.

Shapes: B rows, U unread tokens, K tokens of a block, D hidden size, V vocabulary.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from toolkit.drafts.target_states import session_with_states
from toolkit.engine.base import BlockSession, Reading, Session
from toolkit.engine.capture import Captures
from toolkit.engine.device import tensor_on
from toolkit.engine.hf import HFSession, _Block
from toolkit.engine.tree import Placement


class BlockReader(HFSession, BlockSession):
    """A block draft beside the session of its target, whose cache keeps the states that the draft reads."""

    reads_states = True

    def __init__(self, model: Any, num_rows: int, capacity: int, captures: Captures | None, target: Session | None):
        super().__init__(model, num_rows, capacity)  # its shapes hardly recur: nothing is captured
        self.target = session_with_states(model, target)
        self._newest: Tensor | None = None  # [B], and of the blocks after them: states [B, K, D], logits [B, K, V']
        self._states: Tensor | None = None
        self._base: Tensor | None = None

    @torch.inference_mode()
    def _forward(
        self, tokens: Tensor, rows: list[int], placement: Placement, parents: Tensor | None, last: int
    ) -> Reading:
        """Keep keys and values of tokens [b, T] that the target has read; the reading holds no logits."""
        slots, whole = placement.slots, len(rows) == self.index.num_rows
        assert self.target.states is not None, "the target reads a text before its draft does"
        device = self.target.states.device
        states = self.target.states[tensor_on(device, rows).unsqueeze(1), slots.to(device), 0]
        states = states.to(self.index.device, self.dtype)
        states = torch.where((slots < self.index.capacity).unsqueeze(-1), states, 0)  # padding is nobody's state
        offsets = self._offsets if whole else self._offsets[rows]
        block = _Block(placement.visible, (slots + offsets).view(-1), None, None if whole else rows)
        with self._lock, self.linears or nullcontext():
            self.block = block
            context = self.model.context(states, placement.positions)
            for layer, (keys, values) in zip(self.layers, context, strict=True):
                layer.update(keys, values)
        read = context[-1][0].transpose(1, 2).flatten(2)
        return Reading(states[..., :0], read)

    @torch.inference_mode()
    def draft(self, tokens: Tensor, counts: list[int]) -> None:
        if tokens.shape[1] > 1:
            self.extend(tokens[:, :-1], counts=[count - 1 for count in counts])
        else:
            self.num_calls += 1
        visible, anchors = max(self.lengths), tensor_on(self.index.device, [[length] for length in self.lengths])
        with self._lock, self.linears or nullcontext():
            states = self.model(tokens[:, -1:], anchors, [self._kept(layer, visible) for layer in self.layers])[:, 0]
            self._base = self.model.lm_head(states)
        self._newest, self._states = tokens[:, -1], states

    def _kept(self, layer: Any, visible: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, S, head size] of the visible slots of a layer."""
        if layer.is_initialized:
            return layer.keys[:, :visible].transpose(1, 2), layer.values[:, :visible].transpose(1, 2)
        config = self.config
        shape = (self.index.num_rows, config.num_key_value_heads, 0, config.head_dim)
        nothing = torch.zeros(shape, dtype=self.dtype, device=self.index.device)
        return nothing, nothing

    @torch.inference_mode()
    def position(self, depth: int, before: Tensor | None) -> Reading:
        assert self._states is not None and self._base is not None, "a round begins with `draft`"
        states, base = self._states[:, depth - 1 : depth], self._base[:, depth - 1 : depth]
        before = self._newest if before is None else before.to(self.index.device)
        with self._lock:
            logits, hidden = self.model.outputs(states, base, before.unsqueeze(1))  # type: ignore[union-attr]
            return Reading(self.model.lm_head.whole(logits), hidden)

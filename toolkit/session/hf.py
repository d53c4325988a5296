"""Sessions for stock Hugging Face causal language models.

The model's own forward runs unchanged. It is handed a `Cache` whose layers write keys and values where the TreeIndex
says, a ready 4-D additive mask, and positions. The final hidden state is picked up where the model feeds it to its
output embedding, so that logit scaling and soft-capping stay the model's business.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from toolkit.errors import InputError
from toolkit.session.base import Reading, Session
from toolkit.session.tree import Placement


class TreeLayer(CacheLayerMixin):
    """Keys and values of one layer: [B, capacity + 1, heads, head size], the last slot being scratch for padding."""

    keys: Tensor  # type: ignore[assignment]
    values: Tensor  # type: ignore[assignment]
    is_sliding = False  # windows are in the masks: layers are full length, so that any node can be dropped

    def __init__(self, session: HFSession):
        super().__init__()
        self.session = session

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        num_rows, slots = self.session.index.num_rows, self.session.index.capacity + 1
        self.keys = key_states.new_zeros(num_rows, slots, key_states.shape[1], key_states.shape[3])
        self.values = value_states.new_zeros(num_rows, slots, value_states.shape[1], value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [b, heads, T, head size] at the block's slots; return all visible slots [b, heads, S, head size]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        block = self.session.block
        return block.write(self.keys, key_states), block.write(self.values, value_states)

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.session.block.visible, 0

    def get_max_length(self) -> int:
        return self.session.index.capacity


class _Block:
    """Where the tokens of the forward under way go, the same for every layer."""

    def __init__(self, placement: Placement, rows: list[int], num_rows: int, num_slots: int):
        self.visible, self.start = placement.visible, placement.start
        self.width = placement.slots.shape[1]
        self.rows = None if rows == list(range(num_rows)) else rows
        self.flat: Tensor | None = None
        if self.start is None or self.rows is not None:
            offsets = torch.tensor(rows, device=placement.slots.device).unsqueeze(1) * num_slots
            self.flat = (placement.slots + offsets).reshape(-1)

    def write(self, buffer: Tensor, states: Tensor) -> Tensor:
        states = states.transpose(1, 2)  # [b, T, heads, head size]
        if self.flat is None:
            buffer[:, self.start : self.start + self.width] = states  # type: ignore[operator]
        else:
            buffer.view(-1, *buffer.shape[2:]).index_copy_(0, self.flat, states.reshape(-1, *states.shape[2:]))
        visible = buffer[:, : self.visible] if self.rows is None else buffer[self.rows, : self.visible]
        return visible.transpose(1, 2)


class HFSession(Session):
    """A Hugging Face causal language model with a tree-structured cache."""

    def __init__(self, model: Any, num_rows: int, capacity: int):
        super().__init__(num_rows, capacity, model.device)
        self.model, self.config = model, model.config.get_text_config()
        self.layers = [TreeLayer(self) for _ in range(self.config.num_hidden_layers)]
        self.cache = Cache(layers=list(self.layers))
        self.block: Any = None
        self.dtype = model.dtype
        self.max_position = max_positions(model)
        self.windows = attention_windows(model)
        self._lowest = torch.full((), torch.finfo(self.dtype).min, dtype=self.dtype, device=model.device)
        self._zero = torch.zeros((), dtype=self.dtype, device=model.device)
        self.num_embeddings = int(model.get_input_embeddings().weight.shape[0])
        self._keeps_last = "logits_to_keep" in _parameters(model.__class__)
        head = model.get_output_embeddings()
        if head is None:
            raise InputError(f"expected a causal language model with an output embedding, got {type(model).__name__}")
        self._hidden: Tensor | None = None
        self._head = head

    @torch.inference_mode()
    def _forward(
        self, tokens: Tensor, rows: list[int], placement: Placement, parents: Tensor | None, last: int
    ) -> Reading:
        self.block = _Block(placement, rows, self.index.num_rows, self.index.capacity + 1)
        hook = self._head.register_forward_pre_hook(self._catch)
        try:
            output = self.model(
                # A token beyond this model's vocabulary lies in the other model's padding, outside of the tokenizer.
                input_ids=tokens.clamp(max=self.num_embeddings - 1) if self.clips_tokens else tokens,
                # Rows that have stopped still fill their place in the batch; nothing they produce is used.
                position_ids=placement.positions.clamp(max=self.max_position - 1),
                attention_mask=self._masks(placement, rows),
                past_key_values=self.cache,
                use_cache=True,
                **({"logits_to_keep": last} if self._keeps_last else {}),
            )
        finally:
            hook.remove()
        assert self._hidden is not None
        return Reading(output.logits[:, -last:], self._hidden[:, -last:])

    def _catch(self, module: Any, args: tuple[Tensor, ...]) -> None:
        self._hidden = args[0]

    def _masks(self, placement: Placement, rows: list[int]) -> Tensor | dict[str, Tensor]:
        masks = {}
        for name, window in self.windows.items():
            seen = placement.mask
            if window is not None:
                distance = (
                    placement.positions.unsqueeze(-1) - self.index.slot_positions(rows, placement.visible)[:, None]
                )
                seen = seen & (distance < window)
            masks[name] = torch.where(seen, self._zero, self._lowest).unsqueeze(1)
        return masks.get("", masks)

    @torch.inference_mode()
    def _move(self, trunks: list[int], kept: list[list[int]]) -> None:
        source, target = [], []
        slots = self.index.capacity + 1
        for row, (trunk, nodes) in enumerate(zip(trunks, kept, strict=True)):
            base = row * slots + trunk
            for new, old in enumerate(nodes):
                if new != old:
                    source.append(base + old)
                    target.append(base + new)
        if not source:
            return
        where_from = torch.tensor(source, device=self.index.device)
        where_to = torch.tensor(target, device=self.index.device)
        for layer in self.layers:
            for buffer in (layer.keys, layer.values):
                flat = buffer.view(-1, *buffer.shape[2:])
                flat.index_copy_(0, where_to, flat.index_select(0, where_from))

    @torch.inference_mode()
    def select(self, rows: list[int]) -> None:
        super().select(rows)
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]

    @torch.inference_mode()
    def reset(self, row: int) -> None:
        super().reset(row)
        for layer in self.layers:
            if layer.is_initialized:  # a text that ended in not-a-number must not leak through masked slots
                layer.keys[row].zero_()
                layer.values[row].zero_()

    @property
    def cache_bytes(self) -> int:
        buffers = [b for layer in self.layers if layer.is_initialized for b in (layer.keys, layer.values)]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)


def max_positions(model: Any) -> int:
    """The longest text the model can read."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31)


def attention_windows(model: Any) -> dict[str, int | None]:
    """The attention masks a model wants: layer type -> window (None: unlimited); the key "" means one mask for all."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if _takes_mask_per_layer_type(model.base_model.__class__):
        types = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]))
        unknown = [t for t in types if t not in ("full_attention", "sliding_attention")]
        if unknown:
            raise InputError(
                f"{type(model).__name__} has layers of type {unknown[0]}: only attention can be tree-cached"
            )
        return {name: window if name == "sliding_attention" else None for name in types}
    return {"": window}


@cache
def _takes_mask_per_layer_type(base: type) -> bool:
    return "attention_mask, dict)" in inspect.getsource(inspect.unwrap(base.forward))  # type: ignore[attr-defined]


@cache
def _parameters(model: type) -> frozenset[str]:
    return frozenset(inspect.signature(inspect.unwrap(model.forward)).parameters)  # type: ignore[attr-defined]

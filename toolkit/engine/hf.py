"""Sessions for stock Hugging Face causal language models.

The model's own forward runs unchanged. It is handed a `Cache` whose layers write keys and values where the TreeIndex
says, a ready 4-D additive mask, and positions. Hidden states are read by `toolkit.engine.hidden_states`. Logit scaling and
soft-capping are left to the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import proxy

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from toolkit.engine.attention import grouped_attention
from toolkit.engine.base import Reading, Session
from toolkit.engine.capture import Captures
from toolkit.engine.device import tensor_on
from toolkit.engine.facts import forwards_lock, max_positions
from toolkit.engine.hidden_states import watched_states
from toolkit.engine.tree import Placement
from toolkit.errors import InputError

# Blocks and visible slots are rounded up to these where forwards are captured, so that few shapes recur.
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
GRANULE = 64


@dataclass(frozen=True)
class Reach:
    """How far back a layer looks. window: this many positions, its own included; chunk: to its own chunk's start."""

    window: int | None = None
    chunk: int | None = None


class TreeLayer(CacheLayerMixin):
    """Keys and values of one layer: [B, capacity + 1, heads, head size], the last slot being scratch for padding."""

    keys: Tensor  # type: ignore[assignment]
    values: Tensor  # type: ignore[assignment]
    is_sliding = False  # windows are in the masks: layers are full length, so that any node can be dropped

    def __init__(self, session: HFSession):
        super().__init__()
        self.session: HFSession = proxy(session)  # no cycle: a session that is dropped frees its buffers at once

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
    """Where the tokens of the forward under way go, the same for every layer.

    flat   slots [b * T] in the buffers' rows laid end to end; None: all rows write from slot `start` on
    rows   the rows that are read; None: all
    """

    def __init__(self, visible: int, flat: Tensor | None, start: int | None = None, rows: list[int] | None = None):
        self.visible, self.flat, self.start, self.rows = visible, flat, start, rows

    def write(self, buffer: Tensor, states: Tensor) -> Tensor:
        states = states.transpose(1, 2)  # [b, T, heads, head size]
        if self.flat is None:
            buffer[:, self.start : self.start + states.shape[1]] = states  # type: ignore[operator]
        else:
            flat = self.flat if self.flat.device == buffer.device else self.flat.to(buffer.device)  # layers spread out
            buffer.view(-1, *buffer.shape[2:]).index_copy_(0, flat, states.reshape(-1, *states.shape[2:]))
        visible = buffer[:, : self.visible] if self.rows is None else buffer[self.rows, : self.visible]
        return visible.transpose(1, 2)


class HFSession(Session):
    """A Hugging Face causal language model with a tree-structured cache.

    kept_layers  layers, as in transformers' `hidden_states`, whose states stay in the cache beside the keys and values
    states       these states [B, capacity + 1, 1, n D], by slot; None before the first forward pass
    """

    def __init__(
        self,
        model: Any,
        num_rows: int,
        capacity: int,
        captures: Captures | None = None,
        kept_layers: Sequence[int] = (),
    ):
        super().__init__(num_rows, capacity, model.device)
        self.kept_layers = tuple(kept_layers)
        self.states: Tensor | None = None
        self.model, self.config = model, model.config.get_text_config()
        self.layers = [TreeLayer(self) for _ in range(_num_layers(model, self.config))]
        self.cache = Cache(layers=list(self.layers))
        self.block: Any = None
        self.dtype = model.dtype
        self.max_position = max_positions(model)
        self.one_mask = not takes_mask_per_layer_type(model)
        self.reaches = attention_reaches(model)
        self._lowest = torch.full((), torch.finfo(self.dtype).min, dtype=self.dtype, device=model.device)
        self._zero = torch.zeros((), dtype=self.dtype, device=model.device)
        self._offsets = torch.arange(num_rows, device=model.device).unsqueeze(1) * (capacity + 1)
        self.num_embeddings = int(model.get_input_embeddings().weight.shape[0])
        self._keeps_last = "logits_to_keep" in _parameters(model.__class__)
        if model.get_output_embeddings() is None:
            raise InputError(f"expected a causal language model with an output embedding, got {type(model).__name__}")
        self._lock = forwards_lock(model)
        self.captures = captures
        if captures is not None:
            self.index.granule = GRANULE

    @property
    def filled(self) -> list[TreeLayer]:
        """The layers that hold keys: all of them after the first forward, except those that read another layer's."""
        return [layer for layer in self.layers if layer.is_initialized]

    @property
    def fixed_rows(self) -> bool:
        return self.captures is not None

    def _widened(self, width: int) -> int:
        if self.captures is None or self.captures.refused or width > WIDTHS[-1]:
            return width
        wider = next(w for w in WIDTHS if w >= width)
        return wider if wider <= self.index.capacity else width

    @torch.inference_mode()
    def _forward(
        self, tokens: Tensor, rows: list[int], placement: Placement, parents: Tensor | None, last: int
    ) -> Reading:
        inputs = (
            # A token beyond this model's vocabulary lies in the other model's padding, outside of the tokenizer.
            tokens.clamp(max=self.num_embeddings - 1) if self.clips_tokens else tokens,
            # Rows that have stopped still fill their batch slot; nothing they produce is used.
            placement.positions.clamp(max=self.max_position - 1),
            *self._masks(placement, rows),
            *self._more_inputs(placement, rows, parents),
        )
        whole = len(rows) == self.index.num_rows
        if self.captures is None or not whole or not self.layers[0].is_initialized or tokens.shape[1] > WIDTHS[-1]:
            offsets = self._offsets if whole else self._offsets[rows]
            flat = None if whole and placement.start is not None else (placement.slots + offsets).view(-1)
            block = _Block(placement.visible, flat, placement.start, None if whole else rows)
            with self._lock:
                logits, hidden = self.compute(inputs, block, last)
        else:
            flat = (placement.slots + self._offsets).view(-1)
            with self._lock:
                logits, hidden = self.replay((*inputs, flat), placement.visible, last)
        return Reading(logits[:, -last:], hidden[:, -last:])

    def _more_inputs(self, placement: Placement, rows: list[int], parents: Tensor | None) -> tuple[Tensor, ...]:
        """Further tensors that a forward pass depends on, which `_arguments` turns into arguments of the model."""
        return ()

    def _arguments(self, more: Sequence[Tensor]) -> dict[str, Any]:
        """Further arguments of the model's forward pass."""
        return {"output_hidden_states": True} if self.kept_layers else {}

    def compute(self, inputs: Sequence[Tensor], block: _Block, last: int) -> tuple[Tensor, Tensor]:
        """One forward of the model. inputs: tokens, positions, masks in the order of `reaches`, `_more_inputs`."""
        tokens, positions, *rest = inputs
        masks, more = rest[: len(self.reaches)], rest[len(self.reaches) :]
        self.block = block
        with watched_states(self.model) as states, grouped_attention(), self.linears or nullcontext():
            output = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=masks[0] if self.one_mask else dict(zip(self.reaches, masks, strict=True)),
                past_key_values=self.cache,
                use_cache=True,
                **({"logits_to_keep": last} if self._keeps_last else {}),
                **self._arguments(more),
            )
        if self.kept_layers:
            kept = torch.cat([output.hidden_states[layer].to(self.index.device) for layer in self.kept_layers], -1)
            kept = kept.unsqueeze(1)
            if self.states is None:
                self.states = kept.new_zeros(self.index.num_rows, self.index.capacity + 1, 1, kept.shape[-1])
            block.write(self.states, kept)
        return output.logits, states[-1]

    def replay(self, inputs: Sequence[Tensor], visible: int, last: int) -> tuple[Tensor, Tensor]:
        """One forward of the model through captures: the shape decides, and the slots are an input (the last one)."""
        assert self.captures is not None

        session: HFSession = proxy(self)  # which holds the captures, and they hold this function

        def forward(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            return session.compute(tensors[:-1], _Block(visible, tensors[-1]), last)

        last = min(next(width for width in WIDTHS if width >= last), inputs[0].shape[1])
        return self.captures.run((*inputs[0].shape, visible, last, len(inputs)), forward, inputs)

    def _visible(self, placement: Placement) -> Tensor:
        """What each token may look at, were there no windows: [b, T, S] bool."""
        return placement.mask

    def _masks(self, placement: Placement, rows: list[int]) -> list[Tensor]:
        """Additive masks [b, 1, T, S], one per entry of `reaches`."""
        masks = []
        visible = self._visible(placement)
        for reach in self.reaches.values():
            seen = visible
            if reach != Reach():
                own = placement.positions.unsqueeze(-1)
                others = self.index.slot_positions(rows, placement.visible)[:, None]
                if reach.window is not None:
                    seen = seen & (own - others < reach.window)
                if reach.chunk is not None:
                    seen = seen & (own // reach.chunk == others // reach.chunk)
            masks.append(torch.where(seen, self._zero, self._lowest).unsqueeze(1))
        return masks

    @torch.inference_mode()
    def _move(self, contexts: list[int], nodes: list[list[int]]) -> None:
        source, target = [], []
        slots = self.index.capacity + 1
        for row, (context, old_nodes) in enumerate(zip(contexts, nodes, strict=True)):
            base = row * slots + context
            for new, old in enumerate(old_nodes):
                if new != old:
                    source.append(base + old)
                    target.append(base + new)
        if not source:
            return
        where_from = tensor_on(self.index.device, source)
        where_to = tensor_on(self.index.device, target)
        for buffer in self.buffers:
            flat = buffer.view(-1, *buffer.shape[2:])
            moved = flat.index_select(0, where_from.to(flat.device))
            flat.index_copy_(0, where_to.to(flat.device), moved)

    @torch.inference_mode()
    def _grow(self, capacity: int) -> None:
        more = capacity - self.index.capacity
        super()._grow(capacity)
        self._offsets = torch.arange(self.index.num_rows, device=self.index.device).unsqueeze(1) * (capacity + 1)
        self._replace(lambda buffer: torch.cat([buffer, buffer.new_zeros(len(buffer), more, *buffer.shape[2:])], 1))

    @torch.inference_mode()
    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self._offsets = self._offsets[: len(rows)]  # rows are numbered again
        self._replace(lambda buffer: buffer[rows])

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        """Put other buffers in place of all; captures are dropped, for they write where the old ones were."""
        for layer in self.filled:
            layer.keys, layer.values = change(layer.keys), change(layer.values)
        self.states = None if self.states is None else change(self.states)
        if self.captures is not None:
            self.captures = self.captures.empty()

    @torch.inference_mode()
    def reset(self, row: int) -> None:
        super().reset(row)
        for buffer in self.buffers:  # a text that ended in not-a-number must not leak through masked slots
            buffer[row].zero_()

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        super().clear(row)
        for buffer in self.buffers:
            buffer[row, self.lengths[row] :].zero_()

    @property
    def buffers(self) -> list[Tensor]:
        """All that is cached by slot."""
        states = [] if self.states is None else [self.states]
        return [*(buffer for layer in self.filled for buffer in (layer.keys, layer.values)), *states]

    @property
    def cache_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)


def attention_reaches(model: Any) -> dict[str, Reach]:
    """The attention masks a model wants: layer type -> how far it looks. Models of one mask have one entry."""
    config = model.config.get_text_config()
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    reaches = {
        "full_attention": Reach(),
        "sliding_attention": Reach(window=window),
        "chunked_attention": Reach(chunk=chunk),
    }
    if takes_mask_per_layer_type(model):
        types = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]))
        unknown = [t for t in types if t not in reaches]
        if unknown:
            raise InputError(
                f"{type(model).__name__} has layers of type {unknown[0]}: only attention can be tree-cached"
            )
        return {name: reaches[name] for name in types}
    return {"full_attention" if window is None else "sliding_attention": Reach(window)}


def takes_mask_per_layer_type(model: Any) -> bool:
    """Whether a model, or the decoder that it wraps, takes a dictionary of masks."""
    parts: tuple[Any, ...] = (model, model.base_model, getattr(model, "model", model), model.get_decoder())
    return any(map(_reads_dictionary, {part.__class__ for part in parts}))


@cache
def _reads_dictionary(base: type) -> bool:
    return "attention_mask, dict)" in inspect.getsource(inspect.unwrap(base.forward))  # type: ignore[attr-defined]


def _num_layers(model: Any, config: Any) -> int:
    """How many layers may write into a cache: some families run all that they have, whatever a config was lowered to."""
    indices = [getattr(module, "layer_idx", -1) for module in model.modules()]
    return max([config.num_hidden_layers, *[index + 1 for index in indices if isinstance(index, int)]])


@cache
def _parameters(model: type) -> frozenset[str]:
    return frozenset(inspect.signature(inspect.unwrap(model.forward)).parameters)  # type: ignore[attr-defined]

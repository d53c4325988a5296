"""What heads read of a model's forward pass: its final hidden state, with those of chosen earlier layers after it.

All states are taken here: those of sessions, of teacher-forced forward passes, and of transformers' own loop. The final state
is taken where the model feeds it to its output embedding. Earlier layers are numbered as in transformers' `hidden_states`: 0 is
the embedding, i the i-th layer's output, before the last norm. The layers that a model gives are set once, when it is loaded.

Shapes: b rows, T tokens, D width of a state, n earlier layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from toolkit.engine.facts import output_shape
from toolkit.errors import InputError

GIVEN = "layers_given"  # attribute of a model


def give_layers(model: Any, layers: Sequence[int]) -> None:
    """Let a model's states hold these layers after the final one. Negative numbers count from the end: -1 is final.

    Raises InputError if the model has no such layers, or states of several widths.
    """
    if not layers:
        return
    config: Any = model.config.get_text_config() if hasattr(model, "config") else None
    count = getattr(config, "num_hidden_layers", 0)
    wrong = [layer for layer in layers if not -count <= layer <= count]
    if not count or wrong:
        raise InputError(f"draft_layers: expected layers from {-count} to {count} of this draft, got {list(layers)}")
    final, width = state_width(model), config.hidden_size
    if final != width:
        raise InputError(
            f"draft_layers: this draft's final state has {final} numbers and its layers {width}: expected []"
        )
    setattr(model, GIVEN, counted(layers, count))


def counted(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """Earlier layers of a model of `count` layers: each once, counted from the embedding, 0.

    The final layer is left out, because its state is always read.
    """
    return tuple(sorted({layer % (count + 1) for layer in layers} - {count}))


def layers_of(model: Any) -> tuple[int, ...]:
    """The earlier layers that a model's states hold, counted from its embedding, 0."""
    layers: tuple[int, ...] = getattr(model, GIVEN, ())
    return layers


def check_layers(expected: Sequence[int], layers: Sequence[int], who: str, where: str) -> None:
    """Raises InputError unless the earlier layers that `who` wants are those that `where` gives."""
    if tuple(expected) != tuple(layers):
        raise InputError(
            f"{who} layers {list(expected)} beside the final state, {where} {list(layers)}: "
            f"set +pair.draft_layers={list(expected)}"
        )


def state_width(model: Any) -> int:
    """Width D of the final state."""
    return output_shape(model)[1]


def state_size(model: Any) -> int:
    """Width (1 + n) D of what heads read."""
    return state_width(model) * (1 + len(layers_of(model)))


@contextmanager
def watched_states(model: Any) -> Iterator[list[Tensor]]:
    """States [b, T, (1 + n) D] of every forward pass inside the context; T counts the tokens that have logits."""
    states: list[Tensor] = []
    hooks = [model.get_output_embeddings().register_forward_pre_hook(lambda module, args: states.append(args[0]))]
    layers = layers_of(model)

    def ask(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "output_hidden_states": True}

    def append(module: Any, args: Any, output: Any) -> None:
        last = states[-1].shape[1]
        states[-1] = torch.cat([states[-1], *(output.hidden_states[layer][:, -last:] for layer in layers)], -1)

    if layers:
        hooks += [model.register_forward_pre_hook(ask, with_kwargs=True), model.register_forward_hook(append)]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()

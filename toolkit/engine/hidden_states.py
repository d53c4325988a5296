"""What heads read of a model's forward pass: its final hidden state, where the model feeds it to its output embedding.

All states are taken here: those of sessions, of teacher-forced forward passes, and of transformers' own loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from toolkit.engine.facts import output_shape


def state_width(model: Any) -> int:
    """Width D of the final state, or of what a draft says that heads read in its place."""
    return getattr(model, "state_width", None) or output_shape(model)[1]


@contextmanager
def watched_states(model: Any) -> Iterator[list[Tensor]]:
    """States [b, T, D] of every forward pass inside the context; T counts the tokens that have logits."""
    states: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: states.append(args[0]))
    try:
        yield states
    finally:
        hook.remove()

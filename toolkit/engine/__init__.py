"""One causal language model with one tree-structured cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.engine.base import BlockSession, Reading, Session
from toolkit.engine.capture import Captures
from toolkit.engine.facts import block_length, reads_states
from toolkit.engine.tabular import TabularModel

__all__ = ["BlockSession", "Reading", "Session", "TabularModel", "open_session"]


def open_session(
    model: Any,
    num_rows: int,
    capacity: int,
    captures: Captures | None = None,
    *,
    kept_layers: Sequence[int] = (),
    target: Session | None = None,
) -> Session:
    """The session of a model: its own, if it brings one (`open_session`), else the one for Hugging Face models.

    captures     forward passes of recurring shapes are replayed through them (Hugging Face models only); None: never
    kept_layers  layers whose states stay in the cache, for drafts that read them
    target       of a draft that reads the target's states (it has `target_layers`): the target's session
    """
    own = getattr(model, "open_session", None)
    if own is not None:
        session: Session = own(num_rows, capacity)
        return session
    from toolkit.engine.hf import HFSession  # transformers is imported only where it is needed

    if block_length(model) is not None:
        from toolkit.engine.block_reader import BlockReader

        return BlockReader(model, num_rows, capacity, target)
    if reads_states(model):
        from toolkit.engine.state_reader import StateReader

        return StateReader(model, num_rows, capacity, captures, target)
    return HFSession(model, num_rows, capacity, captures, kept_layers)

"""One causal language model with one tree-structured cache."""

from __future__ import annotations

from typing import Any

from toolkit.engine.base import Reading, Session
from toolkit.engine.capture import Captures
from toolkit.engine.tabular import TabularModel

__all__ = ["Reading", "Session", "TabularModel", "open_session"]


def open_session(model: Any, num_rows: int, capacity: int, captures: Captures | None = None) -> Session:
    """The session of a model: its own, if it brings one (`open_session`), else the one for Hugging Face models.

    captures  forward passes of recurring shapes are replayed through them (Hugging Face models only); None: never
    """
    own = getattr(model, "open_session", None)
    if own is not None:
        session: Session = own(num_rows, capacity)
        return session
    from toolkit.engine.hf import HFSession  # transformers is imported only where it is needed

    return HFSession(model, num_rows, capacity, captures)

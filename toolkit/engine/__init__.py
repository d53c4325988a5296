"""One causal language model with one tree-structured cache."""

from __future__ import annotations

from toolkit.engine.base import BlockSession, Reading, Session
from toolkit.engine.engine import open_session
from toolkit.engine.tabular import TabularModel

__all__ = ["BlockSession", "Reading", "Session", "TabularModel", "open_session"]

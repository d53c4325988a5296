"""One causal language model with one tree-structured cache."""

from toolkit.session.base import Reading, Session
from toolkit.session.opening import open_session
from toolkit.session.tabular import TabularModel

__all__ = ["Reading", "Session", "TabularModel", "open_session"]

"""Recordings: made (`record`), kept (`store`), scored by heads (`score`) and replayed with any stopping policy (`replay`)."""

from toolkit.trace.trace import CutError, Trace, join

__all__ = ["CutError", "Trace", "join"]

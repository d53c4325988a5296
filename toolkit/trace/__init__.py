"""Recordings that any stopping policy can be replayed on: one in memory (`trace`), folders of them, a step of one."""

from toolkit.trace.trace import Trace, join

__all__ = ["Trace", "join"]

"""Recordings that any stopping policy can be replayed on: one in memory (`trace`), folders of them, a step of one."""

from toolkit.trace.trace import Trace, join, recorded_name

__all__ = ["Trace", "join", "recorded_name"]

"""Searches over settings: Optuna proposes (ask), Hydra runs the jobs, their scores go back (tell)."""

from toolkit.search.study import Search, Settings

__all__ = ["Search", "Settings"]

"""Searches over settings: Optuna proposes (ask), Hydra runs the jobs, their scores go back (tell)."""

"""python -m analysis.acceptance prompts=toy_math: how much acceptance each multi-draft rule leaves on the table.

With target_probs=[...] draft_probs=[[...],...] no model is used: the rules are enumerated. Each is a file of
`analysis.multi_draft`: along_texts, exact.
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("acceptance")

from pathlib import Path

from analysis import keys
from analysis.multi_draft.along_texts import measure_acceptance
from analysis.multi_draft.exact import enumerate_rules
from toolkit.verification.optimal import optimal_acceptance, optimal_acceptances

__all__ = ["optimal_acceptance", "optimal_acceptances", "run"]


def run(cfg: keys.Acceptance) -> Path:
    """Do what the keys ask for; returns the output folder."""
    if cfg.target_probs is not None or cfg.draft_probs is not None:
        return enumerate_rules(cfg)
    return measure_acceptance(cfg)

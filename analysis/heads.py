"""python -m analysis.heads traces=FOLDER heads=[A,B,C]: what every head predicts, and what decoding with it is worth.

drafts={NAME: FOLDER} responses={DOMAIN: FOLDER} compares drafts, copies=RESPONSES fits the acceptance of copied tokens,
statistics=[TRACES] that of drafted ones from statistics of q, candidates=[RESPONSES] that of a node's candidates,
calibration=[TRACES] corrects heads by depth. Each is a file of `analysis.replay`: head_table, drafts, copies, fit_statistics,
fit_candidates, calibrate, predictors (with tuning= and tests=).
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("heads")

from pathlib import Path

from analysis import keys
from analysis.replay.calibrate import calibrate_heads
from analysis.replay.copies import fit_copies
from analysis.replay.drafts import compare_drafts
from analysis.replay.fit_candidates import fit_candidates
from analysis.replay.fit_statistics import fit_statistics
from analysis.replay.head_table import compare_heads
from analysis.replay.predictors import compare_predictors


def run(cfg: keys.Heads) -> Path:
    """Do what the keys ask for; returns the output folder."""
    if cfg.drafts is not None or cfg.responses is not None:
        return compare_drafts(cfg)
    if cfg.copies is not None:
        return fit_copies(cfg)
    if cfg.candidates is not None:
        return fit_candidates(cfg)
    if cfg.tuning is not None or cfg.tests is not None:
        return compare_predictors(cfg)
    if cfg.statistics is not None:
        return fit_statistics(cfg)
    if cfg.calibration is not None:
        return calibrate_heads(cfg)
    return compare_heads(cfg)

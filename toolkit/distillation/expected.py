"""The alpha to expect of a draft of one of the target's layers, from measured curves: alpha over distinct response tokens.

The first stage of +experiment=draft. Points: toolkit/assets/draft_curve.csv, drafts of SmolLM2-135M with the recipe's settings,
each on validation texts of its run. At a number of tokens the best number of epochs counts. Between the points alpha is
interpolated in the logarithm of the tokens; beyond them it goes on as between the last two. Fewer tokens than were measured
have at most the first one's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from toolkit.models.pair import ASSETS

CURVE = ASSETS / "draft_curve.csv"  # kind, layers, tokens, epochs, alpha_val, minutes (empty: not measured alone)


def run(cfg: Any) -> Path:
    """Print what the curve says of so many response tokens of `data_gen.responses`; nothing is made."""
    if cfg.prompts.limit is None:
        return Path(cfg.paths.root_dir)
    tokens = cfg.prompts.limit * cfg.sampling.max_new_tokens
    points = pd.read_csv(CURVE)
    measured = points[(points.kind == "separate") & (points.layers == 1)]
    most = measured.tokens.max()
    few, many = (
        f"{'at most ' if count < measured.tokens.min() else ''}{expected_alpha(measured, count):.2f}"
        for count in (tokens, 10 * tokens)
    )
    note = f", beyond the {most:,} that were measured" if 10 * tokens > most else ""
    print(
        f"draft: at most {tokens:,} response tokens. The curve of SmolLM2-135M has an alpha of {few} there, on validation "
        f"texts, and {many} at ten times as many{note}. Other targets and texts have other curves"
    )
    return Path(cfg.paths.root_dir)


def expected_alpha(points: pd.DataFrame, tokens: float) -> float:
    """alpha at a number of distinct response tokens, of points with at least two such numbers."""
    best = points.groupby("tokens").alpha_val.max().cummax()
    logs, alphas = np.log(best.index.to_numpy(float)), best.to_numpy(float)
    if np.log(tokens) > logs[-1]:
        slope = (alphas[-1] - alphas[-2]) / (logs[-1] - logs[-2])
        return float(min(alphas[-1] + slope * (np.log(tokens) - logs[-1]), 1.0))
    return float(np.interp(np.log(tokens), logs, alphas))


if __name__ == "__main__":
    from toolkit.runs.command import command

    command("responses", run)

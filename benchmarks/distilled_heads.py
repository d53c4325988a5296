"""The rate rule with a distilled draft: `+experiment=distill_heads`, a head retrained on each draft, seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import read_table
from analysis.tables.rows import COUNTS, Array, throughput
from toolkit import distill
from toolkit.chain import run_stages
from toolkit.config import compose

DOMAINS, RATIO = ("instruct", "math", "code"), 0.2
FIXED, RATE = "speculative", "rate"


def rate_rule(seeds: Sequence[int], root: Path) -> pd.DataFrame:
    """One line per seed and domain: the rate rule's throughput with the shipped and with the distilled draft, and the gain.

    Both heads are trained on the same responses; the rule runs at c = .2 without a threshold, so nothing is chosen. The best
    fixed K is the best on these very texts. Intervals: bootstrap over prompts, paired.
    """
    lines = []
    for seed in seeds:
        folders = _folders(seed, root)
        for domain in DOMAINS:
            rows = {draft: read_table(folders[f"test_{domain}_{draft}"], "rows") for draft in ("shipped", "distilled")}
            shipped, distilled = (_of_rate(found) for found in rows.values())
            totals = Bootstrap(4000).totals(np.hstack([shipped, distilled]))
            drawn = _gain(totals)
            whole = np.hstack([shipped, distilled]).sum(0, keepdims=True)
            low, high = np.quantile(drawn, [0.025, 0.975])
            lines.append({
                "seed": seed, "domain": domain,
                "best fixed K, shipped": f"{_best_fixed(rows['shipped']):.3f}",
                "distilled": f"{_best_fixed(rows['distilled']):.3f}",
                "rate rule, shipped": f"{float(throughput(shipped.sum(0), RATIO)):.3f}",
                "rate rule, distilled": f"{float(throughput(distilled.sum(0), RATIO)):.3f}",
                "gain": f"{float(_gain(whole)[0]):+.1%} [{low:+.1%}, {high:+.1%}]",
            })  # fmt: skip
    return pd.DataFrame(lines)


def _folders(seed: int, root: Path) -> dict[str, Path]:
    """The output folders of the experiment's stages: run, then found again."""
    cfg = compose("distill", ["+experiment=distill_heads", f"seed={seed}", f"paths.root_dir={root}"])
    trained = distill.run(cfg)
    known = {**run_stages(cfg.before, root), "distill": trained}
    return run_stages(cfg.after, root, known)


def _of_rate(rows: pd.DataFrame) -> Array:
    """Counts [prompts, counts] of the rate rule at the cost ratio that is reported."""
    mine = rows[(rows.method == RATE) & rows.setting.str.contains(f"cost_ratio={RATIO:g}( |$)")]
    found: Array = mine.sort_values("prompt")[list(COUNTS)].to_numpy(dtype=float)
    return found


def _best_fixed(rows: pd.DataFrame) -> float:
    fixed = rows[rows.method == FIXED].groupby("setting")[list(COUNTS)].sum().to_numpy(dtype=float)
    return float(throughput(fixed, RATIO).max())


def _gain(totals: Array) -> Array:
    """Of totals [R, 2 counts]: the distilled draft's throughput over the shipped one's, less one."""
    half = len(COUNTS)
    found: Array = throughput(totals[:, half:], RATIO) / throughput(totals[:, :half], RATIO) - 1
    return found

"""python -m analysis.price traces=FOLDER head=FOLDER: what a draft forward may cost, solved on a recording. No threshold.

For every cost ratio c the lambda of "draft on while the next token's chance to enter the text exceeds lambda c" that is best
on the way to its fixed point (`analysis.ceilings.solve_policy`), what it reaches, and the override that decodes with it
(without one, `method=rate` tracks lambda prompt by prompt). For an acceptance head this is SpecDec++ at h = 1 - lambda c.
The recording is what lambda is chosen on: report speeds on other prompts.

    prices     one line per cost ratio: lambda, lambda c, throughput, best fixed K, override
    prices.md  the same for people
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis import ceilings
from analysis.contenders import find_contenders
from analysis.recorded import threshold_policy
from analysis.tables import markdown, save_table, show
from toolkit import metrics
from toolkit.acceptance import PrereadHead
from toolkit.config import instantiate, plain
from toolkit.errors import InputError
from toolkit.io import write_text
from toolkit.stage import command, open_stage
from toolkit.traces import SUMMARY, read_traces


def run(cfg: Any) -> Path:
    """Solve for every cost ratio; returns the output folder."""
    ratios = plain(cfg.cost_ratios)
    if not isinstance(ratios, list) or not ratios or min(ratios) <= 0:
        raise InputError(f"cost_ratios: expected a list of numbers above 0, got {ratios}")
    folder = Path(str(cfg.traces))
    trace = read_traces(folder)
    found_heads = find_contenders([cfg.head], [folder])
    one = next((head for head in found_heads if head.kind == "preread"), found_heads[0])
    stage = open_stage("price", cfg, inputs=[folder / SUMMARY, *one.files])
    scored = one.scored(trace, instantiate(cfg.draft) if one.needs_draft else None)
    policy = threshold_policy(one.head, one.estimate, corrected=True)
    lines = []
    for c in ratios:
        found = ceilings.solve_policy(scored, policy, c, cfg.min_drafted)
        k, fixed = ceilings.best_fixed(scored, c)
        said = {"c": c, "lambda": found.price, "lambda c": found.price * c, "tokens per target time": found.rate}
        best = {"best fixed K": k, "its tokens per target time": metrics.throughput(fixed.total, c)}
        lines.append({**said, **best, "override": _override(one.head, c, found.price)})
    table = pd.DataFrame(lines)
    title = f"{one.name} on {trace.num_texts} texts of {folder.name}"
    save_table(table, stage.folder, "prices")
    shown = table.round(4)
    write_text(stage.folder / "prices.md", f"# Prices\n\n{title}\n\n{markdown(shown)}\n")
    show(shown, title)
    return stage.finish(texts=trace.num_texts)


def _override(head: Any, cost_ratio: float, price: float) -> str:
    """How `toolkit.decode` is told."""
    if isinstance(head, PrereadHead):
        return f"method=rate method.policy.cost_ratio={cost_ratio:g} method.policy.rate={price:.4f}"
    threshold = max(0.0, 1 - price * cost_ratio)
    return f"method=specdec_pp method.policy.threshold={threshold:.4f} method.policy.estimator.corrected=true"


if __name__ == "__main__":
    command("price", run)

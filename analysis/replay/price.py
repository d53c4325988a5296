"""What a draft forward may cost, solved on a recording: analysis.timing traces=FOLDER head=FOLDER. No threshold.

The rule is "keep drafting while the next token's probability to enter the text exceeds lambda c". For every cost ratio c this
finds the lambda that is best on the way to its fixed point (`toolkit.trace.bounds.solve_policy`). It gives what
that lambda reaches and the override that decodes with it; without one, `method=rate` tracks lambda prompt by prompt.
For an acceptance head this is SpecDec++ at h = 1 - lambda c. The recording is what lambda is chosen on: report speeds
on other prompts.

    prices     one line per cost ratio: lambda, lambda c, throughput, the share of rounds that the recording's max_drafted
               ended, best fixed K, override
    prices.md  the same for people
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis import keys
from analysis.replay.head_folders import find_heads
from analysis.tables.files import markdown, save_table, show, show_page
from toolkit import metrics
from toolkit.acceptance import PrereadHead
from toolkit.config import instantiate, plain
from toolkit.errors import InputError
from toolkit.files.atomic import write_text
from toolkit.runs.stage import open_stage
from toolkit.trace import bounds
from toolkit.trace.store import SUMMARY, read_traces


def solve_prices(cfg: keys.Timing) -> Path:
    """Solve for every cost ratio; returns the output folder."""
    if cfg.head is None:
        raise InputError("head: expected a folder with traces=FOLDER, head=FOLDER, got none")
    ratios = plain(cfg.cost_ratios)
    if not isinstance(ratios, list) or not ratios or min(ratios) <= 0:
        raise InputError(f"cost_ratios: expected a list of numbers above 0, got {ratios}")
    folder = Path(str(cfg.traces))
    trace = read_traces(folder)
    candidates = find_heads([cfg.head], [folder])
    candidate = next((head for head in candidates if head.kind == "preread"), candidates[0])
    stage = open_stage("timing", cfg, inputs=[folder / SUMMARY, *candidate.files])
    if stage.finished:
        show_page(stage.folder / "prices.md")
        return stage.folder
    scored = candidate.scored(trace, instantiate(cfg.draft) if candidate.needs_draft else None)
    policy = candidate.policy(corrected=True)
    lines = []
    for c in ratios:
        solved = bounds.solve_policy(scored, policy, c, cfg.min_drafted)
        k, fixed = bounds.best_fixed(scored, c)
        line = {"c": c, "lambda": solved.price, "lambda c": solved.price * c, "tokens per target time": solved.rate}
        line |= {"rounds at the bound": solved.replayed.lengths[-1] / solved.replayed.lengths.sum()}
        line |= {"best fixed K": k, "its tokens per target time": metrics.throughput(fixed.total, c)}
        bounds_of_rounds = f"method.min_drafted={cfg.min_drafted} method.max_drafted={trace.max_drafted}"
        lines.append({**line, "override": f"{_override(candidate.head, c, solved.price)} {bounds_of_rounds}"})
    table = pd.DataFrame(lines)
    save_table(table, stage.folder, "prices")
    title, rounded = f"{candidate.name} on {trace.num_texts} texts of {folder.name}", table.round(4)
    show(rounded, title, stage.folder / "prices.csv", ("c", "lambda", "override"))
    write_text(stage.folder / "prices.md", f"# Prices\n\n{title}\n\n{markdown(rounded)}\n")
    return stage.finish(texts=trace.num_texts)


def _override(head: Any, cost_ratio: float, price: float) -> str:
    """The overrides of `toolkit.decode` that set this price."""
    if isinstance(head, PrereadHead):
        return f"method=rate method.policy.cost_ratio={cost_ratio:g} method.policy.rate={price:.4f}"
    threshold = max(0.0, 1 - price * cost_ratio)
    return f"method=specdec_pp method.policy.threshold={threshold:.4f} method.policy.estimator.corrected=true"

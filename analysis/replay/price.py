"""What a draft forward may cost, solved on a recording: analysis.timing traces=FOLDER head=FOLDER. No threshold.

The rule is "keep drafting while the next token's probability to enter the text exceeds lambda c". For every cost ratio c this
finds the lambda that is best on the way to its fixed point (`analysis.replay.upper_bound.solve_policy`). It gives what
that lambda reaches and the override that decodes with it; without one, `method=rate` tracks lambda prompt by prompt.
For an acceptance head this is SpecDec++ at h = 1 - lambda c. The recording is what lambda is chosen on: report speeds
on other prompts.

values=true solves the stopping problem itself (SpecDec++, arXiv:2405.19715, Theorems 4.2 and 4.3) by dynamic programming
(`analysis.replay.dynamic_program`), on what the head says. It gives the gap between the rate rule and the best policy.
It also gives the threshold h after every number of drafted tokens, and the value of drafting one more.

    prices     one line per cost ratio: lambda, lambda c, throughput, the share of rounds that the recording's max_drafted
               ended, best fixed K, override
    values     with values=true: per cost ratio, tokens drafted and P(some rejection), the worth of one more token
    thresholds with values=true: per cost ratio and tokens drafted, h of Theorem 4.3
    prices.md  the same for people
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.replay import upper_bound
from analysis.replay.dynamic_program import best_policy, head_inputs, stopping_values
from analysis.replay.head_folders import find_contenders
from analysis.replay.recorded_heads import threshold_policy
from analysis.tables.files import markdown, save_table, show, show_page
from toolkit import metrics
from toolkit.acceptance import PrereadHead
from toolkit.config import commands, instantiate, plain
from toolkit.errors import InputError
from toolkit.files.atomic import write_text
from toolkit.runs.stage import open_stage
from toolkit.trace.folders import SUMMARY, read_traces
from toolkit.trace.rounds import Geometry


def solve_prices(cfg: commands.Timing) -> Path:
    """Solve for every cost ratio; returns the output folder."""
    if cfg.head is None:
        raise InputError("head: expected a folder with traces=FOLDER, head=FOLDER, got none")
    ratios = plain(cfg.cost_ratios)
    if not isinstance(ratios, list) or not ratios or min(ratios) <= 0:
        raise InputError(f"cost_ratios: expected a list of numbers above 0, got {ratios}")
    folder = Path(str(cfg.traces))
    trace = read_traces(folder)
    contenders = find_contenders([cfg.head], [folder])
    contender = next((head for head in contenders if head.kind == "preread"), contenders[0])
    stage = open_stage("price", cfg, inputs=[folder / SUMMARY, *contender.files])
    if stage.finished:
        show_page(stage.folder / "prices.md")
        return stage.folder
    scored = contender.scored(trace, instantiate(cfg.draft) if contender.needs_draft else None)
    policy = threshold_policy(contender.head, contender.estimate, corrected=True)
    most = min(trace.max_drafted, cfg.max_drafted)
    estimator: Any = policy.estimator
    seen = head_inputs(scored, Geometry.of(scored), estimator, most) if cfg.values else None
    lines, values, thresholds = [], [], []
    for c in ratios:
        solved = upper_bound.solve_policy(scored, policy, c, cfg.min_drafted)
        k, fixed = upper_bound.best_fixed(scored, c)
        line = {"c": c, "lambda": solved.price, "lambda c": solved.price * c, "tokens per target time": solved.rate}
        line |= {"rounds at the bound": solved.replayed.lengths[-1] / solved.replayed.lengths.sum()}
        best = {"best fixed K": k, "its tokens per target time": metrics.throughput(fixed.total, c)}
        if seen is not None:
            whole = best_policy(scored, seen, c)
            line |= {"best policy": whole.rate, "rate rule below it": 1 - solved.rate / whole.rate}
            worth = stopping_values(scored, seen, c, whole.price)
            depths = range(1, len(worth.worth))
            values += [{"c": c, **row} for k in depths for row in worth.table(k)]
            thresholds += [{"c": c, "k": k, "h": worth.threshold(k), "1 - lambda c": 1 - worth.price} for k in depths]
        lines.append({**line, **best, "override": _override(contender.head, c, solved.price)})
    tables = {"prices": pd.DataFrame(lines)}
    if seen is not None:
        tables |= {"thresholds": pd.DataFrame(thresholds), "values": pd.DataFrame(values)}
    title = f"{contender.name} on {trace.num_texts} texts of {folder.name}"
    parts = ["# Prices", title]
    for name, table in tables.items():
        save_table(table, stage.folder, name)
        rounded = table.round(4)
        parts += [markdown(rounded)] if name == "prices" else [f"## {name}", markdown(rounded)]
        show(rounded, title if name == "prices" else name, stage.folder / f"{name}.csv", ("c", "lambda", "override"))
    write_text(stage.folder / "prices.md", "\n\n".join(parts) + "\n")
    return stage.finish(texts=trace.num_texts)


def _override(head: Any, cost_ratio: float, price: float) -> str:
    """The overrides of `toolkit.decode` that set this price."""
    if isinstance(head, PrereadHead):
        return f"method=rate method.policy.cost_ratio={cost_ratio:g} method.policy.rate={price:.4f}"
    threshold = max(0.0, 1 - price * cost_ratio)
    return f"method=specdec_pp method.policy.threshold={threshold:.4f} method.policy.estimator.corrected=true"

"""Which importance-weighted rule to take: the paper's, with a fixed order of tokens, or the one with groups of tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.multi_draft.acceptance_table import acceptance_table
from analysis.multi_draft.target_texts import Judge, Walk
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import markdown, with_interval
from data_gen.prompts import ToyPrompts
from toolkit import ModelPair
from toolkit.sampling import Sampling

METHODS = ("importance", "importance_grouped")
DOMAINS = ("instruct", "math", "code")
TEMPERATURES = (0.8, 1.0, 1.2, 1.5)  # of the draft; the target's is 1
NUM_DRAFTS = (2, 4, 6, 8)


def importance(num_prompts: int = 32) -> str:
    """`importance` (the paper's rule) and `importance_grouped` beside the optimum, over domains, draft temperatures and K."""
    table = measured(ModelPair.toy(), num_prompts)
    wide = table.pivot(index=["domain", "draft temperature", "K"], columns="method", values="drafted")
    ahead = (wide.importance_grouped - wide.importance).sort_values()
    best = table[table.method == METHODS[0]].set_index(["domain", "draft temperature", "K"]).optimum
    behind = {name: best - wide[name] for name in METHODS}
    head = (
        f"Toy pair, {num_prompts} test prompts per domain, 8 positions of each text, target at T = 1. The chance that the "
        "emitted token is a candidate; in brackets 95 % intervals over prompts; optimum: of any exact rule for i.i.d. "
        "candidates."
    )
    verdict = (
        f"**Take `importance_grouped`.** It is behind the optimum by {behind[METHODS[1]].mean():.4f} on average (at most "
        f"{behind[METHODS[1]].max():.4f}), `importance` by {behind[METHODS[0]].mean():.4f} (at most "
        f"{behind[METHODS[0]].max():.4f}). The most it gains over `importance` is {ahead.iloc[-1]:.4f} "
        f"({_said(ahead.index[-1])}). The most it loses is {max(0.0, -ahead.iloc[0]):.4f} ({_said(ahead.index[0])}). "
        f"`importance` is the paper's own, for comparisons, and the "
        "optimum itself for two candidates when `num_free` and `alphabet` cover the vocabulary."
    )
    return "\n\n".join([head, verdict, markdown(shown(table))])


def measured(
    pair: ModelPair,
    num_prompts: int,
    domains: Sequence[str] = DOMAINS,
    temperatures: Sequence[float] = TEMPERATURES,
    num_drafts: Sequence[int] = NUM_DRAFTS,
) -> pd.DataFrame:
    """One line per domain, draft temperature, K and method: the columns of `acceptance_table`."""
    judges = [Judge.of(name) for name in METHODS]
    sampling, found = Sampling(max_new_tokens=96), []
    for domain in domains:
        prompts = list(ToyPrompts(domain, "test", limit=num_prompts).load())
        for temperature in temperatures:
            walk = Walk(pair, prompts, sampling, num_drafts, 8, 4, 0, temperature, 16)
            with tempfile.TemporaryDirectory() as folder:
                sums = walk.run(judges, Path(folder), lambda count: None)
            lines = acceptance_table(sums.assign(dataset=domain), Bootstrap(2000))
            found.append(lines.assign(domain=domain, **{"draft temperature": temperature}))
    return pd.concat(found, ignore_index=True)


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """A line per domain, draft temperature and K, a column per rule."""
    lines = []
    for (domain, temperature, count), rows in table.groupby(["domain", "draft temperature", "K"], sort=False):
        line = {"domain": domain, "draft temperature": temperature, "K": count}
        for row in rows.to_dict("records"):
            line[row["method"]] = with_interval(row["drafted"], row["drafted_low"], row["drafted_high"])
        lines.append({**line, "optimum": f"{rows.optimum.iloc[0]:.4f}"})
    return pd.DataFrame(lines)


def _said(index: tuple[str, float, int]) -> str:
    domain, temperature, count = index
    return f"{domain}, draft temperature {temperature}, K = {count}"

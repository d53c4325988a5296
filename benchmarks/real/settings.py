"""Which setting of every method makes most tokens per cost, by replay of training-side questions."""

from __future__ import annotations

from functools import cache
from typing import Any

import pandas as pd

from analysis.tables.selection import load_rows
from benchmarks.real.folder import noted, reads_target
from toolkit import config
from toolkit.costs.load import LoadCost

DEEPEST = 10  # tokens of a draft
PLAIN, FIXED = "autoregressive", "speculative"
FITTED, SHIPPED_WEIGHTS = "rate, statistics", "rate, weights that ship"  # in tables: the rate rule without a head
SWEPT = {  # what the grid varies: its name in tables, and its key
    **dict.fromkeys((FIXED, "prompt_lookup"), ("K", "num_drafted")),
    **dict.fromkeys(("confidence", "specdec_pp"), ("h", "threshold")),
    **dict.fromkeys(("rate", "online_rate", "best_source"), ("acceptance", "acceptance")),
}


@cache
def replayed(part: str, temperature: int) -> pd.DataFrame:
    """Rows of a sweep, with what each costs (`priced`); the rate rule without a head is a method of its own here."""
    rows = priced(load_rows([noted(f"{part}{temperature}")], part))
    head, fitted = (rows.setting.str.contains(f"{name}=") for name in ("head", "statistics"))
    rows = rows[~(head & fitted)]  # the grid's product: statistics beside a head are not read
    rate = rows.method.eq("rate") & ~head
    return rows.assign(method=rows.method.mask(rate & fitted, FITTED).mask(rate & ~fitted, SHIPPED_WEIGHTS))


def priced(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what each costs at the measured costs of batch 1, in target forward passes over one token."""
    costs = LoadCost.load(noted("costs"))
    draft_cost = costs.draft(1, 1, costs.middle) / costs.target(1, 1, costs.middle)
    by_width = [costs.target(1, width + 1, costs.middle) / costs.target(1, 1, costs.middle) for width in range(40)]

    def cost(row: Any) -> float:
        rounds = list(row.drafted_lengths)
        if not sum(rounds):  # the oracle's rounds are expectations
            return float(draft_cost * row.num_draft_calls + row.num_target_calls)
        return float(draft_cost * row.num_draft_calls + sum(n * by_width[k] for k, n in enumerate(rounds)))

    return rows.assign(cost=[cost(row) for row in rows.itertuples()])


def choices(temperature: int) -> dict[str, str]:
    """The setting of each method that makes most tokens per cost on training-side questions."""
    sums = replayed("dev", temperature).groupby(["method", "setting"], sort=False)[["num_generated", "cost"]].sum()
    best = (sums.num_generated / sums.cost).groupby("method", sort=False).idxmax()
    return dict(list(best))


def setting_of(chosen: dict[str, str], method: str) -> dict[str, str]:
    """A setting's values by what tables call them: {"K": "4"}."""
    return dict(part.partition("=")[::2] for part in chosen[method].split())


def grid_words(chosen: dict[str, str] | None = None) -> list[str]:
    """The overrides of a sweep's grid: all settings, or the chosen ones."""
    words = ["grid=real", *(["~grid.oracle"] if chosen or reads_target() else [])]
    for name, head in (("specdec_pp", "acceptance"), ("rate", "preread")):
        words.append(f'grid.{name}.head=["{noted(head)}"]')
    weighing = ("rate", "online_rate", "lookup_rate", "best_source")
    words += [f'grid.{name}.policy.costs=["{noted("costs")}"]' for name in weighing]
    for name, estimator in (("lookup_rate", "estimator"), ("best_source", "copies")):
        words.append(f'grid.{name}.policy.{estimator}.path=["{noted("copies")}"]')
    if chosen is None:
        words.append(f'grid.rate.head=[null,"{noted("preread")}"]')
        words.append(f'+grid.rate.policy.estimator.statistics=[null,"{noted("statistics")}"]')
    if chosen is not None:
        for name, (shown, key) in SWEPT.items():
            words.append(f"grid.{name}.policy.{key}=[{setting_of(chosen, name)[shown]}]")
    return words


def method_of(name: str, temperature: int, batch_size: int) -> Any:
    """A method with the setting that replay chose."""
    words = {
        FIXED: ["policy.num_drafted={K}"],
        "rate": [f"policy.costs={noted('costs')}", "policy.acceptance={acceptance}", f"max_drafted={DEEPEST}"],
        "lookup_rate": [f"policy.costs={noted('costs')}", f"policy.estimator.path={noted('copies')}"],
        "best_source": [
            f"policy.costs={noted('costs')}",
            f"policy.copies.path={noted('copies')}",
            "policy.acceptance={acceptance}",
            f"max_drafted={DEEPEST}",
        ],
    }.get(name, [])
    words = [word.format(**setting_of(choices(temperature), name)) for word in words]
    if name in ("lookup_rate", "best_source"):
        words.append(f"policy.batch_size={batch_size}")
    return config.method(name, words, noted("preread") if name == "rate" else None)

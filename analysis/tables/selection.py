"""Choosing settings on dev rows, and which rows may be compared at all."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.tables.grid import PER_PROMPT, REFERENCES
from analysis.tables.rows import Array, at_cost, totals
from toolkit import metrics
from toolkit.errors import InputError

Choice = dict[str, str]  # method -> setting


def comparable(rows: pd.DataFrame, what: str) -> pd.DataFrame:
    """Rows of the prompts that every setting decoded without an error. Raises InputError if no prompt is left."""
    good = rows[rows.error.isna()]
    num_settings = len(rows[["method", "setting"]].drop_duplicates())
    everywhere = good.groupby("prompt").size() == num_settings
    complete = good[good.prompt.isin(everywhere.index[everywhere])]
    if complete.empty:
        raise InputError(
            f"{what}: no prompt was decoded by every setting without an error; give folders over the same prompts"
        )
    if lost := rows.prompt.nunique() - complete.prompt.nunique():
        print(f"{what}: {lost} prompts left out, not every setting decoded them without an error")
    return complete


def unseen(dev: pd.DataFrame, test: pd.DataFrame, dataset: str) -> pd.DataFrame:
    """Dev rows whose prompts are not test prompts. Raises InputError if none is left."""
    others = dev[~dev.prompt_hash.isin(test.prompt_hash)]
    if others.empty:
        raise InputError(
            f"{dataset}: every dev prompt is a test prompt too; choose settings on others (prompts.split=dev)"
        )
    if lost := dev.prompt.nunique() - others.prompt.nunique():
        print(f"{dataset}: {lost} dev prompts left out, they are test prompts too")
    return others


def halves(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Dev and test rows: half of each data set's prompts, by their hashes. Raises InputError for fewer than two."""
    chosen = []
    for dataset, part in rows.groupby("dataset", sort=False):
        hashes = sorted(set(part.prompt_hash))
        if len(hashes) < 2:
            raise InputError(
                f"{dataset}: expected at least 2 different prompts to choose on one half, got {len(hashes)}"
            )
        chosen += [(dataset, digest) for digest in hashes[: len(hashes) // 2]]
        print(
            f"{dataset}: settings are chosen on {len(hashes) // 2} prompts and reported on {len(hashes) - len(hashes) // 2}"
        )
    is_dev = pd.MultiIndex.from_frame(rows[["dataset", "prompt_hash"]]).isin(chosen)
    return rows[is_dev], rows[~is_dev]


def choose(dev: pd.DataFrame, test: pd.DataFrame, cost_ratio: float, dataset: str, node_cost: float = 0.0) -> Choice:
    """The setting of highest throughput on dev per method; both tables are `totals`. Raises InputError if one side lacks it."""
    table = at_cost(dev, cost_ratio, node_cost)
    best = table.loc[table.groupby("method", sort=False).throughput.idxmax()]
    choice = dict(zip(best.method, best.setting, strict=True))
    for method, settings in test.groupby("method", sort=False).setting.unique().items():
        if method not in choice and len(settings) > 1:
            raise InputError(
                f"{dataset}: the dev rows lack {method}, so none of its {len(settings)} settings can be chosen"
            )
        choice.setdefault(str(method), settings[0])
    there = set(zip(test.method, test.setting, strict=True))
    for method, setting in choice.items():
        if (method, setting) not in there:
            name = f"{method} {setting}".strip()
            raise InputError(
                f"{dataset}: {name} is best on dev, and the test rows lack it; sweep it on the test prompts too"
            )
    return choice


def best_per_prompt(rows: pd.DataFrame, method: str, cost_ratio: float) -> pd.DataFrame:
    """The cheapest setting's row on every prompt, with hindsight: settings must be replayed on the same texts."""
    mine = rows[rows.method == method].reset_index(drop=True)
    cost = metrics.cost(mine.num_draft_calls, mine.num_target_calls, cost_ratio)
    return mine.loc[cost.groupby(mine.prompt, sort=False).idxmin()].assign(method=PER_PROMPT, setting="")


def settings_table(rows: pd.DataFrame, cost_ratio: float, node_cost: float = 0.0) -> pd.DataFrame:
    """Totals, marking what is undominated among lossless settings; references are not settings one could choose."""
    table = at_cost(totals(rows), cost_ratio, node_cost)
    eligible = table.lossless.to_numpy(dtype=bool) & ~table.method.isin(REFERENCES).to_numpy()
    flags = np.zeros(len(table), dtype=bool)
    flags[eligible] = undominated(table.loc[eligible, ["discard_rate", "verification_rate"]].to_numpy(dtype=float))
    return table.assign(undominated=flags)


def undominated(points: Array, more: tuple[bool, bool] = (False, False)) -> np.ndarray:
    """Which points [n, 2] no other one beats: [n] bool. more: whether more is better, on each axis."""
    points = np.where(more, -points, points)
    flags = np.zeros(len(points), dtype=bool)
    last = (np.inf, np.inf)
    for i in np.lexsort((points[:, 1], points[:, 0])):
        if points[i, 1] < last[1] or tuple(points[i]) == last:  # equal points do not dominate each other
            flags[i], last = True, tuple(points[i])
    return flags

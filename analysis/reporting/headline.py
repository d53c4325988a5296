"""The result of the folders in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.figures.method_styles import label, setting_name
from analysis.reporting.folders import Folder
from analysis.tables.grid import PLAIN, YARDSTICKS


def headline(folders: Sequence[Folder]) -> str:
    """The result of a group's frontier, else of its comparison, else that there is none."""
    for stage, name, say in (("frontier", "frontier", _of_frontier), ("compare", "comparison", _of_comparison)):
        for folder in folders:
            table = folder.table(name) if folder.stage == stage else None
            if table is not None and len(table) and (sentence := say(table)):
                return sentence
    return "No frontier and no comparison among these folders: there is no result to put into one sentence."


def _of_frontier(table: pd.DataFrame) -> str:
    """ "At c = 0.2, rate gains 6.1 % [5.2 %, 7.0 %] over the best fixed K on math (...) ..."."""
    parts, first = [], table.iloc[0]
    for dataset, lines in table.groupby("dataset", sort=False):
        own = lines[~lines.method.isin((*YARDSTICKS, PLAIN, first.baseline))]
        if own.empty:
            continue
        best = own.loc[own.throughput.idxmax()]
        result = f"{setting_name(best.method, best.setting)} {_percent(best, 'gain', '+.1%')} on {dataset}"
        bound = next((n for n in ("upper_bound_share", "share") if n in lines and pd.notna(best[n])), None)
        if bound is not None:
            result += f" ({best[bound]:.0%} of the way to the {'upper bound' if bound != 'share' else 'oracle'})"
        parts.append(result + (", within its interval of none" if best.gain_low <= 0 <= best.gain_high else ""))
    if not parts:
        return ""
    over = f"over the best {label(first.baseline)} at c = {first.cost_ratio:g}"
    return f"Gain in tokens per target time {over}: {'; '.join(parts)}."


def _of_comparison(table: pd.DataFrame) -> str:
    if "speedup" not in table or not table.speedup.notna().any():
        return ""
    best = table.loc[table.speedup.idxmax()]
    speed = f"{_percent(best, 'speedup', '.2f')} times the baseline's speed"
    return f"Fastest of {len(table)} settings: {setting_name(best.method, best.setting)}, {speed}."


def _percent(row: Any, name: str, form: str) -> str:
    """The figure with its interval, if it has one."""
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    if low is None or pd.isna(low):
        return format(row[name], form)
    return f"{row[name]:{form}} [{low:{form}}, {high:{form}}]"

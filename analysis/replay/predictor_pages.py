"""The tables of `analysis.replay.predictors` as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.replay.predictor_costs import cost_tables
from analysis.replay.predictor_rows import COLD, NAMES, STATISTICS
from analysis.tables.files import markdown
from analysis.tables.grid import FIXED, UPPER_BOUND
from analysis.tables.standing import interval_text

SHARE = "upper_bound_share"


def page(tables: Mapping[str, pd.DataFrame], cost_ratio: float, positions: int) -> str:
    """The whole page."""
    every = tables["predictors"]
    home = every[every.home]
    depths = tables["calibration"][tables["calibration"].domain.isin(home.domain)]
    kinds, curve = _curve(home, positions)
    rows = [row for row in home.method.unique() if row not in kinds or row in (STATISTICS, kinds[row])]
    main = home[home.method.isin([row for row in rows if " of " not in row])]
    parts = [
        "# What predicts acceptance",
        f"c = {cost_ratio:g}. Share of the way from the best fixed K to the upper bound, with intervals over test prompts. "
        "Every row has one number, chosen on `tuning`; every figure is of `tests`. "
        f"Statistics are fitted to {positions:,} positions.",
        markdown(shares(main)),
        "## Probabilities: expected calibration error, and the rate rule without a chosen level",
        "ECE is the mean over depths in the round. Calibrated: scale and shift by depth, fitted on `tuning`. The share without "
        "a level is that of the rule's own threshold, lambda c.",
        markdown(probabilities(main[main.ECE.notna()])),
        "## By depth",
        markdown(by_depth(depths, [STATISTICS, *(row for row in set(kinds.values()) if row in rows)])),
        "## Positions of training",
        markdown(curve),
        "## From one domain, temperature or draft to another",
        "Share with a level chosen on the domain's own tuning texts / without a level, raw.",
        markdown(transfer(every, rows)),
    ]
    if "costs" in tables:
        parts += [
            "## Tokens per cost, at cost tables",
            "Plain decoding makes 1, and K = 0 does not draft. Numbers are chosen at each table's costs; without a level, the "
            "rate rule decides by the table. Shares are of the way from the best fixed K to the upper bound.",
            *cost_tables(tables["costs"], list(main.method.unique())),
        ]
    if len(tables["drift"]):  # domains of one draft and temperature, two at least
        parts += [
            "## The domain changes in the middle",
            "Share of the second domain's way. Weights and levels are those of the first; `carried` goes on learning.",
            markdown(drift(tables["drift"], set(home.method) - set(rows))),
        ]
    return "\n\n".join(parts) + "\n"


def _curve(home: pd.DataFrame, positions: int) -> tuple[dict[str, str], pd.DataFrame]:
    """Rows that differ in positions of training alone: the one with most of them for each, and their shares."""
    kinds: dict[str, list[str]] = {}
    for row in home.method.unique():
        kind = row.split(",")[0]
        if kind == STATISTICS or " head" in kind:
            kinds.setdefault(kind, []).append(row)
    sizes = home.drop_duplicates("method").set_index("method").positions
    lines: list[dict[str, Any]] = []
    largest: dict[str, str] = {}
    for kind, members in kinds.items():
        members = sorted(members, key=lambda row: sizes[row])
        largest |= dict.fromkeys(members, members[-1])
        for row in members if len(members) > 1 else ():
            by_domain = home[home.method == row].set_index("domain")
            line: dict[str, Any] = {"predictor": kind, "positions": int(sizes[row])}
            lines.append(
                line | {domain: interval_text(entry, SHARE, "{:.0%}") for domain, entry in by_domain.iterrows()}
            )
    return largest, pd.DataFrame(lines)


def shares(main: pd.DataFrame) -> pd.DataFrame:
    """One line per row: shares of all domains, then AUC, positions of training, time, states."""
    lines = []
    for row in main.method.unique():
        by_domain = main[main.method == row].set_index("domain")
        line: dict[str, Any] = {"predictor": NAMES.get(row, row)}
        line |= {domain: interval_text(entry, SHARE, "{:.0%}") for domain, entry in by_domain.iterrows()}
        line["AUC"] = numbers(by_domain.AUC)
        line["positions"] = "" if by_domain.positions.isna().all() else f"{by_domain.positions.median():,.0f}"
        line["us per token"] = "" if by_domain.microseconds.isna().all() else f"{by_domain.microseconds.median():.0f}"
        line["states"] = "yes" if by_domain.states.eq(True).any() else "no"
        lines.append(line)
    return pd.DataFrame(lines)


def probabilities(main: pd.DataFrame) -> pd.DataFrame:
    """One line per row that estimates probabilities: ECE and the share without a level, raw and calibrated, of all domains."""
    lines = []
    for row in main.method.unique():
        of_row = main[main.method == row]
        line = {"predictor": row, "ECE": numbers(of_row.ECE), "calibrated": numbers(of_row.ECE_calibrated)}
        line |= {"share, no level": percent(of_row.free), "share, calibrated": percent(of_row.free_calibrated)}
        lines.append(line)
    return pd.DataFrame(lines)


def by_depth(table: pd.DataFrame, rows: Sequence[str]) -> pd.DataFrame:
    """ECE raw and calibrated at every depth, of some rows, all positions of the table together."""
    of_rows = table[table.method.isin(rows) & (table.depth != "all")]
    lines: list[dict[str, Any]] = []
    for row in dict.fromkeys(of_rows.method):
        for key, name in (("ECE", "raw"), ("ECE_calibrated", "calibrated")):
            line: dict[str, Any] = {"predictor": row, "ECE": name}
            for depth, group in of_rows[of_rows.method == row].dropna(subset=[key]).groupby("depth", sort=False):
                line[str(depth)] = f"{(group[key] * group.positions).sum() / group.positions.sum():.3f}"
            lines.append(line)
    return pd.DataFrame(lines)


def carries_over(row: str) -> bool:
    """Whether a row is compared on domains of another draft or temperature, too."""
    return row in ("confidence", COLD, STATISTICS) or row.startswith(f"{STATISTICS} of ") or " head" in row


def transfer(every: pd.DataFrame, rows: Sequence[str]) -> pd.DataFrame:
    """One line per predictor and what it was fitted to, one column per domain: share with its level / without, and ECE."""
    lines = []
    for row in filter(carries_over, every.method.unique()):
        if " head" in row and row not in rows:
            continue
        line: dict[str, Any] = {"predictor": row}
        for domain, entry in every[every.method == row].set_index("domain").iterrows():
            free = "" if pd.isna(entry.free) else f" / {entry.free:.0%}"
            line[str(domain)] = f"{entry[SHARE]:.0%}{free}"
        lines.append(line)
    return pd.DataFrame(lines).fillna("")


def drift(table: pd.DataFrame, small: set[str]) -> pd.DataFrame:
    """One line per row, one column per change; rows of fewer positions of training are left out."""
    lines = []
    for row in table.method.unique():
        if row not in (FIXED, UPPER_BOUND, *small):
            changes_of_row = table[table.method == row]
            changes = {
                f"{e.before} to {e.after}": interval_text(e._asdict(), SHARE, "{:.0%}")
                for e in changes_of_row.itertuples()
            }
            lines.append({"predictor": row} | changes)
    return pd.DataFrame(lines)


def numbers(values: pd.Series) -> str:
    """Figures of all domains beside each other."""
    return "" if values.isna().all() else " ".join(f"{value:.3f}" for value in values)


def percent(values: pd.Series) -> str:
    """Shares of all domains beside each other."""
    return "" if values.isna().all() else " / ".join(f"{100 * value:.0f}" for value in values) + " %"

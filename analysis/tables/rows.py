"""Rows: what sweeps find, one per setting and prompt. Counts travel, ratios are formed last.

    dataset, split      which prompts
    method, setting     which setting, as a reader says it ("K=4", "h=0.7"); unique among the settings of a sweep
    <parameters>        one column per parameter of the grid, named as its override; empty where a method lacks it
    lossless            whether the method keeps the target's distribution
    prompt, prompt_hash the prompt's id, and a hash of what was asked
    num_drafted, num_draft_calls, num_target_calls, num_generated, num_discarded     (toolkit.types.Counts)
    accepted_lengths    how many rounds accepted 0, 1, 2, ... tokens
    drafted_lengths     how many rounds drafted 0, 1, 2, ... tokens; empty where rounds are not chains, as the next one
    reached_lengths     how many rounds drafted 0, 1, 2, ... tokens before and including the first rejected one
    copy_rounds, draft_rounds   rounds that copied tokens, and that a draft model drafted in; empty for the oracle
    finish_reason, error
    setting_seconds        wall time of the whole setting

An oracle's counts are expectations and therefore not whole numbers. In every row
num_drafted + num_target_calls = num_generated + num_discarded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import keys
from analysis.tables.bootstrap import Array, Bootstrap
from analysis.tables.grid import FIXED, PLAIN, REFERENCES, UPPER_BOUND
from toolkit import metrics
from toolkit.config import plain
from toolkit.types import Counts, Round

COUNTS = tuple(Counts.__dataclass_fields__)
LENGTHS = ("accepted_lengths", "drafted_lengths", "reached_lengths")
SETTING = ["dataset", "split", "method", "setting"]
SOURCES = ("copy_rounds", "draft_rounds")
FACTS = ["lossless", "prompt", "prompt_hash", *COUNTS, *LENGTHS, *SOURCES, "finish_reason", "error", "setting_seconds"]
SELDOM = 0.01  # share of rounds
BANDS = Bootstrap(1000)  # of acceptance by position


def labels(cfg: keys.Labels) -> dict[str, str]:
    prompts = plain(cfg.prompts)
    if prompts.get("path"):  # the file is read instead of the source, whatever split that has
        name, split = Path(prompts["path"]).stem, None
    else:
        name, split = prompts.get("name") or prompts.get("domain"), prompts.get("split")
    return {"dataset": str(cfg.dataset or name or "prompts"), "split": str(cfg.split or split or "")}


def round_lengths(rounds: Sequence[Round], chains: bool) -> dict[str, list[int]]:
    """LENGTHS of a text's rounds: how many of them had 0, 1, 2, ... tokens; after a stop string nothing counts."""
    lengths = {"accepted_lengths": [min(r.num_accepted, r.num_produced) for r in rounds]}
    lengths["drafted_lengths"] = [r.num_drafted for r in rounds] if chains else []
    lengths["reached_lengths"] = [min(r.num_drafted, r.num_produced) for r in rounds] if chains else []
    return {name: [values.count(n) for n in range(max(values, default=-1) + 1)] for name, values in lengths.items()}


def join_settings(settings: Sequence[pd.DataFrame]) -> pd.DataFrame:
    rows = pd.concat(settings, ignore_index=True)
    parameters = [name for name in rows.columns if name not in (*SETTING, *FACTS)]
    rows[parameters] = one_kind(rows[parameters])
    return rows.reindex(columns=[*SETTING, *parameters, *FACTS])  # rows of older versions lack the sources


def one_kind(parameters: pd.DataFrame) -> pd.DataFrame:
    """Columns of parameters with numbers, or else with texts alone: a file holds one kind per column."""
    columns = parameters.copy()
    for name in columns:
        if not pd.to_numeric(columns[name].dropna(), errors="coerce").notna().all():
            columns[name] = columns[name].map(lambda value: None if pd.isna(value) else str(value))
    return columns


def summary_table(rows: pd.DataFrame, cost_ratio: float) -> pd.DataFrame:
    """One line per setting: `settings_table`, where its rounds drafted, and the seconds it took."""
    summary = settings_table(rows, cost_ratio).assign(**source_shares(rows))
    summary["seconds"] = list(rows.groupby(["method", "setting"], sort=False).setting_seconds.first())
    return summary


def totals(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per setting, in the order of the rows: prompts, summed counts, and the rates made of them."""
    grouped = rows.groupby([*SETTING, "lossless"], sort=False, dropna=False)
    table = grouped[list(COUNTS)].sum()
    table.insert(0, "prompts", grouped.size())
    table = table.reset_index()
    sums = [counts_of(row) for _, row in table.iterrows()]
    for rate in (metrics.discard_rate, metrics.verification_rate, metrics.block_efficiency):
        table[rate.__name__] = [rate(counts) for counts in sums]
    return table


def source_shares(rows: pd.DataFrame) -> dict[str, list[float]]:
    """Shares of rounds that copied, and that a draft model drafted in, as in `totals`; empty unless a setting did both."""
    sums = rows.groupby([*SETTING, "lossless"], sort=False, dropna=False)[["num_target_calls", *SOURCES]].sum(
        min_count=1
    )
    if not (sums[list(SOURCES)] > 0).all(axis=1).any():
        return {}
    return {name.replace("rounds", "share"): list(sums[name] / sums.num_target_calls) for name in SOURCES}


def at_cost(table: pd.DataFrame, cost_ratio: float, node_cost: float = 0.0) -> pd.DataFrame:
    return table.assign(throughput=throughput(table[list(COUNTS)].to_numpy(dtype=float), cost_ratio, node_cost))


def throughput(counts: Array, cost_ratio: float, node_cost: float = 0.0) -> Array:
    """`metrics.throughput` of counts [..., len(COUNTS)].

    node_cost  in target passes, of a drafted token beyond one per draft call
    """
    names = ("num_generated", "num_draft_calls", "num_target_calls", "num_drafted")
    produced, draft_calls, target_calls, drafted = (counts[..., COUNTS.index(name)] for name in names)
    beyond = np.maximum(drafted - draft_calls, 0.0)
    return metrics.tokens_per_cost(produced, draft_calls, target_calls + node_cost * beyond, cost_ratio)


def counts_of(row: Any) -> Counts:
    return Counts(**{name: row[name] for name in COUNTS})


def acceptance_positions(rows: pd.DataFrame, bootstrap: Bootstrap | None = None) -> pd.DataFrame:
    """One line per setting of chains and position: reached and accepted rounds, rate = accepted / reached, its interval."""
    lines = []
    for labels, lengths in _chains(rows):
        accepted, _, reached = (at_least(values)[:, 1:] for values in lengths)  # [prompts, positions]
        width = int(np.flatnonzero(reached.sum(0)).max(initial=-1)) + 1
        for k in range(width):
            counts = np.stack([accepted[:, k], reached[:, k]], 1)
            passed, tried = map(int, counts.sum(0))
            line = {**labels, "position": k + 1, "reached": tried, "accepted": passed, "rate": passed / tried}
            if bootstrap is not None:
                line |= bootstrap.figures(counts, lambda sums: {"rate": sums[..., 0] / sums[..., 1]}, "probability")
            lines.append(line)
    ends = [] if bootstrap is None else ["rate_low", "rate_high"]
    return pd.DataFrame(lines, columns=[*SETTING, "position", "reached", "accepted", "rate", *ends])


def length_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per setting and length: how many rounds drafted, and how many accepted, that many tokens."""
    lines = []
    for labels, (accepted, drafted, _) in _chains(rows):
        counted = zip(drafted.sum(0).astype(int), accepted.sum(0).astype(int), strict=True)
        lines += [
            {**labels, "length": n, "drafted": num_drafted, "accepted": num_accepted}
            for n, (num_drafted, num_accepted) in enumerate(counted)
        ]
    return pd.DataFrame(lines, columns=[*SETTING, "length", "drafted", "accepted"])


def bound_notes(lengths: pd.DataFrame, settings: pd.DataFrame, bound: int) -> list[str]:
    """One line per method whose best setting ends more than SELDOM of its rounds at the bound, not by its own choice."""
    drafting = lengths.groupby(list(SETTING[-2:]), sort=False)
    shares = {}
    for (method, setting), rounds in drafting:
        drafted = rounds[rounds.drafted > 0]
        at_bound = drafted[drafted.length >= bound].drafted.sum() / max(drafted.drafted.sum(), 1)
        if len(drafted) > 1 and at_bound > SELDOM:  # all rounds of one length: a fixed K
            shares[method, setting] = at_bound
    settings = settings[settings.method != PLAIN]  # whose forced tokens, under a grammar, are no choice
    best = settings.loc[settings.groupby("method", sort=False).throughput.idxmax()]
    return [
        f"{method} {setting}: the bound of {bound} drafted tokens ended {shares[method, setting]:.0%} of its rounds; a larger "
        "max_drafted may pay"
        for method, setting in zip(best.method, best.setting, strict=True)
        if (method, setting) in shares
    ]


def _chains(rows: pd.DataFrame) -> Iterator[tuple[dict[str, str], list[Array]]]:
    """Every setting of chains that drafted, with its LENGTHS as histograms [prompts, longest + 1]."""
    if not set(LENGTHS) <= set(rows.columns):
        return
    for key, part in rows.groupby(SETTING, sort=False):
        width = max((len(line) for name in LENGTHS for line in part[name]), default=0)
        lengths = [np.array([[*line, *[0] * (width - len(line))] for line in part[name]], float) for name in LENGTHS]
        if width > 1 and lengths[1][:, 1:].sum() > 0:
            yield dict(zip(SETTING, map(str, key), strict=True)), lengths


def at_least(histogram: Array) -> Array:
    """Numbers of rounds with at least n tokens, from those with n: [..., longest + 1]."""
    return np.flip(np.flip(histogram, -1).cumsum(-1), -1)


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


def sweep_scalars(summary: pd.DataFrame, cost_ratio: float) -> dict[str, float | str | None]:
    """Scalars of a sweep's summary at one cost ratio, on the prompts that the best setting was picked on; None: unknown."""
    own = summary[~summary.method.isin((*REFERENCES, PLAIN))]
    own = summary[summary.method == PLAIN] if own.empty else own
    if own.empty:
        return {"cost_ratio": cost_ratio}
    best = own.loc[own.throughput.idxmax()]
    fixed, bound = (summary[summary.method == name].throughput.max() for name in (FIXED, UPPER_BOUND))
    bound = np.maximum(bound, 1.0)  # which decodes autoregressively where that is faster
    return {
        "best": f"{best.method} {best.setting}".strip(),
        **metrics.scalars(counts_of(best[list(COUNTS)]), cost_ratio),
        **{name: float(best[name]) for name in ("copy_share", "draft_share") if name in best},
        "over_fixed_k": None if pd.isna(fixed) else float(best.throughput / fixed - 1),
        "upper_bound_share": float((best.throughput - fixed) / (bound - fixed)) if bound > fixed else None,
    }

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

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.tables.bootstrap import Array, Bootstrap
from analysis.tables.files import read_table
from analysis.tables.grid import REFERENCES
from toolkit import metrics
from toolkit.config import commands, plain
from toolkit.errors import InputError, unknown_name
from toolkit.runs.stage import MANIFEST, read_manifest
from toolkit.types import Counts, Round

NAME = "rows"
DEFAULT_BOUND = 20  # `max_drafted` of a method that names none
PARAMETER = re.compile(r"(\S+?)=(\S+)")  # in a setting's label: "h=0.3 head=depth=2,w_rej=6@1a2b3c"
FREE = ("seed", "device", "device_map")  # of the sampling and the pair: sweeps that differ in these still compare
COUNTS = tuple(Counts.__dataclass_fields__)
LENGTHS = ("accepted_lengths", "drafted_lengths", "reached_lengths")
SETTING = ["dataset", "split", "method", "setting"]
SOURCES = ("copy_rounds", "draft_rounds")
FACTS = ["lossless", "prompt", "prompt_hash", *COUNTS, *LENGTHS, *SOURCES, "finish_reason", "error", "setting_seconds"]
SELDOM = 0.01  # share of rounds


def labels(cfg: commands.Labels) -> dict[str, str]:
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


def load_rows(folders: Sequence[Path | str], what: str) -> pd.DataFrame:
    """The rows of several sweep folders. Raises InputError for folders without rows, or that do not go together."""
    if isinstance(folders, str | Path):
        folders = [folders]
    if not folders:
        raise InputError(f"{what}: expected sweep folders, {what}=[FOLDER,...], got none")
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise InputError(f"{what}: expected a sweep's output folder at {folder}, found none")
        if not (folder / f"{NAME}.parquet").exists():
            raise InputError(
                f"{what}: {folder} holds no {NAME}.parquet: it is not a sweep's output, or the sweep has not ended"
            )
    frames = [read_table(folder, NAME) for folder in folders]
    check_comparable([Path(folder) for folder in folders])
    rows = pd.concat(frames, ignore_index=True)
    key = [*SETTING, "prompt"]
    counts = rows[key].join(rows[list(COUNTS)].round(3)).groupby(key, sort=False).nunique()
    if (counts > 1).any(axis=None):
        first = counts[(counts > 1).any(axis=1)].index[0]
        raise InputError(f"{what}: two folders disagree about {' '.join(map(str, first))}; give only one of them")
    return rows.drop_duplicates(key, ignore_index=True)


def check_comparable(folders: Sequence[Path]) -> None:
    """Raises InputError unless all sweeps have the same pair, sampling and bound; seeds and devices may differ."""
    manifests = [read_manifest(folder) for folder in folders if (folder / MANIFEST).exists()]
    for other in manifests[1:]:
        bounds = []  # earlier versions left methods at theirs, whatever the sweep's was
        for manifest in (manifests[0], other):
            bound = manifest.get("config", {}).get("max_drafted")
            bounds.append(bound if bound is None or manifest.get("bound_reaches_methods") else DEFAULT_BOUND)
        if bounds[0] != bounds[1]:
            raise InputError(f"the sweeps differ in max_drafted: {bounds}; sweep with the same one")
        for part in ("pair", "sampling"):
            first, second = (manifest.get("config", {}).get(part) or {} for manifest in (manifests[0], other))
            # An empty mapping of options counts as a missing key.
            sides = [{key: None if value == {} else value for key, value in side.items()} for side in (first, second)]
            changed = [
                key for key in sorted(first | second) if sides[0].get(key) != sides[1].get(key) and key not in FREE
            ]
            if changed:
                raise InputError(
                    f"the sweeps differ in {', '.join(f'{part}.{key}' for key in changed)}: "
                    f"{[first.get(key) for key in changed]} and {[second.get(key) for key in changed]}"
                )


def as_one_part(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of each data set as of one part, named "dev+test". Raises InputError if two parts hold the same prompt."""
    names = {dataset: "+".join(dict.fromkeys(part.split)) for dataset, part in rows.groupby("dataset", sort=False)}
    joined = rows.assign(split=rows.dataset.map(names))
    twice = joined[joined.duplicated([*SETTING, "prompt"])]
    if not twice.empty:
        raise InputError(
            f"{twice.dataset.iloc[0]}: prompt {twice.prompt.iloc[0]} is in two parts; give only one of them"
        )
    return joined


def apart(rows: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Settings of one method as methods of their own, by the named parameters (head). Raises InputError for unknown names."""
    settings = rows.loc[~rows.method.isin(REFERENCES), ["method", "setting"]].drop_duplicates()
    values = {key: PARAMETER.findall(key[1]) for key in settings.itertuples(index=False, name=None)}
    parameters = {name for pairs in values.values() for name, _ in pairs}
    for name in names:
        if name not in parameters:
            raise unknown_name("apart (a parameter as settings call it)", name, sorted(parameters))
    renamed = {}
    for (method, setting), pairs in values.items():
        chosen = " ".join(f"{name}={value}" for name, value in pairs if name in names)
        rest = " ".join(f"{name}={value}" for name, value in pairs if name not in names)
        renamed[method, setting] = (f"{method} {chosen}", rest) if chosen else (method, setting)
    for method in set(settings.method):
        split = {new[0] for (old, _), new in renamed.items() if old == method}
        if len(split) == 1:
            renamed = {key: key if key[0] == method else new for key, new in renamed.items()}
    new = [renamed.get(key, key) for key in rows[["method", "setting"]].itertuples(index=False, name=None)]
    return rows.assign(method=[method for method, _ in new], setting=[setting for _, setting in new])


def same_texts(folders: Sequence[Path], rows: pd.DataFrame, method: str) -> bool:
    """Whether all sweeps were replayed on traces, and all settings of a method on the same text of every prompt."""
    manifests = [read_manifest(folder) if (folder / MANIFEST).exists() else {} for folder in folders]
    mine = rows[(rows.method == method) & rows.error.isna()]
    lengths = mine.groupby(["dataset", "prompt"]).num_generated.nunique()
    replayed = all(manifest.get("config", {}).get("source") == "traces" for manifest in manifests)
    return replayed and bool((lengths == 1).all())


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
    """`metrics.throughput` of counts [..., len(COUNTS)]. node_cost: in target passes, of a node beyond a chain."""
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

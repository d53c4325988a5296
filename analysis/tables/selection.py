"""Which rows of which sweeps may be compared, and choosing settings on dev rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.tables.files import read_table
from analysis.tables.grid import PER_PROMPT, REFERENCES
from analysis.tables.rows import COUNTS, SETTING, at_cost
from toolkit.errors import InputError, unknown_name
from toolkit.runs.stage import MANIFEST, read_manifest

Choice = dict[str, str]  # method -> setting
NAME = "rows"
DEFAULT_BOUND = 20  # `max_drafted` of a method that names none
PARAMETER = re.compile(r"(\S+?)=(\S+)")  # in a setting's label: "h=0.3 head=depth=2,w_rej=6@1a2b3c"
FREE = ("seed", "device", "device_map")  # of the sampling and the pair: sweeps that differ in these still compare


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
    of_method = rows[(rows.method == method) & rows.error.isna()]
    lengths = of_method.groupby(["dataset", "prompt"]).num_generated.nunique()
    replayed = all(manifest.get("config", {}).get("source") == "traces" for manifest in manifests)
    return replayed and bool((lengths == 1).all())


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
    in_test = set(zip(test.method, test.setting, strict=True))
    for method, setting in choice.items():
        if (method, setting) not in in_test:
            name = f"{method} {setting}".strip()
            raise InputError(
                f"{dataset}: {name} is best on dev, and the test rows lack it; sweep it on the test prompts too"
            )
    return choice


def best_per_prompt(rows: pd.DataFrame, method: str, cost_ratio: float, node_cost: float = 0.0) -> pd.DataFrame:
    """The fastest setting's row on every prompt, with hindsight: settings must be replayed on the same texts."""
    of_method = rows[rows.method == method].reset_index(drop=True)
    best = at_cost(of_method, cost_ratio, node_cost).groupby("prompt", sort=False).throughput.idxmax()
    return of_method.loc[best].assign(method=PER_PROMPT, setting="")

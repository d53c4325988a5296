"""Cost tables of this machine: measured once, when a rule first weighs costs, and kept in the user's cache.

A table is found again by the weights of target and draft, processor, threads, dtype, torch version, packing and batch size. Of
several processes that want the same one, one measures. A rule decides by the table alone, never by a clock: equal tables give
equal texts, another table another text of the same distribution. At temperature 0 the text is always the same.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from toolkit.costs.measure import CONTEXTS, REPEATS, WIDTHS, machine_of, measure
from toolkit.costs.table import CostTable
from toolkit.errors import InputError
from toolkit.files import lock
from toolkit.files.atomic import content_hash
from toolkit.files.digests import cache_folder
from toolkit.models.pair import ModelPair, fingerprint

FIGURES = ("cost_ratio", "column_cost")  # what a rule assumes without a table
_LOADED: dict[Path, CostTable] = {}  # of this process
_MEASURING = threading.RLock()


def weighs_costs(policy: Any) -> bool:
    """Whether a rule weighs forward passes and names no costs: neither a table, nor figures other than its defaults."""
    named = {field.name: field for field in fields(policy)}
    assumes = all(getattr(policy, name) == named[name].default for name in FIGURES if name in named)
    return "costs" in named and policy.costs is None and assumes


def with_costs(policy: Any, pair: ModelPair, batch_size: int) -> Any:
    """The rule with the cost table of its pair here, if it weighs costs and the pair does not assume them."""
    if pair.costs == "assumed" or not weighs_costs(policy):
        return policy
    table, _ = costs_here(pair, batch_size)[0]
    return replace(policy, costs=table, **({"batch_size": batch_size} if hasattr(policy, "batch_size") else {}))


def costs_here(pair: ModelPair, batch_size: int = 1, repeats: int = REPEATS) -> list[tuple[CostTable, Path]]:
    """The table of each draft of a pair on this machine (of a target alone: one), and the file that keeps it.

    It is read or measured. Where nothing can be kept, one line says so, and the file is not there.
    """
    machine = machine_of(pair)
    drafts = [fingerprint(draft) for draft in pair.drafts] or [None]
    what = [fingerprint(pair.target), machine, batch_size, WIDTHS, CONTEXTS, repeats]
    folder = cache_folder() / "costs"
    paths = [folder / f"{content_hash([draft, *what], length=24)}.json" for draft in drafts]
    with _MEASURING:
        tables = [_read(path, machine) for path in paths]
        if None in tables:
            with _alone(folder, f"{paths[0].stem}.lock"):
                tables = [_read(path, machine, say=True) for path in paths]
                if None in tables:
                    tables = _measured(pair, batch_size, repeats, paths)
        for path, table in zip(paths, tables, strict=True):
            assert table is not None
            if path not in _LOADED:
                _LOADED[path] = table
                print(f"costs of {pair.name or 'the pair'}: {table}", file=sys.stderr)
    return [(_LOADED[path], path) for path in paths]


def _measured(pair: ModelPair, batch_size: int, repeats: int, paths: list[Path]) -> list[CostTable | None]:
    number = len(WIDTHS) * len(CONTEXTS) * repeats
    print(
        f"measuring what forward passes of {pair.name or 'the pair'} cost at batch size {batch_size}, once: {number} of the "
        f"target; kept in {paths[0].parent}",
        file=sys.stderr,
    )
    tables = measure(pair, batch_size, repeats=repeats)
    for path, table in zip(paths, tables, strict=True):
        try:
            table.save(path)
        except InputError as error:
            print(f"{error}: every process measures costs again", file=sys.stderr)
            break
    return [*tables]


def _read(path: Path, machine: dict[str, Any], say: bool = False) -> CostTable | None:
    """A table that is kept; None: there is none that is whole and of this machine."""
    if path in _LOADED:
        return _LOADED[path]
    if not path.exists():
        return None
    try:
        table = CostTable.load(path)
    except InputError as error:
        reason = str(error)
    else:
        if all(table.machine.get(name) == value for name, value in machine.items()):
            return table
        reason = f"{path} was measured on another machine ({table.machine.get('processor')})"
    if say:
        print(f"{reason}: measured again", file=sys.stderr)
    return None


@contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """While it lasts, no other process measures this; without a lock in a folder that cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.take(folder, name, wait=True)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        lock.release(folder, name)

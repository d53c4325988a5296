"""Cost tables of this machine: measured once, when a rule first weighs costs, and kept in the user's cache.

A table is found again by what a forward pass costs depends on: the form of target and draft (architecture, configuration,
shapes, dtypes, devices, adapters; not the weights' values, whose digest takes longer than the measurement may), processor,
threads, torch version, packing and batch size. A process looks for it by the same facts at every call, for models may change
between two. Of several processes that want the same one, one measures. A rule decides by the table alone, never by a clock:
equal tables give equal texts, another table another text of the same distribution. At temperature 0 the text is always the
same.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from toolkit.costs.measure import CONTEXTS, REPEATS, WIDTHS, machine_of, measure
from toolkit.costs.table import CostTable
from toolkit.engine.engine import Engine, engine_of
from toolkit.errors import InputError
from toolkit.files import lock
from toolkit.files.atomic import content_hash
from toolkit.files.digests import cache_folder
from toolkit.models.fingerprint import adapters, configuration
from toolkit.models.pair import ModelPair

WIDE = 0.4  # spread of the repeats beyond which a line says so
FIGURES = ("cost_ratio", "column_cost")  # in the place of a table
Kept = list[tuple[CostTable, Path]]
_LOADED: dict[Path, CostTable] = {}  # of this process
_OF_ENGINES: WeakKeyDictionary[Engine, dict[str, Kept]] = WeakKeyDictionary()
_MEASURING = threading.RLock()


def weighs_costs(policy: Any) -> bool:
    """Whether a rule weighs forward passes and names no costs: neither a table nor figures."""
    return hasattr(policy, "costs") and all(getattr(policy, name, None) is None for name in ("costs", *FIGURES))


def with_costs(policy: Any, pair: ModelPair, batch_size: int) -> Any:
    """The rule with the cost table of its pair here, if it weighs costs and the pair does not assume them."""
    if pair.costs == "assumed" or not weighs_costs(policy):
        return policy
    table, _ = costs_here(pair, batch_size)[0]
    return replace(policy, costs=table, **({"batch_size": batch_size} if hasattr(policy, "batch_size") else {}))


def costs_here(pair: ModelPair, batch_size: int = 1, repeats: int = REPEATS) -> Kept:
    """The table of each draft of a pair on this machine (of a target alone: one), and the file that keeps it.

    It is read or measured. Where nothing can be kept, one line says so, and the file is not there.
    """
    with _MEASURING:
        target, *drafts = forms = [_form(model) for model in (pair.target, *pair.drafts)]
        of_engine = _OF_ENGINES.setdefault(engine_of(pair), {})
        key = content_hash([forms, machine_of(pair), batch_size, repeats])
        if key not in of_engine:
            with engine_of(pair).sessions(1, 1):
                machine = machine_of(pair)  # once the engine has packed its weights, or has not
            what = [target, machine, batch_size, WIDTHS, CONTEXTS, repeats]
            folder = cache_folder() / "costs"
            paths = [folder / f"{content_hash([draft, *what], length=24)}.json" for draft in drafts or [[]]]
            key = content_hash([forms, machine, batch_size, repeats])
            of_engine[key] = list(zip(_tables(pair, machine, batch_size, repeats, paths), paths, strict=True))
        return of_engine[key]


def _form(model: Any) -> list[Any]:
    """What the cost of a model's forward pass depends on: its architecture, configuration, modules, tensors and adapters."""
    if not hasattr(model, "state_dict"):  # a table of tests
        return [type(model).__name__, list(model.probs.shape)]
    ways = [getattr(model.config, f"_{part}_implementation", None) for part in ("attn", "experts")]
    modules = [
        [name, type(m).__name__, vars(m).get("top_k"), *_tensors(m)]  # top_k: routers keep the experts per token
        for name, m in model.named_modules()
    ]
    return [type(model).__name__, ways, configuration(model), modules, adapters(model)]


def _tensors(module: Any) -> list[Any]:
    """Shape, dtype and device of a module's own tensors."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [[list(t.shape), str(t.dtype), str(t.device)] for t in tensors if t is not None]


def _tables(
    pair: ModelPair, machine: dict[str, Any], batch_size: int, repeats: int, paths: list[Path]
) -> list[CostTable]:
    """The tables that these files keep; measured if one is missing, damaged or another machine's."""
    tables = [_read(path, machine) for path in paths]
    if None in tables:
        with lock.alone(paths[0].parent, f"{paths[0].stem}.lock"):
            tables = [_read(path, machine, say=True) for path in paths]
            if None in tables:
                tables = [*_measured(pair, batch_size, repeats, paths)]
    for path, table in zip(paths, tables, strict=True):
        if path not in _LOADED and table is not None:
            _LOADED[path] = table
            print(f"costs of {pair.name or 'the pair'}: {table}", file=sys.stderr)
    return [_LOADED[path] for path in paths]


def _measured(pair: ModelPair, batch_size: int, repeats: int, paths: list[Path]) -> list[CostTable]:
    number = len(WIDTHS) * len(CONTEXTS) * repeats
    print(
        f"measuring what forward passes of {pair.name or 'the pair'} cost at batch size {batch_size}, once: {number} of the "
        f"target; kept in {paths[0].parent}",
        file=sys.stderr,
    )
    tables = measure(pair, batch_size, repeats=repeats)
    if (spread := tables[0].machine["spread"]) > WIDE:
        print(
            f"these times vary by {spread:.0%} between repeats: remove {paths[0]} to measure again on a quieter machine",
            file=sys.stderr,
        )
    for path, table in zip(paths, tables, strict=True):
        try:
            table.save(path)
        except InputError:
            print(f"{path.parent} cannot be written to: every process measures costs again", file=sys.stderr)
            break
    return tables


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

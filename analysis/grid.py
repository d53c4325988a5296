"""A grid of cells: methods times settings.

    speculative: {policy: {num_drafted: [2, 4, 6]}}
    specdec_pp:  {policy.threshold: [.3, .7], head: [FOLDER, FOLDER]}
    autoregressive: {}
    ceiling: {price: [.2, .4, .6]}
    oracle: {max_drafted: [null]}

Keys are methods of `conf/method/` and overrides relative to them, nested or dotted; `head` is a list of head folders,
null being the pair's own. Lists are multiplied out, the last one fastest. Two yardsticks are no methods: `oracle` knows the
coins, `ceiling` knows p and q and drafts on while the next token's chance to enter the text reaches the price.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from toolkit import config
from toolkit.acceptance.folder import head_hash
from toolkit.errors import InputError, unknown_name

ORACLE, CEILING, PLAIN = "oracle", "ceiling", "autoregressive"
PER_PROMPT = "fixed_per_prompt"  # the baseline's best setting of every prompt, with hindsight: in frontiers only
YARDSTICKS = (PER_PROMPT, CEILING, ORACLE)  # nobody can choose them
PARAMETERS = {CEILING: ("price", "min_drafted", "draft_temperature"), ORACLE: ("max_drafted", "draft_temperature")}
SYMBOLS = {
    "policy.num_drafted": "K", "policy.threshold": "h", "proposer.k_config": "k", "min_drafted": "min",
    "beams.num_beams": "W", "beams.threshold": "t", "beams.min_width": "Wmin", "beams.collapse_after": "block",
    "proposer.num_beams": "WS", "proposer.num_layers": "layers", "rule.tau": "tau", "rule.tau_2": "tau2",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One method with one setting of its parameters (overrides relative to the method, and `head`)."""

    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def setting(self) -> str:
        """The parameters as a reader says them: "K=4", "h=0.7", "h=0.7 head=w6@1a2b3c"."""
        names = sorted(self.parameters, key=lambda name: name == "head")  # the head last, the others as in the grid
        said = [(name, self.parameters[name]) for name in names if self.parameters[name] is not None]
        return " ".join(f"{_symbol(name)}={_value(name, value)}" for name, value in said)

    @property
    def name(self) -> str:
        """Method and setting."""
        return f"{self.method} {self.setting}".strip()

    @property
    def head(self) -> str | None:
        """Folder of the acceptance head; None: the pair's own, if one is needed."""
        return self.parameters.get("head")

    def method_config(self) -> Any:
        """The composed config of the method. Raises InputError for parameters it does not have."""
        overrides = [
            f"{name}={json.dumps(value, ensure_ascii=False)}"
            for name, value in self.parameters.items()
            if name != "head"
        ]
        return config.method_config(self.method, overrides, self.head)


def expand(grid: Mapping[str, Any], with_plain: bool = False) -> list[Cell]:
    """The cells of a grid, the yardsticks' last; they bring plain decoding along, whose responses they score.

    with_plain  plain decoding comes first in any case: its responses are what the others are replayed on
    """
    known = [*config.choices("method"), *PARAMETERS]
    for method in grid:
        if method not in known:
            raise unknown_name("method", str(method), known)
    if not grid:
        raise InputError("grid: expected methods, e.g. grid.speculative.policy.num_drafted=[2,4], got none")
    grid = dict(grid)
    yardsticks = [cell for name in PARAMETERS if name in grid for cell in _cells(name, grid.pop(name))]
    cells = [cell for method, settings in grid.items() for cell in _cells(method, settings)]
    if with_plain or (yardsticks and Cell(PLAIN) not in cells):
        cells.insert(0, Cell(PLAIN))
    for cell in yardsticks:
        _check_yardstick(cell)
    return list({cell.name: cell for cell in (*cells, *yardsticks)}.values())  # a value given twice counts once


def _check_yardstick(cell: Cell) -> None:
    """Raises InputError for parameters that it does not have, or lacks."""
    for name in cell.parameters:
        if name not in PARAMETERS[cell.method]:
            raise unknown_name(f"{cell.method} parameter", name, PARAMETERS[cell.method])
    price = cell.parameters.get("price")
    if cell.method == CEILING and not (isinstance(price, int | float) and price > 0):
        raise InputError(
            f"grid.{CEILING}.price: expected numbers above 0 (a draft forward in tokens, lambda c), got {price}"
        )


def _cells(method: str, settings: Any) -> list[Cell]:
    """All combinations of a method's settings."""
    if settings is not None and not isinstance(settings, Mapping):
        raise InputError(f"grid.{method}: expected parameters with lists of values, got {settings!r}")
    flat = config.flatten(settings or {})
    lists = [value if isinstance(value, list) else [value] for value in flat.values()]
    for name, values in zip(flat, lists, strict=True):
        if not values:
            raise InputError(f"grid.{method}.{name}: expected a list of values, got an empty one")
    return [Cell(method, dict(zip(flat, combination, strict=True))) for combination in product(*lists)]


def _symbol(name: str) -> str:
    return SYMBOLS.get(name, name.removeprefix("policy."))


def _value(name: str, value: Any) -> str:
    if name == "head":  # the folder's name for the reader, the weights' hash because such names repeat
        return f"{Path(value).resolve().name}@{head_hash(value)[:6]}"
    return str(value)

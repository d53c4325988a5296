"""A grid of settings: methods times settings.

    speculative: {policy: {num_drafted: [2, 4, 6]}}
    specdec_pp:  {policy.threshold: [.3, .7], head: [FOLDER, FOLDER]}
    autoregressive: {}
    upper_bound: {price: [.2, .4, .6]}
    oracle: {max_drafted: [null]}

Keys are methods of `conf/method/` and overrides relative to them, nested or dotted; `head` is a list of head folders,
null being the pair's own. Lists are multiplied out, the last one fastest; `impossible: skip` leaves out combinations whose
values contradict each other, and says so. Two entries are references, not methods. `oracle` knows the acceptance draws.
`upper_bound` knows p and q, and drafts on while the next token enters the text with a probability that reaches the price.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from analysis import keys
from toolkit import config
from toolkit.acceptance.folder import head_hash, head_name
from toolkit.errors import InputError, unknown_name
from toolkit.files.digests import digest

IMPOSSIBLE = "impossible"  # of a method's settings; its one value: skip
PLAIN, FIXED = "autoregressive", "speculative"
UPPER_BOUND, ORACLE = keys.SweepGrid.references
PER_PROMPT = "fixed_per_prompt"  # the baseline's best setting of every prompt, with hindsight: in frontiers only
REFERENCES = (PER_PROMPT, UPPER_BOUND, ORACLE)  # they use knowledge that no method has
PARAMETERS = {UPPER_BOUND: ("price", "min_drafted", "draft_temperature"), ORACLE: ("max_drafted", "draft_temperature")}
SYMBOLS = {
    "policy.num_drafted": "K", "policy.threshold": "h", "proposer.k_config": "k", "min_drafted": "min",
    "beams.num_beams": "W", "beams.threshold": "t", "beams.min_width": "Wmin", "beams.collapse_after": "block",
    "proposer.num_beams": "WS", "proposer.num_layers": "layers", "rule.tau": "tau", "rule.tau_2": "tau2",
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One method with parameters (overrides, `head`). max_drafted: the sweep's bound, of a method that names none."""

    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    max_drafted: int | None = None

    @cached_property
    def label(self) -> str:
        """The parameters as a reader says them: "K=4", "h=0.7", "h=0.7 head=w6@1a2b3c"."""
        names = sorted(self.parameters, key=lambda name: name == "head")  # the head last, the others as in the grid
        values = [(name, self.parameters[name]) for name in names if self.parameters[name] is not None]
        symbols = {name: SYMBOLS.get(name, name.removeprefix("policy.")) for name in names}
        return " ".join(f"{symbols[name]}={_value(name, value)}" for name, value in values)

    @cached_property
    def name(self) -> str:
        """Method and label: unique in a grid."""
        return f"{self.method} {self.label}".strip()

    @cached_property
    def head(self) -> str | None:
        """Folder of the acceptance head; None: the pair's own, if one is needed."""
        return self.parameters.get("head")

    def decode_keys(self) -> dict[str, Any]:
        """The setting as keys of `toolkit.decode` and their values."""
        keys = {f"method.{name}": value for name, value in self.parameters.items() if name != "head"}
        keys |= {"method.max_drafted": self.max_drafted, "head": self.head}
        return {"method": self.method} | {name: value for name, value in keys.items() if value is not None}

    def method_config(self) -> Any:
        """The composed config of the method. Raises InputError for parameters it does not have."""
        overrides = [config.override(name, value) for name, value in self.parameters.items() if name != "head"]
        if self.max_drafted is not None:
            overrides.append(f"max_drafted={self.max_drafted}")
        return config.method_config(self.method, overrides, self.head)

    @cached_property
    def content(self) -> dict[str, Any]:
        """Everything that the setting's rows depend on, with paths as they are (`toolkit.config.identity` reads them)."""
        if self.method in PARAMETERS:
            return {"name": self.method, "parameters": dict(self.parameters)}
        return {"name": self.method, "method": config.plain(self.method_config())}


def expand(grid: Mapping[str, Any], with_plain: bool = False, max_drafted: int | None = None) -> list[Setting]:
    """The settings of a grid, the references last. with_plain: autoregressive first; max_drafted: where at its default."""
    methods = [*config.choices("method"), *PARAMETERS]
    for method in grid:
        if method not in methods:
            raise unknown_name("method", str(method), methods)
    if not grid:
        raise InputError("grid: expected methods, e.g. grid.speculative.policy.num_drafted=[2,4], got none")
    grid = dict(grid)
    references = [setting for name in PARAMETERS if name in grid for setting in _expanded(name, grid.pop(name))]
    settings = [setting for method, settings in grid.items() for setting in _expanded(method, settings)]
    if max_drafted is not None and max_drafted != default_bound():
        settings = [bounded(setting, max_drafted) for setting in settings]
    if with_plain or (references and Setting(PLAIN) not in settings):
        settings.insert(0, Setting(PLAIN))
    for setting in references:
        for name in setting.parameters:
            if name not in PARAMETERS[setting.method]:
                raise unknown_name(f"{setting.method} parameter", name, PARAMETERS[setting.method])
        price = setting.parameters.get("price")
        if setting.method == UPPER_BOUND and not (isinstance(price, int | float) and price > 0):
            raise InputError(
                f"grid.{UPPER_BOUND}.price: expected numbers above 0 (a draft forward pass in tokens, lambda c), got {price}"
            )
    by_name = {setting.name: setting for setting in (*settings, *references)}  # a value given twice counts once
    return list(by_name.values())


def default_bound() -> int:
    return int(config.plain(config.method_config("confidence"))["max_drafted"])


def bounded(setting: Setting, max_drafted: int, copies: bool = False) -> Setting:
    """The setting with another bound, if it drafts chains and names none. Raises InputError for one below min_drafted.

    copies  those that copy tokens, too
    """
    written = OmegaConf.to_container(setting.method_config(), resolve=False)
    assert isinstance(written, dict)
    proposer = str((written.get("proposer") or {}).get("_target_", ".ChainProposer"))  # the default
    if (
        not (copies or proposer.endswith((".ChainProposer", ".BestSourceProposer")))
        or "max_drafted" in setting.parameters
        or written["max_drafted"] != default_bound()
    ):
        return setting
    if written["min_drafted"] > max_drafted:
        raise InputError(
            f"{setting.name}: a round has at least min_drafted={written['min_drafted']} tokens, more than max_drafted="
            f"{max_drafted}; raise it, or leave the setting out of the grid"
        )
    return replace(setting, max_drafted=max_drafted)


def _expanded(method: str, settings: Any) -> list[Setting]:
    if settings is not None and not isinstance(settings, Mapping):
        raise InputError(f"grid.{method}: expected parameters with lists of values, got {settings!r}")
    flat = config.flatten(settings or {})
    skipping = flat.pop(IMPOSSIBLE, None)
    lists = [value if isinstance(value, list) else [value] for value in flat.values()]
    for name, values in zip(flat, lists, strict=True):
        if not values:
            raise InputError(f"grid.{method}.{name}: expected a list of values, got an empty one")
    combinations = [Setting(method, dict(zip(flat, combination, strict=True))) for combination in product(*lists)]
    return combinations if skipping is None else _possible(method, combinations)


def _possible(method: str, settings: list[Setting]) -> list[Setting]:
    """The settings that can be built; prints how many cannot, and why the first one cannot. Raises InputError if all."""
    possible, first, fault = [], None, None
    for setting in settings:
        try:
            config.instantiate(setting.method_config())
        except InputError as error:
            first, fault = (first, fault) if fault is not None else (setting, error)
        else:
            possible.append(setting)
    if fault is not None and not possible:
        raise fault
    if first is not None:
        print(
            f"grid.{method}: {len(settings) - len(possible)} of {len(settings)} settings skipped, {first.label}: {fault}"
        )
    return possible


def _value(name: str, value: Any) -> str:
    if name == "head":  # a name for the reader, the weights' hash because names repeat
        return f"{','.join(head_name(value).split())}@{head_hash(value)[:6]}"
    if isinstance(value, str) and Path(value).is_file():  # an estimator, a cost table: the same name on every machine
        return f"{''.join(Path(value).name.split())}@{digest(value)[:6]}"
    return "".join(str(value).split())  # labels are read back word by word

"""The methods of conf/method/ where hydra is not installed, from a table of them as they compose.

python -m benchmarks.plain_methods      writes the table anew (needs hydra); a test says when that is due
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from toolkit.config import choices, flatten, method_config, plain
from toolkit.decoding import Method
from toolkit.io import read_json, write_json

TABLE = Path(__file__).with_name("plain_methods.json")
HEADS = "<heads>"  # stands for a folder of heads in the table
UNDRAFTED = ("autoregressive", "beam_sampling", "beam_search", "mtjd", "mtjd_top")
SMALL_VOCABULARIES = "importance_lp"  # a rule that is no method
# Beside the methods themselves: name -> method and what is changed.
MORE = {
    "specdec_pp lag=0": ("specdec_pp", ["policy.lag=0"]),
}


def composed() -> dict[str, Any]:
    """The table: every method as hydra composes it, interpolations resolved."""
    known = {name: (name, list[str]()) for name in choices("method")} | MORE
    return {name: plain(method_config(method, changes, HEADS)) for name, (method, changes) in known.items()}


def every_method(heads: Path | str) -> dict[str, Method]:
    """By name; `heads` is a folder with both kinds of head for the pair's draft."""
    return {name: built(about, heads) for name, about in read_json(TABLE).items()}


def named(method: str, /, **changes: Any) -> Method:
    """A method that needs no head, with other values instead of the table's: `proposer__k_config="2x2x1"`."""
    about = read_json(TABLE)[method]
    for path, value in changes.items():
        *parents, key = path.split("__")
        inner = about
        for parent in parents:
            inner = inner[parent]
        if key not in inner:
            raise KeyError(f"{method} has no {path}: {', '.join(flatten(about))}")
        inner[key] = value
    return built(about, HEADS)


def fixed(num_drafted: int, rule: str = "rejection") -> Method:
    """A fixed number of drafted tokens, judged by a rule for chains; 0 is the target alone."""
    method = {"rejection": "speculative"}.get(rule, rule)
    name = f"{rule} K={num_drafted}"
    if not num_drafted:
        return named("autoregressive", name=name)
    return named(method, policy__num_drafted=num_drafted, max_drafted=num_drafted, name=name)


def built(about: Any, heads: Path | str) -> Any:
    """What an entry of the table describes, built as hydra would."""
    if isinstance(about, Mapping):
        values = {name: built(value, heads) for name, value in about.items() if name != "_target_"}
        if "_target_" not in about:
            return values
        module, _, name = about["_target_"].rpartition(".")
        return getattr(import_module(module), name)(**values)
    return str(heads) if about == HEADS else about


if __name__ == "__main__":
    write_json(TABLE, composed())

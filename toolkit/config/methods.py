"""What a config says of methods beyond their own keys: the head that one needs, and the settings of grids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from toolkit.config import classes
from toolkit.config.commands import OfMethod, keys_of
from toolkit.config.files import choices, flatten, plain
from toolkit.config.store import compose_unchecked
from toolkit.config.values import is_node
from toolkit.errors import InputError, unknown_name

REFERENCES = ("oracle", "upper_bound")  # of analysis.tables.grid: no methods, with parameters of their own
TOY = Path(__file__).parent.parent / "assets" / "toy"


def check_head(config: Mapping[str, Any]) -> None:
    """Raises InputError if the policy of `config.method` needs an acceptance head, and neither it nor the pair has one.

    Estimators with the key `statistics` do without.
    """
    method, pair = config.get("method"), config.get("pair")
    policy = method.get("policy") if isinstance(method, Mapping) else None
    estimator = policy.get("estimator") if isinstance(policy, Mapping) else None
    if not isinstance(method, Mapping) or not isinstance(estimator, Mapping) or not is_node(pair):
        return
    if estimator.get("head", "it needs none") is not None or "statistics" in estimator:
        return
    is_toy = all(pair.get(side) in (f"toy/{side}", str(TOY / side)) for side in ("target", "draft"))
    if pair["_target_"] == "toolkit.models.pair.ModelPair.from_pretrained" and not is_toy:
        raise InputError(
            f"method {method.get('name')} needs an acceptance head, and this pair ships none: expected head=FOLDER (of "
            "toolkit.train), got none"
        )


def check_grid(grid: Mapping[str, Any], check: Callable[[str, Any, Any], None]) -> None:
    """Raises InputError for methods, keys of methods, and values that do not exist or do not fit.

    check  takes a path, a value and what its type must be
    """
    names, settings = [*choices("method"), *REFERENCES], dict[str, Mapping[str, Any]]()
    for name, content in grid.items():
        if name not in names:
            raise unknown_name("method", str(name), names)
        if name not in REFERENCES and isinstance(content, Mapping):
            settings[name] = flatten(content)
            if settings[name].get("impossible", "skip") != "skip":
                raise InputError(f"grid.{name}.impossible: expected skip, got {content['impossible']!r}")
            _nodes(name, settings[name])  # before any class is imported
    for name, flat in settings.items():
        for path, annotation in parameters(name, flat).items():
            for value in flat[path] if isinstance(flat[path], list) else [flat[path]]:
                check(f"grid.{name}.{path}", value, annotation)


def parameters(name: str, paths: Iterable[str]) -> dict[str, Any]:
    """The declared types of a method's keys that a grid names, by dotted path. Raises InputError for one it does not have."""
    annotations: dict[str, Any] = {"head": keys_of(OfMethod).keys["head"].annotation} if "head" in paths else {}
    for path, node in _nodes(name, paths).items():
        declared, key = classes.keys_of(str(node["_target_"])), path.rpartition(".")[2]
        if declared is None or key not in declared.keys:
            raise _unknown(name, path, declared.keys if declared else node)
        annotations[path] = declared.keys[key].annotation
    return annotations


def _nodes(name: str, paths: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """The classes of a method that these keys belong to. Raises InputError where there is none, or a key is misspelt."""
    own = [path for path in paths if path not in ("head", "impossible")]
    method = plain(compose_unchecked("method_only", [f"method={name}"]))["method"] if own else {}
    nodes = {}
    for path in own:
        *parents, key = path.split(".")
        node: Any = method
        for parent in parents:
            node = node.get(parent) if isinstance(node, Mapping) else None
        if not is_node(node) or classes.is_misspelt(key, node):
            raise _unknown(name, path, node if is_node(node) else method)
        nodes[path] = node
    return nodes


def _unknown(method: str, path: str, names: Iterable[str]) -> InputError:
    before = path[: -len(path.rpartition(".")[2])] if not path.endswith(".") else path
    return unknown_name(f"parameter of {method}", path, [f"{before}{name}" for name in names if name[0] != "_"])

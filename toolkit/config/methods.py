"""What the parts of a method ask of each other, and the settings of grids: judged from sources, before anything is imported.

`toolkit.decoding.Method` asks the same of methods that are built in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from toolkit.config import sources
from toolkit.config.commands import OfMethod, keys_of
from toolkit.config.files import choices, flatten, plain
from toolkit.config.notes import Keys
from toolkit.config.store import compose_unchecked
from toolkit.config.values import is_node
from toolkit.errors import InputError, unknown_name

METHOD, CHAIN = "toolkit.decoding.Method", "toolkit.decoding.ChainProposer"
LAYER_RULE = "LayerRule"
YARDSTICKS = ("oracle", "upper_bound")  # of analysis.tables.grid: no methods, with parameters of their own
TOY = Path(__file__).parent.parent / "assets" / "toy"


def check_method(method: Mapping[str, Any]) -> None:
    """Raises InputError if its rule is not exact for its proposer's scheme, or its policy needs what its proposer lacks."""
    name, rule = method.get("name"), _target(method.get("rule"))
    proposer = method.get("proposer") or {"_target_": CHAIN}
    policy, drafts = _target(method.get("policy")), _target(proposer)
    schemes, scheme = sources.constant(rule, "schemes"), proposer.get("scheme", sources.constant(drafts, "scheme"))
    reads_matches, copies = sources.constant(policy, "reads_matches"), sources.constant(drafts, "shows_matches")
    no_model = sources.constant(drafts, "needs_draft_model") is False
    needs_model = sources.constant(policy, "needs_draft_model") is not False
    learns = sources.constant(policy, "uses_history") is True
    proposer_name, policy_name, fault = _short(drafts), _short(policy), ""
    if schemes and scheme and scheme not in schemes:
        exact_for = ", ".join(schemes)
        fault = (
            f"{proposer_name} draws candidates by the scheme {scheme}, but {_short(rule)} is exact only for {exact_for}"
        )
    elif policy and learns and sources.constant(drafts, "supports_history") is False:
        fault = (
            f"{policy_name} learns from rounds of chains, and {proposer_name} has none; expected a policy without memory "
            "(fixed, confidence, tail, survival, ...)"
        )
    elif policy and reads_matches and copies is False:
        fault = (
            f"{policy_name} decides on copied tokens, and {proposer_name} draws from a draft model; expected a proposer that "
            "copies (suffix, prompt_lookup, best_source)"
        )
    elif policy and no_model and needs_model:
        fault = (
            f"{policy_name} looks at a draft model's distribution or states, and {proposer_name} has no draft model; "
            "expected another policy (fixed, heuristic)"
        )
    elif policy and copies and not no_model and not (reads_matches and needs_model):
        fault = (
            f"{proposer_name} has two sources, and {policy_name} does not choose between them; expected the policy "
            "best_source"
        )
    elif rule and sources.find(rule) and sources.is_kind(rule, LAYER_RULE) != (method.get("beams") is not None):
        fault = "a rule for layers of beams and `beams` need each other"
    if fault:
        raise InputError(f"method {name}: {fault}")


def check_head(config: Mapping[str, Any]) -> None:
    """Raises InputError if the policy of `config.method` needs an acceptance head, and neither it nor the pair has one."""
    method, pair = config.get("method"), config.get("pair")
    policy = method.get("policy") if isinstance(method, Mapping) else None
    estimator = policy.get("estimator") if isinstance(policy, Mapping) else None
    if not isinstance(method, Mapping) or not isinstance(estimator, Mapping) or not is_node(pair):
        return
    if estimator.get("head", "it needs none") is not None:
        return
    is_toy = all(pair.get(side) in (f"toy/{side}", str(TOY / side)) for side in ("target", "draft"))
    if _target(pair) == "toolkit.models.pair.ModelPair.from_pretrained" and not is_toy:
        raise InputError(
            f"method {method.get('name')} needs an acceptance head, and this pair ships none: expected head=FOLDER (of "
            "toolkit.train), got none"
        )


def check_grid(
    grid: Mapping[str, Any], judge: Callable[[str, Any, Any], None], keys_of_class: Callable[[str], Keys | None]
) -> None:
    """Raises InputError for methods, keys of methods, and values that do not exist or do not fit.

    judge  of a path, a value and what its type must be; keys_of_class: of a `_target_`
    """
    names = [*choices("method"), *YARDSTICKS]
    for name, settings in grid.items():
        if name not in names:
            raise unknown_name("method", str(name), names)
        if name in YARDSTICKS or not isinstance(settings, Mapping):
            continue
        flat = flatten(settings)
        if flat.get("impossible", "skip") != "skip":
            raise InputError(f"grid.{name}.impossible: expected skip, got {settings['impossible']!r}")
        for path, annotation in parameters(name, flat, keys_of_class).items():
            for value in flat[path] if isinstance(flat[path], list) else [flat[path]]:
                judge(f"grid.{name}.{path}", value, annotation)


def parameters(name: str, paths: Iterable[str], keys_of_class: Callable[[str], Keys | None]) -> dict[str, Any]:
    """The declared types of a method's keys that a grid names, by dotted path. Raises InputError for one it does not have."""
    annotations: dict[str, Any] = {}
    paths = list(paths)
    method = plain(compose_unchecked("method_only", [f"method={name}"]))["method"] if set(paths) - {"head"} else {}
    for path in paths:
        if path == "head":
            annotations[path] = keys_of(OfMethod).keys[path].annotation
        elif path != "impossible":
            *parents, key = path.split(".")
            node: Any = method
            for parent in parents:
                node = node.get(parent) if isinstance(node, Mapping) else None
            keys = keys_of_class(_target(node)) if is_node(node) else None
            if keys is None or key not in keys.keys:
                inside = [f"{path.rpartition(key)[0]}{name}" for name in (keys.keys if keys else method)]
                raise unknown_name(f"parameter of {name}", path, inside)
            annotations[path] = keys.keys[key].annotation
    return annotations


def _target(node: Any) -> str:
    return str(node["_target_"]) if is_node(node) else ""


def _short(target: str) -> str:
    return target.rpartition(".")[2]

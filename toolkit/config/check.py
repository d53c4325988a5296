"""Configs checked: keys that are unknown or missing, types, ranges, names that do not exist. One line for the first fault.

A command's own keys come first. Then the classes that the config names are imported, and their keys are looked at.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from toolkit.config import classes
from toolkit.config.commands import ConfigSection, Grid, OfMethod, command_of, group_of, keys_of, section_in
from toolkit.config.files import choices, flatten, plain
from toolkit.config.notes import REQUIRED, Choice, Keys, notes
from toolkit.config.store import HYDRAS, composed
from toolkit.config.values import (
    LISTS,
    LONG,
    MAPPINGS,
    expected,
    fits,
    is_known,
    is_node,
    options,
    origin_of,
    say,
    shown,
)
from toolkit.errors import InputError, unknown_name
from toolkit.files.text import first_line

MISSING = "???"
TOY = Path(__file__).parent.parent / "assets" / "toy"


def check(config: Any, config_name: str, *, complete: bool = True, values: bool = True) -> None:
    """Raises InputError with one line for the first key that is unknown, missing, or of a wrong type or range.

    config       composed from conf/<config_name>.yaml; of a root config of the user's own, only classes are checked
    complete     False: keys without a value (???) may still get one
    values       False: only keys are looked at
    """
    content, section, walk = resolved(config, config_name), command_of(config_name), _Walk(complete, values)
    if section is None:
        walk.value("", content, Any)
    else:
        walk.keys("", content, keys_of(section), getattr(section, "appended", ()), whole=True)
    nodes, walk.waiting = walk.waiting, None
    for path, node in nodes or ():
        walk.node(path, node)
    sampling = content.get("sampling")
    if (
        isinstance(sampling, Mapping)
        and sampling.get("grammar") is not None
        and not getattr(section, "reads_grammars", True)
    ):
        raise InputError("sampling.grammar: expected null; decode, responses, traces and sweep know grammars")
    method = content.get("method")
    if values and section is not None and is_node(method) and MISSING not in flatten(method).values():
        classes.instantiate(method)  # what its parts ask of each other
        if "pair" in content:
            check_head(method, content["pair"])


def resolved(config: Any, config_name: str) -> dict[str, Any]:
    """Plain containers with interpolations resolved; ??? where a value is missing."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return dict(OmegaConf.to_container(config, resolve=True, throw_on_missing=False))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or config_name
        raise InputError(f"{key}: {first_line(error)}") from error


def check_head(method: Mapping[str, Any], pair: Any) -> None:
    """Raises InputError if the policy of a method needs an acceptance head, and neither it nor the pair has one.

    Estimators with the key `statistics` do without.
    """
    policy = method.get("policy")
    estimator = policy.get("estimator") if isinstance(policy, Mapping) else None
    if not isinstance(estimator, Mapping) or not is_node(pair):
        return
    if estimator.get("head", "it needs none") is not None or "statistics" in estimator:
        return
    is_toy = all(pair.get(side) in (f"toy/{side}", str(TOY / side)) for side in ("target", "draft"))
    if pair["_target_"] == "toolkit.models.pair.ModelPair.from_pretrained" and not is_toy:
        raise InputError(
            f"method {method.get('name')} needs an acceptance head, and this pair ships none: expected head=FOLDER (of "
            "toolkit.train), got none"
        )


def keys_below(value: Any, annotation: Any = Any) -> Keys | None:
    """The declared keys of a mapping: of the class that it names, or of the section that its annotation asks for."""
    if is_node(value):
        return classes.keys_of(str(value["_target_"]))
    section = section_in(annotation)
    return None if section is None else keys_of(section)


class _Walk:
    """Goes through a plain config; raises InputError at the first fault."""

    def __init__(self, complete: bool, values: bool):
        self.complete, self.values = complete, values
        self.waiting: (
            list[tuple[str, Mapping[str, Any]]] | None
        ) = []  # classes, while the command's own keys are checked

    def keys(
        self,
        prefix: str,
        values: Mapping[str, Any],
        declared: Keys,
        also: Iterable[str] = (),
        partial: bool = False,
        whole: bool = False,
    ) -> None:
        """Every key is declared, every one that is needed has a value (unless `partial`), every value fits.

        whole  keys with a default are needed, too: it was composed, so that one that is not there was deleted
        """
        for name in values:
            if name not in declared.keys and not declared.takes_any:
                raise unknown_name("key", f"{prefix}{name}", [f"{prefix}{key}" for key in (*declared.keys, *also)])
        for name, key in declared.keys.items():
            if name in values:
                value = values[name]
                entries = value if isinstance(value, list) else [value]
                blank = any(isinstance(entry, str) and not entry.strip() for entry in entries)
                if declared.no_blanks and self.values and blank:
                    kind = say(key.annotation, LONG)
                    raise InputError(f"{prefix}{name}: expected {kind}, not empty, got {shown(value)}")
                self.value(prefix + name, value, key.annotation, key.meaning)
            elif (whole or key.default is REQUIRED) and not partial:
                _missing(prefix + name, key.annotation, key.meaning)

    def value(self, path: str, value: Any, annotation: Any, meaning: str = "", whole: bool = True) -> None:
        """One value, and what is below it."""
        if value == MISSING:
            return _missing(path, annotation, meaning) if self.complete else None
        kinds, section = options(annotation), section_in(annotation)
        if is_node(value) and not all(map(is_known, kinds)):
            return self.node(path, value) if self.waiting is None else self.waiting.append((path, value))
        if isinstance(value, Mapping):
            inner = next((kind for kind in kinds if kind is Any or origin_of(kind) in MAPPINGS), None)
            if section is not None and issubclass(section, Grid):
                return self.grid(value, section.references) if self.values else None
            if section is not None:
                return self.keys(f"{path}.", value, keys_of(section), whole=whole)
            if inner is not None and not _needs_choice(annotation):
                kind = (typing.get_args(inner) or (Any, Any))[1]
                for name, entry in value.items():
                    self.value(f"{path}.{name}".lstrip("."), entry, kind, whole=False)
                return None
        return self.fit(path, value, annotation, section) if self.values else None

    def node(self, path: str, node: Mapping[str, Any]) -> None:
        target = str(node["_target_"])
        declared = classes.keys_of(target)
        if declared is None:
            raise classes.no_such(f"{path}._target_", target)
        values = {name: value for name, value in node.items() if name not in HYDRAS}
        self.keys(f"{path}.", values, declared, partial=bool(node.get("_partial_") or "_args_" in node))

    def grid(self, grid: Mapping[str, Any], references: Sequence[str]) -> None:
        """Methods of conf/method/, their keys, and lists of values for these."""
        names, settings = [*choices("method"), *references], dict[str, Mapping[str, Any]]()
        for name, content in grid.items():
            if name not in names:
                raise unknown_name("method", str(name), names)
            if name not in references and isinstance(content, Mapping):
                settings[name] = flatten(content)
                if settings[name].get("impossible", "skip") != "skip":
                    raise InputError(f"grid.{name}.impossible: expected skip, got {content['impossible']!r}")
                _nodes(name, settings[name])  # before any class is imported
        for name, flat in settings.items():
            for path, annotation in parameters(name, flat).items():
                for value in flat[path] if isinstance(flat[path], list) else [flat[path]]:
                    self.value(f"grid.{name}.{path}", value, annotation)

    def fit(self, path: str, value: Any, annotation: Any, section: type[ConfigSection] | None) -> None:
        if section is not None or _needs_choice(annotation):
            group = group_of(annotation)
            null = any(fits(None, kind) for kind in options(annotation) if kind is not Any)
            if value is None and (null or (group is not None and group.nullable)):
                return
            choice = f"a choice of conf/{group.name}/" if group is not None and group.name else "keys with values"
            raise InputError(f"{path}: expected {choice}, got {shown(value)}")
        if not fits(value, annotation):
            inner = [part for kind in options(annotation) if origin_of(kind) in LISTS for part in typing.get_args(kind)]
            beside = [note for part in (annotation, *inner) for note in notes(part) if isinstance(note, Choice)]
            for name in value if isinstance(value, list) else [value]:
                if beside and isinstance(name, str) and name not in beside[0]:
                    raise unknown_name(beside[0].kind, name, beside[0].names())
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            quote = f" (a text of digits is written {path}='\"...\"')" if is_number and fits("", annotation) else ""
            raise InputError(f"{path}: expected {expected(value, annotation)}, got {shown(value)}{quote}")


def _missing(path: str, annotation: Any, meaning: str) -> NoReturn:
    note = meaning and f" ({meaning})"
    raise InputError(f"missing key {path}: expected {path}=VALUE, {say(annotation)}{note}")


def _needs_choice(annotation: Any) -> bool:
    """Whether only a class with its arguments will do."""
    group = group_of(annotation)
    return group is not None and group.built


# -- keys of methods, in grids ------------------------------------------------------------------------------------------


def parameters(name: str, paths: Iterable[str]) -> dict[str, Any]:
    """The declared types of a method's keys that a grid names, by dotted path. Raises InputError for one it does not have."""
    annotations: dict[str, Any] = {"head": keys_of(OfMethod).keys["head"].annotation} if "head" in paths else {}
    for path, node in _nodes(name, paths).items():
        declared, key = classes.keys_of(str(node["_target_"])), path.rpartition(".")[2]
        if declared is None or key not in declared.keys:
            raise _no_parameter(name, path, declared.keys if declared else node)
        annotations[path] = declared.keys[key].annotation
    return annotations


def _nodes(name: str, paths: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """The classes of a method that these keys belong to. Raises InputError where there is none, or a key is misspelt."""
    own = [path for path in paths if path not in ("head", "impossible")]
    method = plain(composed("method_only", [f"method={name}"]))["method"] if own else {}
    nodes = {}
    for path in own:
        *parents, key = path.split(".")
        node: Any = method
        for parent in parents:
            node = node.get(parent) if isinstance(node, Mapping) else None
        if not is_node(node) or classes.is_misspelt(key, node):
            raise _no_parameter(name, path, node if is_node(node) else method)
        nodes[path] = node
    return nodes


def _no_parameter(method: str, path: str, names: Iterable[str]) -> InputError:
    before = path[: -len(path.rpartition(".")[2])] if not path.endswith(".") else path
    return unknown_name(f"parameter of {method}", path, [f"{before}{name}" for name in names if name[0] != "_"])

"""Configs composed and checked: keys that are unknown or missing, types, ranges, names that do not exist. One line each.

A command's own keys come first. Then the classes that the config names are imported, and their keys are looked at.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from toolkit.config import classes, methods
from toolkit.config.commands import ConfigSection, Grid, command_of, group_of, keys_of
from toolkit.config.files import choices, flatten, plain
from toolkit.config.notes import REQUIRED, Choice, Keys, notes
from toolkit.config.store import GONE, STRUCT, compose_unchecked
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
HYDRAS = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")

Nodes = list[tuple[str, Mapping[str, Any]]]  # paths, and the mappings there that name a class

LOST = re.compile(r"(?:In '(?P<by>[^']*)': )?Could not find '(?P<path>[^']*)'")
THERE = re.compile(r"Could not append to config\. An item is already at '([^']*)'")


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
    method = content.get("method")
    if values and section is not None and is_node(method) and MISSING not in flatten(method).values():
        classes.instantiate(method)  # what its parts ask of each other
        if "pair" in content:
            methods.check_head(content)


def resolved(config: Any, config_name: str) -> dict[str, Any]:
    """Plain containers with interpolations resolved; ??? where a value is missing."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return dict(OmegaConf.to_container(config, resolve=True, throw_on_missing=False))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or config_name
        raise InputError(f"{key}: {first_line(error)}") from error


def section_in(annotation: Any) -> type[ConfigSection] | None:
    """The declared section that an annotation asks for, if it does."""
    kinds = (kind for kind in options(annotation) if isinstance(kind, type) and issubclass(kind, ConfigSection))
    return next(kinds, None)


def keys_below(value: Any, annotation: Any = Any) -> Keys | None:
    """The declared keys of a mapping: of the class that it names, or of the section that its annotation asks for."""
    if is_node(value):
        return classes.keys_of(str(value["_target_"]))
    section = section_in(annotation)
    return None if section is None else keys_of(section)


class _Walk:
    """Goes through a plain config; raises InputError at the first fault."""

    def __init__(self, complete: bool, values: bool):
        self.complete, self.judged = complete, values
        self.waiting: Nodes | None = []  # while the command's own keys are looked at

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
                texts = value if isinstance(value, list) else [value]
                blank = any(isinstance(text, str) and not text.strip() for text in texts)
                if declared.no_blanks and self.judged and blank:
                    kind = say(key.annotation, LONG)
                    raise InputError(f"{prefix}{name}: expected {kind}, not empty, got {shown(value)}")
                self.value(prefix + name, value, key.annotation, key.meaning)
            elif (whole or key.default is REQUIRED) and not partial:
                _missing(prefix + name, key.annotation, key.meaning)

    def value(self, path: str, value: Any, annotation: Any, meaning: str = "", whole: bool = True) -> None:
        """One value, and what is below it."""
        if value == MISSING:
            return _missing(path, annotation, meaning) if self.complete else None
        if is_node(value) and not all(map(is_known, options(annotation))):
            return self.node(path, value) if self.waiting is None else self.waiting.append((path, value))
        section = section_in(annotation)
        if isinstance(value, Mapping) and section is Grid:
            return methods.check_grid(value, self.value) if self.judged else None
        if isinstance(value, Mapping) and section is not None:
            return self.keys(f"{path}.", value, keys_of(section), whole=whole)
        inner = next((kind for kind in options(annotation) if kind is Any or origin_of(kind) in MAPPINGS), None)
        if isinstance(value, Mapping) and inner is not None and not _needs_choice(annotation):
            for name, entry in value.items():
                self.value(f"{path}.{name}".lstrip("."), entry, (typing.get_args(inner) or (Any, Any))[1], whole=False)
            return None
        return self._judge(path, value, annotation, section) if self.judged else None

    def node(self, path: str, node: Mapping[str, Any]) -> None:
        target = str(node["_target_"])
        declared = classes.keys_of(target)
        if declared is None:
            raise classes.no_such(f"{path}._target_", target)
        values = {name: value for name, value in node.items() if name not in HYDRAS}
        self.keys(f"{path}.", values, declared, partial=bool(node.get("_partial_") or "_args_" in node))

    def _judge(self, path: str, value: Any, annotation: Any, section: type[ConfigSection] | None) -> None:
        if section is not None or _needs_choice(annotation):
            group = group_of(annotation)
            null = any(fits(None, kind) for kind in options(annotation) if kind is not Any)
            if value is None and (null or (group is not None and group.nullable)):
                return
            choice = f"a choice of conf/{group.name}/" if group is not None else "keys with values"
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


# -- what Hydra says of a config that does not compose -------------------------------------------------------------


def composed(config_name: str, overrides: Sequence[str] = ()) -> Any:
    """conf/<config_name>.yaml with these overrides. Raises InputError, one line, if it does not compose."""
    from hydra.errors import HydraException

    try:
        return compose_unchecked(config_name, overrides)
    except (HydraException, ValueError) as error:
        raise error if isinstance(error, InputError) else complaint(error, config_name, overrides) from error
    except (TypeError, AttributeError, KeyError, AssertionError, RecursionError) as error:  # a choice that is no name
        odd = [word for word in overrides if choices(word.lstrip("+~").partition("=")[0].partition("@")[0])]
        raise InputError(
            f"configuration {config_name}: expected names as choices of config groups, got {' '.join(odd) or first_line(error)}"
        ) from error


def complaint(error: Exception, config_name: str, overrides: Sequence[str]) -> InputError:
    """The line for an error that composing conf/<config_name>.yaml with these overrides raised."""
    from hydra.errors import OverrideParseException

    text = str(error)
    if match := LOST.search(text):
        group, _, name = match["path"].rpartition("/")
        by = "" if match["by"] in (None, config_name) else f"(named in {match['by']}.yaml)"
        return unknown_name(group or "config", name, choices(group), by)
    if text.startswith("Cannot find primary config"):
        return unknown_name("config", config_name, choices("."))
    if match := THERE.search(text):
        return InputError(f"{match[1]} is in the config already: expected {match[1]}=VALUE, without the +")
    if match := STRUCT.search(text) or GONE.search(text):
        return _no_such_key(match[1], config_name, overrides)
    if isinstance(error, OverrideParseException):
        key, sign, _ = error.override.partition("=")
        hint = f" (brackets and quotes come in pairs; text with one is written '{key}=\"TEXT\"')" if sign else ""
        return InputError(f"expected KEY=VALUE, got {error.override!r}{hint}")
    if text.startswith("Ambiguous value"):
        word = text.partition("'")[2].partition("'")[0]
        key, _, value = word.partition("=")
        return InputError(f"{word}: expected one value; a list is written {key}=[{value}], and -m sweeps over values")
    if text.startswith("Config group override must be"):
        nulls = [word for word in overrides if word.endswith("=null") and choices(word.partition("=")[0].lstrip("+"))]
        return InputError(f"expected a choice of a config group, got {', '.join(nulls) or 'null'}")
    return InputError(f"configuration {config_name}: {' '.join(text.split())}")


def _no_such_key(key: str, config_name: str, overrides: Sequence[str]) -> InputError:
    """The key is not in the config: it could be added, or there is none of that name."""
    others = [word for word in overrides if word.lstrip("+~").partition("=")[0].partition("@")[0] != key]
    try:
        before: Any = plain(composed(config_name, others)) if len(others) < len(overrides) else {}
    except (InputError, ValueError):
        before = {}
    parent, _, name = key.rpartition(".")
    names = _names_below(before, config_name, parent, name)
    if any(word.startswith(f"{key}={{") for word in overrides) and choices(key):
        return InputError(f"{key} is chosen by name: for a mapping of your own expected ~{key} '+{key}={{...}}'")
    if name in names or (not parent and choices(key)):
        return InputError(f"{key} is not in the config yet: expected +{key}=VALUE, with a +")
    return unknown_name("key", key, [f"{parent}.{other}".lstrip(".") for other in names])


def _names_below(config: Mapping[str, Any], config_name: str, path: str, name: str) -> list[str]:
    """The names that may stand below a path ("" is the top) of a plain config, whether they do or not.

    Of a class it takes its import to know all; where `name` is a misspelt key of the yaml, the keys of the yaml will do.
    """
    section, below = command_of(config_name), config
    declared, appended = Keys() if section is None else keys_of(section), getattr(section, "appended", ())
    for part in filter(None, path.split(".")):
        section = section_in(declared.keys[part].annotation) if part in declared.keys else None
        declared, appended = Keys() if section is None else keys_of(section), ()
        value = below.get(part)
        below = value if isinstance(value, Mapping) else {}
    if is_node(below) and not classes.is_misspelt(name, below):
        declared = classes.keys_of(str(below["_target_"])) or Keys()
    return sorted({*below, *declared.keys, *appended} - {*HYDRAS})

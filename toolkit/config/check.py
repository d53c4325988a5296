"""A composed config against the schema: unknown and missing keys, types, ranges, names that do not exist. One line each."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn

from toolkit.config import methods, sources
from toolkit.config.commands import ConfigSection, Grid, command_of, group_of, keys_of
from toolkit.config.notes import REQUIRED, Choice, Key, Keys, meaning_of, notes
from toolkit.config.others import OTHERS
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

MOVED = {"toolkit.padding": "toolkit.testing.padding"}  # modules that a yaml of an earlier revision may name
MISSING = "???"
HYDRAS = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")


def check(config: Any, config_name: str, *, complete: bool = True, values: bool = True) -> None:
    """Raises InputError with one line for the first key that is unknown, missing, or of a wrong type or range.

    config       composed from conf/<config_name>.yaml; of a root config of the user's own, only classes are checked
    complete     False: keys without a value (???) may still get one
    values       False: only keys are looked at
    """
    plain = resolved(config, config_name)
    section = command_of(config_name)
    walk = _Walk(complete, values)
    if section is None:
        walk.value("", plain, Any)
        return
    walk.keys("", plain, keys_of(section), getattr(section, "appended", ()), whole=True)
    if values:
        methods.check_head(plain)


def resolved(config: Any, config_name: str) -> dict[str, Any]:
    """Plain containers with interpolations resolved; ??? where a value is missing."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return dict(OmegaConf.to_container(config, resolve=True, throw_on_missing=False))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or config_name
        raise InputError(f"{key}: {first_line(error)}") from error


@cache
def keys_of_class(target: str) -> Keys | None:
    """The keys of what a `_target_` names; None if it does not exist. Imported only if no source file says it."""
    from hydra._internal.utils import _locate

    keys = sources.keys_of(target)
    if keys is None:  # compiled, or made when its module is imported
        try:
            located = None if sources.says_all(target.rpartition(".")[0]) else _locate(target)
        except (ImportError, ValueError):
            located = None
        return None if located is None else Keys(takes_any=True)
    merged = dict(keys.keys)
    for name, annotation in OTHERS.get(target, {}).items():
        old = merged.get(name, Key(name, default=None))
        merged[name] = replace(old, annotation=annotation, meaning=meaning_of(annotation) or old.meaning)
    return Keys(merged, keys.takes_any)


def keys_at(config: Mapping[str, Any], config_name: str, path: str) -> Iterable[str]:
    """The names that may stand below a path ("" is the top) of a plain config, whether they do or not."""
    section = command_of(config_name)
    keys = set(keys_of(section).keys) | set(getattr(section, "appended", ())) if section else set(config)
    below: Any = config
    annotation: Any = Any
    for part in filter(None, path.split(".")):
        annotation = keys_of(section).keys[part].annotation if section and part in keys_of(section).keys else Any
        section = section_in(annotation)
        below = below.get(part) if isinstance(below, Mapping) else None
        keys = set(below) if isinstance(below, Mapping) else set()
        if is_node(below):
            keys |= set((keys_of_class(below["_target_"]) or Keys()).keys)
        if section is not None:
            keys |= set(keys_of(section).keys)
    return sorted(keys - set(HYDRAS))


def section_in(annotation: Any) -> type[ConfigSection] | None:
    """The declared section that an annotation asks for, if it does."""
    return next(
        (kind for kind in options(annotation) if isinstance(kind, type) and issubclass(kind, ConfigSection)), None
    )


class _Walk:
    """Goes through a plain config; raises InputError at the first fault."""

    def __init__(self, complete: bool, values: bool):
        self.complete, self.judged = complete, values

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
                if declared.no_blanks and self.judged and _holds_blank(value):
                    raise InputError(
                        f"{prefix}{name}: expected {say(key.annotation, LONG)}, not empty, got {shown(value)}"
                    )
                self.value(prefix + name, value, key.annotation, key.meaning)
            elif (whole or key.default is REQUIRED) and not partial:
                _missing(prefix + name, key.annotation, key.meaning)

    def value(self, path: str, value: Any, annotation: Any, meaning: str = "", whole: bool = True) -> None:
        """One value, and what is below it."""
        if value == MISSING:
            return _missing(path, annotation, meaning) if self.complete else None
        if is_node(value) and not all(map(is_known, options(annotation))):
            return self.node(path, value)
        section = section_in(annotation)
        if isinstance(value, Mapping) and section is Grid:
            return methods.check_grid(value, self.value, keys_of_class) if self.judged else None
        if isinstance(value, Mapping) and section is not None:
            return self.keys(f"{path}.", value, keys_of(section), whole=whole)
        inner = next((kind for kind in options(annotation) if kind is Any or origin_of(kind) in MAPPINGS), None)
        if isinstance(value, Mapping) and inner is not None and not _needs_choice(annotation):
            for name, entry in value.items():
                self.value(f"{path}.{name}".lstrip("."), entry, (typing.get_args(inner) or (Any, Any))[1], whole=False)
            return None
        return self._judge(path, value, annotation, section) if self.judged else None

    def node(self, path: str, node: Mapping[str, Any]) -> None:
        """A class or function with its arguments."""
        target = str(node["_target_"])
        declared = keys_of_class(target)
        if declared is None:
            module, _, name = target.rpartition(".")
            if sources.module_file(module) is not None:
                raise unknown_name(f"{path}._target_", name, sources.names_in(module), f"in {module}")
            if module in MOVED:
                raise InputError(f"{path}._target_: {target} is {MOVED[module]}.{name} now")
            reason = sources.hidden(module) or f"no module {module}"
            raise InputError(
                f"{path}._target_: expected a class or function that can be imported, got {target}: {reason}"
            )
        values = {name: value for name, value in node.items() if name not in HYDRAS}
        self.keys(f"{path}.", values, declared, partial=bool(node.get("_partial_") or "_args_" in node))
        if self.judged and target == methods.METHOD:
            methods.check_method(node)

    def _judge(self, path: str, value: Any, annotation: Any, section: type[ConfigSection] | None) -> None:
        """A leaf: its type and range."""
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


def _holds_blank(value: Any) -> bool:
    """Whether a value is an empty text, or a list with one in it."""
    if isinstance(value, list):
        return any(map(_holds_blank, value))
    return isinstance(value, str) and not value.strip()


def _missing(path: str, annotation: Any, meaning: str) -> NoReturn:
    raise InputError(
        f"missing key {path}: expected {path}=VALUE, {say(annotation)}{f' ({meaning})' if meaning else ''}"
    )


def _needs_choice(annotation: Any) -> bool:
    """Whether only a class with its arguments will do."""
    group = group_of(annotation)
    return group is not None and group.built

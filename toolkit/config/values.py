"""Whether a plain value (of a yaml or the command line) is what a type annotation asks for, and how to say what is."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, Union

from toolkit.config.ranges import Interval
from toolkit.lines import lines_of

LONG = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null", Path: "a path"}
MANY = {**LONG, int: "integers", float: "numbers", str: "texts"}
SHORT = {int: "integer", float: "number", str: "text", bool: "true/false", type(None): "null", Path: "path"}
LISTS = (list, tuple, set, Sequence, Collection)
MAPPINGS = (dict, Mapping)
UNIONS = (Union, types.UnionType)


class Choice:
    """A note beside `str`: the name of a file in a config group, the user's own included; `kind`: how messages call it."""

    def __init__(self, group: str, kind: str):
        self.group, self.kind = group, kind

    def __contains__(self, value: object) -> bool:
        return value in self.names()

    def names(self) -> list[str]:
        """The names there are."""
        from toolkit.config.files import choices

        return choices(self.group)


class Like:
    """A note beside `str`: the pattern of the whole text; `what`: how messages call it."""

    def __init__(self, pattern: str, what: str):
        self.pattern, self.what = pattern, what

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None


def fits(value: Any, annotation: Any) -> bool:
    """Whether the value is of this type and within its ranges. Types that no config can hold take anything."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        notes = [note for note in annotation.__metadata__ if isinstance(note, Interval | Choice | Like)]
        return fits(value, arguments[0]) and all(value in note for note in notes)
    if origin in UNIONS:
        return any(fits(value, option) for option in arguments)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in arguments)
    if origin in LISTS or annotation in LISTS:
        inner = arguments[0] if arguments else Any
        return isinstance(value, list | tuple) and all(fits(one, inner) for one in value)
    if origin in MAPPINGS or annotation in MAPPINGS:
        inner = arguments[1] if arguments else Any
        return isinstance(value, Mapping) and all(fits(one, inner) for one in value.values())
    return _is_simple(value, annotation) if annotation in LONG else True


def expected(value: Any, annotation: Any) -> str:
    """What a message says was expected instead of the value: the range, if that is all that is wrong, or the type."""
    if value is not None and fits(value, _bare(annotation)):
        for note in notes(annotation):
            if isinstance(note, Interval):
                return str(note) + (" or null" if fits(None, annotation) else "")
    return say(annotation, LONG) + (" within 64 bits" if is_huge(value) else "")


def is_huge(value: Any) -> bool:
    """Whether a number is an integer that 64 bits do not hold."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def say(annotation: Any, names: Mapping[Any, str] = SHORT) -> str:
    """A type as people read it: "integer >= 1 or null", "list of numbers", "live or traces"; LONG: in a sentence."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        ranges = [note for note in annotation.__metadata__ if isinstance(note, Interval)]
        groups = [f"(a name in conf/{note.group}/)" for note in annotation.__metadata__ if isinstance(note, Choice)]
        bounds = [note.brackets if names is SHORT else note.clause for note in ranges]
        likes = [note.what for note in annotation.__metadata__ if isinstance(note, Like)]
        return " ".join([*(likes or [say(arguments[0], names)]), *bounds, *groups])
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(say(option, names) for option in arguments if option is not Path))
    if origin is Literal:
        choices = list(map(str, arguments))
        return f"one of {', '.join(choices)}" if names is not SHORT and len(choices) > 1 else " or ".join(choices)
    if origin in LISTS or annotation in LISTS:
        return f"a list of {say(arguments[0], MANY)}" if arguments else "a list"
    if origin in MAPPINGS or annotation in MAPPINGS:
        return f"{{NAME: {say(arguments[1], names)}}}" if arguments else "{NAME: VALUE}"
    return names.get(annotation, "anything")


def shown(value: Any) -> str:
    """A value as a message quotes it: as yaml would, on one line, cut if it is long."""
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else None
    try:
        text = " ".join(lines_of(repr(value))) if text is None else text
    except ValueError:  # more than 4,300 digits
        text = "a huge number"
    return text if len(text) <= 80 else text[:77] + "..."


def options(annotation: Any) -> list[Any]:
    """The types that will do, without notes: of a union several."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return options(arguments[0])
    return [one for option in arguments for one in options(option)] if origin in UNIONS else [annotation]


def is_node(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a config value is a class or function with its arguments."""
    return isinstance(value, Mapping) and "_target_" in value


def is_known(annotation: Any) -> bool:
    """Whether a config could hold a value of this type: not for classes, functions and the like."""
    return say(annotation) != "anything"


def _is_simple(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind in (int, float) and is_huge(value):
        return False
    if kind is Path:
        return isinstance(value, str)
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def notes(annotation: Any) -> list[Any]:
    """The notes of an annotation and of the options of a union; of nested ones, the outer one's come last."""
    if typing.get_origin(annotation) is Annotated:
        return list(annotation.__metadata__)
    union = typing.get_origin(annotation) in UNIONS
    return [note for option in typing.get_args(annotation) for note in notes(option)] if union else []


def annotations_of(kind: type) -> dict[str, Any]:
    """The annotations of a class of keys, its own first, with their notes."""
    hints = typing.get_type_hints(kind, include_extras=True)
    order = [name for one in kind.__mro__ for name in vars(one).get("__annotations__", {})]
    return {name: hints[name] for name in dict.fromkeys(order) if typing.get_origin(hints[name]) is not ClassVar}


def _bare(annotation: Any) -> Any:
    """The annotation without notes, at the top and in a union."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _bare(arguments[0])
    return Union[tuple(map(_bare, arguments))] if origin in UNIONS else annotation  # noqa: UP007

"""Values against their annotations, those of a config and those of Python calls: types, ranges, and how a message says them.

    @checked                 every argument of a call, by the function's annotations
    check_ranges(part)       the attributes of what a constructor has just set, by the annotations of its arguments or fields
    fits(value, annotation)  a plain value of a yaml or the command line

The first two raise InputError. Of entries that are lists themselves (token ids of prompts) they look only at the kind, so
that a call costs microseconds. Nothing here imports torch.
"""

from __future__ import annotations

import inspect
import numbers
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeGuard, TypeVar, Union

from toolkit.config.notes import UNIONS, Called, Choice, Interval, Like, notes
from toolkit.errors import InputError, unknown_name
from toolkit.files.text import lines_of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
LONG = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null", Path: "a path"}
MANY = {**LONG, int: "integers", float: "numbers", str: "texts"}
SHORT = {int: "integer", float: "number", str: "text", bool: "true/false", type(None): "null", Path: "path"}
LISTS = (list, tuple, set, Sequence, Collection)
MAPPINGS = (dict, Mapping)
NUMBERS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}
SIMPLE = (str, numbers.Number, list, tuple, dict, type(None), Path)  # what a message quotes; of others it says the type
FULLY = 9  # levels of entries


def fits(value: Any, annotation: Any, levels: int = FULLY) -> bool:
    """Whether a value is of this type and within its ranges, with the entries of its lists and mappings down to `levels`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or annotation is object:
        return True
    if origin is Annotated:
        numeric = isinstance(value, numbers.Real)
        return fits(value, arguments[0], levels) and all(
            value in note
            for note in annotation.__metadata__
            if isinstance(note, Choice | Like) or (isinstance(note, Interval) and numeric)
        )
    if origin in UNIONS:
        return any(fits(value, option, levels) for option in arguments)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in arguments)
    kind = origin or annotation
    if kind in LISTS:
        inner = arguments[0] if arguments else Any
        any_entry = levels < 1 or inner is Any
        return _is_list(value) and (any_entry or all(fits(entry, inner, levels - 1) for entry in value))
    if kind in MAPPINGS:
        inner = arguments[1] if arguments else Any
        return isinstance(value, Mapping) and (levels < 1 or all(fits(v, inner, levels - 1) for v in value.values()))
    return _is_of(value, kind)


def _is_list(value: Any) -> bool:
    """Whether a value has entries in an order: lists, tuples, ranges, arrays; no text, no mapping, no set."""
    if isinstance(value, str | bytes | Mapping | type) or not hasattr(value, "__getitem__"):
        return False
    return getattr(value, "shape", None) != () and hasattr(value, "__len__")  # no number as an array


def _is_of(value: Any, kind: Any) -> bool:
    if kind is None or kind is type(None):
        return value is None
    if kind in NUMBERS:
        return isinstance(value, NUMBERS[kind]) and not isinstance(value, bool) and not is_huge(value)
    if kind is Path:
        return isinstance(value, str | Path)
    if kind is Callable:
        return callable(value)
    if not isinstance(kind, type):
        return True
    if getattr(kind, "_is_protocol", False):
        return not isinstance(value, type) and all(hasattr(value, name) for name in _members(kind))
    return isinstance(value, kind)


@cache
def _members(protocol: Any) -> list[str]:
    """What a protocol asks for; attributes that are only annotated may come later."""
    names = {name for kind in protocol.__mro__ if getattr(kind, "_is_protocol", False) for name in vars(kind)}
    return sorted(name for name in names if not name.startswith("_"))


def is_huge(value: Any) -> bool:
    """Whether a number is an integer that 64 bits do not hold."""
    return isinstance(value, int) and not -(2**63) <= value < 2**63


def is_node(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and "_target_" in value


def is_known(annotation: Any) -> bool:
    """Whether a config could hold a value of this type: not for classes, functions and the like."""
    return say(annotation) != "anything"


def options(annotation: Any) -> list[Any]:
    """The types that will do, without notes: of a union several."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return options(arguments[0])
    return [kind for option in arguments for kind in options(option)] if origin in UNIONS else [annotation]


def origin_of(annotation: Any) -> Any:
    """The class of a generic type, or the type itself."""
    return typing.get_origin(annotation) or annotation


# -- what messages say ------------------------------------------------------------------------------------------------


def expected(value: Any, annotation: Any) -> str:
    """What a message says was expected instead of the value: the range, if that is all that is wrong, or the type."""
    if value is not None and fits(value, _bare(annotation)):
        for note in notes(annotation):
            if isinstance(note, Interval):
                return str(note) + (" or null" if fits(None, annotation) else "")
    return say(annotation, LONG) + (" within 64 bits" if is_huge(value) else "")


def say(annotation: Any, names: Mapping[Any, str] = SHORT) -> str:
    """A type as people read it: "integer >= 1 or null", "list of numbers", "live or traces"; LONG: in a sentence."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        words = []
        for note in annotation.__metadata__:
            if isinstance(note, Interval):
                words.append(note.brackets if names is SHORT else note.clause)
            elif isinstance(note, Choice):
                words.append(f"(a name in conf/{note.group}/)")
        like = next((note.what for note in annotation.__metadata__ if isinstance(note, Like)), None)
        return " ".join([like or say(arguments[0], names), *words])
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
    try:
        text = str(value).lower() if isinstance(value, bool) else " ".join(lines_of(repr(value)))
    except ValueError:  # more than 4,300 digits
        text = "a huge number"
    text = "null" if value is None else text
    return text if len(text) <= 80 else text[:77] + "..."


def _bare(annotation: Any) -> Any:
    """The annotation without notes, at the top and in a union."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _bare(arguments[0])
    return Union[tuple(map(_bare, arguments))] if origin in UNIONS else annotation  # noqa: UP007


# -- Python calls -----------------------------------------------------------------------------------------------------


def checked(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function; a call raises InputError for the first argument that is not what its annotation asks for."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        for name in kwargs:
            if name not in signature.parameters:
                raise unknown_name("argument", name, signature.parameters)
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            names = ", ".join(name for name in signature.parameters if name not in ("self", "cls"))
            raise InputError(f"{function.__qualname__}: {error}; expected ({names})") from None
        for name, value in arguments.items():
            annotation = _hints(function).get(name, Any)
            if annotation is not Any:
                check_value(name, value, annotation)
        return function(*args, **kwargs)

    return call


def check_ranges(part: object, prefix: str = "") -> None:
    """Raises InputError if an attribute is not of the type, or not in the range, that its class annotates.

    Looked at are fields of a dataclass, or `__init__`'s arguments that the object keeps under their own names. The message puts
    `prefix` before the name.
    """
    kind: Any = type(part)
    always = _always(kind)
    for name, annotation in _attributes(kind).items():
        if hasattr(part, name) and type(value := getattr(part, name)) not in always[name]:
            check_value(prefix + name, value, annotation)


def check_value(name: str, value: Any, annotation: Any) -> None:
    """Raises InputError, one line, unless the value is what the annotation asks for."""
    if fits(value, annotation, levels=1):
        return
    hint = ""
    kinds = options(annotation)
    if isinstance(value, str) and any(origin_of(kind) in LISTS for kind in kinds):
        hint = f" (a list of one is written [{shown(value)}])"
    words = next((note.text for note in notes(annotation) if isinstance(note, Called)), None)
    if words is None and all(map(is_known, kinds)):
        words = expected(value, annotation)
    elif words is None:  # with the names of classes
        names = (say(kind, LONG) if is_known(kind) else f"a {getattr(kind, '__name__', kind)}" for kind in kinds)
        words = " or ".join(dict.fromkeys(names))
    quoted = " ".join(shown(value).split()) if isinstance(value, SIMPLE) else f"a {type(value).__name__}"
    raise InputError(f"{name}: expected {words}, got {quoted}{hint}")


@cache
def _hints(function: Any) -> dict[str, Any]:
    return typing.get_type_hints(function, include_extras=True)


@cache
def _always(kind: Any) -> dict[str, set[type]]:
    """Per attribute, the types of which every value fits. Their values are not checked: 200,000 prompts hold many."""
    always = {}
    for name, annotation in _attributes(kind).items():
        parts = typing.get_args(annotation) if typing.get_origin(annotation) in UNIONS else (annotation,)
        always[name] = {part for part in parts if part in (str, bool, type(None))}
    return always


@cache
def _attributes(kind: Any) -> dict[str, Any]:
    """The annotated names of what a class keeps."""
    hints = typing.get_type_hints(kind if is_dataclass(kind) else kind.__init__, include_extras=True)
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(hints)
    declared = {name: hints[name] for name in names if name != "return"}
    return {name: annotation for name, annotation in declared.items() if not isinstance(annotation, types.FunctionType)}

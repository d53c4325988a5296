"""Arguments of Python calls against their annotations: types and ranges, as on the command line. Nothing here imports torch.

    @checked                 every argument of a call, by the function's annotations
    check_ranges(made)       the attributes of what a constructor has just set, by the annotations of its arguments or fields

Both raise InputError, one line: the name, what was expected, what came. A list's entries are looked at; of entries that are
lists themselves (token ids of prompts) only the kind, so that a call costs microseconds.
"""

from __future__ import annotations

import inspect
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

from toolkit.config.ranges import Interval
from toolkit.config.values import (
    LISTS,
    LONG,
    MAPPINGS,
    UNIONS,
    Like,
    expected,
    is_huge,
    is_known,
    notes,
    options,
    say,
    shown,
)
from toolkit.errors import InputError, unknown_name

Given = ParamSpec("Given")
Result = TypeVar("Result")
SIMPLE = (str, numbers.Number, list, tuple, dict, type(None), Path)  # what a message quotes; of others it says the type
NUMBERS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}


@dataclass(frozen=True)
class Called:
    """A note beside a type: how messages call what is expected."""

    text: str


def checked(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function; a call raises InputError for the first argument that is not what its annotation asks for."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        for name in kwargs:
            if name not in signature.parameters:
                raise unknown_name("argument", name, signature.parameters)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise InputError(f"{function.__qualname__}: {error}; expected {signature_of(signature)}") from None
        for name, value in given.items():
            annotation = _hints(function).get(name, Any)
            if annotation is not Any:
                check_value(name, value, annotation)
        return function(*args, **kwargs)

    return call


def signature_of(signature: inspect.Signature) -> str:
    """The names of a call's arguments."""
    return f"({', '.join(name for name in signature.parameters if name not in ('self', 'cls'))})"


def check_ranges(made: object, prefix: str = "") -> None:
    """Raises InputError if an attribute is not of the type, or not in the range, that its class annotates.

    Looked at are fields of a dataclass, or `__init__`'s arguments that the object keeps under their own names.

    prefix  what the message puts before the name: "policy."
    """
    for name, annotation in _attributes(type(made)).items():  # type: ignore[arg-type]
        if hasattr(made, name):
            check_value(prefix + name, getattr(made, name), annotation)


def check_value(name: str, value: Any, annotation: Any) -> None:
    """Raises InputError, one line, unless the value is what the annotation asks for."""
    if suits(value, annotation):
        return
    mend = ""
    if isinstance(value, str) and any(_origin(one) in LISTS for one in options(annotation)):
        mend = f" (a list of one is written [{shown(value)}])"
    raise InputError(f"{name}: expected {_wanted(value, annotation)}, got {_quoted(value)}{mend}")


def suits(value: Any, annotation: Any, deep: bool = True) -> bool:
    """Whether a Python value is of this type and within its ranges; `deep`: entries of a list or mapping are, too."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or annotation is object:
        return True
    if origin is Annotated:
        inside = (value in note for note in annotation.__metadata__ if isinstance(note, Interval))
        likes = all(value in note for note in annotation.__metadata__ if isinstance(note, Like))
        return suits(value, arguments[0], deep) and likes and (not isinstance(value, numbers.Real) or all(inside))
    if origin in UNIONS:
        return any(suits(value, option, deep) for option in arguments)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in arguments)
    kind = origin or annotation
    if kind in LISTS:
        inner = arguments[0] if arguments else Any
        return _is_list(value) and (not deep or inner is Any or all(suits(one, inner, False) for one in value))
    if kind in MAPPINGS:
        inner = arguments[1] if arguments else Any
        return isinstance(value, Mapping) and (not deep or all(suits(one, inner, False) for one in value.values()))
    return _is_of(value, kind)


def _is_list(value: Any) -> bool:
    """Whether a value has entries in an order: lists, tuples, ranges, arrays; no text, no mapping, no set."""
    if isinstance(value, str | bytes | Mapping):
        return False
    try:
        return hasattr(value, "__getitem__") and not isinstance(value, type) and len(value) >= 0
    except TypeError:  # a number as an array
        return False


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


def _wanted(value: Any, annotation: Any) -> str:
    """What was expected, with the names of classes."""
    called = next((note.text for note in notes(annotation) if isinstance(note, Called)), None)
    if called is not None:
        return called
    if all(is_known(one) for one in options(annotation)):
        return expected(value, annotation)
    kinds = (say(one, LONG) if is_known(one) else f"a {getattr(one, '__name__', one)}" for one in options(annotation))
    return " or ".join(dict.fromkeys(kinds))


def _quoted(value: Any) -> str:
    return " ".join(shown(value).split()) if isinstance(value, SIMPLE) else f"a {type(value).__name__}"


def _origin(annotation: Any) -> Any:
    return typing.get_origin(annotation) or annotation


@cache
def _hints(function: Any) -> dict[str, Any]:
    return typing.get_type_hints(function, include_extras=True)


@cache
def _members(protocol: Any) -> list[str]:
    """What a protocol asks for; attributes that are only annotated may come later."""
    names = {name for kind in protocol.__mro__ if getattr(kind, "_is_protocol", False) for name in vars(kind)}
    return sorted(name for name in names if not name.startswith("_"))


@cache
def _attributes(kind: Any) -> dict[str, Any]:
    """The annotated names of what a class keeps."""
    hints = typing.get_type_hints(kind if is_dataclass(kind) else kind.__init__, include_extras=True)
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(hints)
    known = {name: hints[name] for name in names if name != "return"}
    return {name: annotation for name, annotation in known.items() if not isinstance(annotation, types.FunctionType)}

"""What a `_target_` names: its keys, read by importing it, and what it builds.

The keys of `_target_: package.module.Name` are the arguments of the constructor, or a dataclass's fields. What an annotation
names and no config can hold (a Tensor, a policy) counts as anything. A meaning is a text among the annotation's notes, or the
docstring's line "name  meaning" or "name: meaning".
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, Literal, Union

from toolkit.config.files import escaped, plain, with_texts
from toolkit.config.notes import REQUIRED, UNIONS, Key, Keys, meaning_of
from toolkit.config.others import OTHERS
from toolkit.errors import InputError, missing_package, unknown_name
from toolkit.files.text import first_line

OURS = ("toolkit", "analysis", "data_gen", "hydra_plugins")  # packages of this toolkit
NEAR = 0.8  # likeness of a misspelt key and the right one
INSTALLED = {"site-packages", "dist-packages"}
PLAIN = (int, float, str, bool, type(None))
TYPES = (*PLAIN, list, dict, tuple, set, Path, Sequence, Mapping, Collection)  # of values that a config can hold


def keys_of(target: str) -> Keys | None:
    """The keys of a class or function by its dotted name; None if there is none. Raises InputError where its module fails."""
    return None if _located(target) is None else _keys_of(target)


def no_such(key: str, target: str) -> InputError:
    """The error for a key that names a class or function which does not exist."""
    module, _, name = target.replace(":", ".").rpartition(".")
    reason = hidden(module)
    if reason is None and module in sys.modules:
        content = vars(sys.modules[module]).items()
        names = [name for name, value in content if isinstance(value, type | FunctionType) and name[0] != "_"]
        return unknown_name(key, name, names, f"in {module}")
    reason = reason or (f"no module {module}" if module else "it names no module")
    return InputError(f"{key}: expected a class or function that can be imported, got {target}: {reason}")


def is_misspelt(name: str, node: Mapping[str, Any]) -> bool:
    """Whether a name is nearly a key that a node of ours has in its yaml: then nothing need be imported to refuse it."""
    target = str(node["_target_"])
    names = [key for key in {*node, *OTHERS.get(target, ())} if key[0] != "_"]
    near = difflib.get_close_matches(name, names, 1, NEAR)
    return target.partition(".")[0] in OURS and name not in names and bool(near)


def _located(target: str) -> Any:
    """What a dotted name stands for, imported; None if there is none. Raises InputError where a module fails."""
    parts = target.replace(":", ".").split(".")
    for end in range(len(parts) - 1, 0, -1) if all(map(str.isidentifier, parts)) else ():
        module = ".".join(parts[:end])
        try:
            thing: Any = import_module(module)
        except SyntaxError as error:
            raise InputError(f"{error.filename}, line {error.lineno}: expected Python, got {error.msg}") from error
        except Exception as error:  # whatever the module does
            if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
                continue  # it is a class of the module above, or there is none
            if isinstance(error, ModuleNotFoundError) and (line := missing_package(error, module)):
                raise InputError(f"{target}: {line}") from error
            raise InputError(f"{target} could not be imported: {first_line(error)}") from error
        for part in parts[end:]:
            thing = getattr(thing, part, None)
        return thing
    return None


@cache
def _keys_of(target: str) -> Keys:
    thing = _located(target)
    thing = getattr(thing, "settings_class", thing)  # of a kind of draft
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):  # compiled
        return Keys(takes_any=True)
    if inspect.isclass(thing):
        owner: Any = next(kind for kind in thing.__mro__ if "__init__" in vars(kind))  # the nearest constructor counts
        is_dataclass = "__dataclass_fields__" in vars(owner)
        hints = _hints(owner if is_dataclass else owner.__init__)
        packages = {*OURS, thing.__module__.partition(".")[0]}  # torch's base classes, say, know nothing of these keys
        documented = [
            owner.__init__,
            *(kind for kind in thing.__mro__ if kind.__module__.partition(".")[0] in packages),
        ]
    else:
        hints, documented = _hints(inspect.unwrap(thing)), [thing, getattr(thing, "__self__", None)]
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_POSITIONAL]
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    names = [parameter.name for parameter in named]
    meanings: dict[str, str] = {}
    for part in documented:
        text = getattr(part, "__doc__", None) if part is not None else None
        if isinstance(text, str) and not text.startswith(f"{getattr(part, '__name__', '')}("):  # a dataclass's own
            meanings = {**meanings_in(inspect.cleandoc(text), names), **meanings}
    keys = {}
    for parameter in named:
        annotation = _held(hints.get(parameter.name, Any))
        default: Any = parameter.default if isinstance(parameter.default, (*PLAIN, list, tuple)) else None
        default = REQUIRED if parameter.default is parameter.empty else default
        meaning = meaning_of(annotation) or meanings.get(parameter.name, "")
        keys[parameter.name] = Key(parameter.name, annotation, meaning, default)
    for name, annotation in OTHERS.get(target, {}).items():
        old = keys.get(name, Key(name, default=None))
        keys[name] = replace(old, annotation=annotation, meaning=meaning_of(annotation) or old.meaning)
    return Keys(keys, takes_any=len(parameters) > len(named))


def _hints(owner: Any) -> dict[str, Any]:
    """The annotations of a function or a dataclass; Any for one that cannot be evaluated."""
    hints = {}
    for part in [*getattr(owner, "__mro__", (owner,))][::-1]:
        for name, annotation in inspect.get_annotations(part).items():
            try:
                hints[name] = (
                    eval(annotation, vars(sys.modules[part.__module__])) if isinstance(annotation, str) else annotation
                )
            except Exception:  # names that only a type checker imports
                hints[name] = Any
    return hints


def _held(annotation: Any) -> Any:
    """The annotation with Any for what no config can hold."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return Annotated[(_held(arguments[0]), *annotation.__metadata__)]  # type: ignore[return-value]
    if origin in UNIONS:
        return Union[tuple(map(_held, arguments))]  # noqa: UP007
    if origin in TYPES:
        return origin[tuple(Any if part is ... else _held(part) for part in arguments)]
    return annotation if origin is Literal or annotation in TYPES else Any


def instantiate(config: Any, **extra: Any) -> Any:
    """Build what a config describes; an InputError raised inside comes out as itself."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    texts = with_texts(lambda text: escaped(escaped(text)), plain(config))  # Hydra resolves "${" in a text twice
    texts = _with_dots(texts)
    try:
        return instantiate(texts, **extra)
    except InstantiationException as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, InputError):
                raise cause from None
            cause = cause.__cause__
        raise InputError(" ".join(str(error).split())) from error


def _with_dots(value: Any) -> Any:
    """A container whose `_target_` of the form package.module:NAME are dotted names, which Hydra imports."""
    if isinstance(value, list):
        return [_with_dots(part) for part in value]
    if not isinstance(value, dict):
        return value
    named = {key: _with_dots(part) for key, part in value.items()}
    return {**named, "_target_": named["_target_"].replace(":", ".")} if "_target_" in named else named


def hidden(module: str) -> str | None:
    """What hides a module of this toolkit: a package of the user's that has the name of ours. None if nothing does."""
    package = module.partition(".")[0]
    own = Path(__file__).resolve().parents[2] / package / "__init__.py"
    if package not in OURS or not own.is_file():
        return None
    finders: Any = (PathFinder, *sys.meta_path)  # packages that are installed as editable have their own
    spec = next((spec for finder in finders if (spec := finder.find_spec(package, None)) is not None), None)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() == own:
        return None
    return f"{Path(spec.origin)} hides this toolkit's {package}: rename it, or run the command in another folder"


def module_file(module: str) -> Path | None:
    """The source file of a module; its parents are imported."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    path = Path(spec.origin) if spec is not None and spec.origin else None
    return path if path is not None and path.suffix == ".py" else None


def users_files(target: str) -> list[Path]:
    """The source files that a dotted name of a user's own comes from, with all of the user's own that they import.

    This toolkit's modules, Python's own and installed packages are not a user's.
    """
    files: dict[str, Path] = {}
    waiting = [target.replace(":", ".")]
    while waiting:
        parts = waiting.pop().split(".")
        if parts[0] in OURS or parts[0] in sys.stdlib_module_names:
            continue
        for module in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            file = None if module in files else module_file(module)
            if file is None or INSTALLED.intersection(file.parts):
                continue
            files[module] = file
            waiting += _imports(file, module)
    return [files[module] for module in sorted(files)]


def _imports(file: Path, module: str) -> Iterator[str]:
    """The dotted names that a file imports, relative dots resolved."""
    package = module.split(".") if file.stem == "__init__" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            yield from (".".join(filter(None, [*above, node.module, alias.name])) for alias in node.names)


def meanings_in(docstring: str, names: Iterable[str]) -> dict[str, str]:
    """What a docstring says of names.

    It is read from lines "name  meaning" (or "a, b  meaning"), which go on in deeper lines. For the other names it is
    read from "name: meaning", up to a semicolon.
    """
    any_name = "|".join(map(re.escape, names)) or "(?!)"
    start = re.compile(rf"^(\s*)((?:{any_name})(?:, (?:{any_name}))*)(?:  +|: +)(\S.*)$")
    inside = re.compile(rf"(?<=[.;,] )({any_name}): ([^;]+)")
    meanings: dict[str, str] = {}
    also: dict[str, str] = {}
    open_names: list[str] = []
    indent = 0
    for line in textwrap.dedent(docstring).split("\n"):
        also |= {match[1]: match[2] for match in inside.finditer(line)}
        if match := start.match(line):
            open_names, indent = match[2].split(", "), len(match[1])
            meanings |= dict.fromkeys(open_names, match[3])
        elif line.strip() and len(line) - len(line.lstrip()) > indent:
            meanings |= {name: f"{meanings[name]} {line.strip()}" for name in open_names}
        else:
            open_names = []
    cut = re.compile(rf"; (?:{any_name}): .*")
    return {name: cut.sub("", meaning).rstrip("; .") for name, meaning in (also | meanings).items()}

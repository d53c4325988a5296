"""The keys that a class or function takes, read from its source file: nothing is imported.

For `_target_: package.module.Name` this finds the file along `sys.path` and follows re-exports (`from .file import
Name`) and base classes. It reads the constructor's arguments (or a dataclass's fields) with their annotations and
defaults. What an annotation names and no config can hold (a Tensor, a policy) counts as anything. A user's own modules
are read like ours. A meaning is a text among the
annotation's notes, or the docstring's line "name  meaning" or "name: meaning".
"""

from __future__ import annotations

import ast
import collections.abc
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from toolkit.config import notes
from toolkit.lines import lines_of

REQUIRED = object()  # instead of a default
Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Key:
    """One key: its type (a typing object, with ranges), what it means in a sentence, its default if it has one."""

    name: str
    annotation: Any = Any
    meaning: str = ""
    default: Any = REQUIRED


@dataclass(frozen=True)
class Keys:
    """The keys of one class, function or command.

    takes_any  further keys go through to something else (**kwargs)
    no_blanks  an empty text is no value: keys of commands name folders and choices
    """

    keys: Mapping[str, Key] = field(default_factory=dict)
    takes_any: bool = False
    no_blanks: bool = False


@dataclass(frozen=True)
class Found:
    """A definition in a file; `owner` is the class of a method."""

    module: str
    file: Path
    node: Definition
    owner: ast.ClassDef | None = None


@cache
def keys_of(target: str) -> Keys | None:
    """The keys of a class or function by its dotted name; None if its source is not found."""
    found = find(target)
    if found is None:
        return None
    if isinstance(found.node, ast.FunctionDef):
        texts = [ast.get_docstring(found.node), ast.get_docstring(found.owner) if found.owner else None]
        return _described(_arguments(found.node, found.owner is not None, found.module), texts)
    family = list(_family(found))
    texts = [ast.get_docstring(one.node) for one in family]
    if any(map(_is_dataclass, (one.node for one in family))):
        own = [one for one in reversed(family) if _is_dataclass(one.node)]
        fields = {
            key.name: key for one in own if isinstance(one.node, ast.ClassDef) for key in _fields(one.node, one.module)
        }
        return _described(Keys(fields), texts)
    for one in family:
        init = _member(one.node, "__init__")
        if isinstance(init, ast.FunctionDef):
            return _described(_arguments(init, True, one.module), [ast.get_docstring(init), *texts])
    return Keys()


@cache
def find(target: str) -> Found | None:
    """Where a dotted name is defined, through re-exports; None if no source says so."""
    parts = target.split(".")
    for split in range(len(parts) - 1, 0, -1):
        if (file := module_file(".".join(parts[:split]))) is not None:
            return _within(".".join(parts[:split]), file, tuple(parts[split:]))
    return None


@cache
def module_file(module: str) -> Path | None:
    """The source file of a module, found without importing it or its parents."""
    places: Any = None
    spec = None
    for depth in range(module.count(".") + 1):
        name = ".".join(module.split(".")[: depth + 1])
        spec = PathFinder.find_spec(name, places)
        if spec is None:
            return None
        places = spec.submodule_search_locations or []
    path = Path(spec.origin) if spec is not None and spec.origin else None
    return path if path is not None and path.suffix == ".py" else None


def names_in(module: str) -> list[str]:
    """Public names that a module defines or imports, for suggestions."""
    file = module_file(module)
    names = [] if file is None else [name for node in _statements(_tree(file)) for name in _bound(node)]
    return sorted({name for name in names if not name.startswith("_")})


def says_all(module: str) -> bool:
    """Whether a module's file shows every name it has: none assigned, none by `import *` or `__getattr__`."""
    file = module_file(module)
    bound = [name for node in _statements(_tree(file)) for name in _bound(node)] if file is not None else ["*"]
    return "*" not in bound and "__getattr__" not in bound


def constant(target: str, name: str) -> Any:
    """The literal value of a class's attribute, its own or inherited; None if there is none, or it is no literal."""
    found = find(target)
    for one in _family(found) if found is not None else ():
        member = _member(one.node, name)
        value = member.value if isinstance(member, ast.Assign | ast.AnnAssign) else None
        if value is not None:
            return _literal(value, None)
    return None


def is_kind(target: str, base: str) -> bool:
    """Whether a class, or one of its bases, has this name."""
    found = find(target)
    return found is not None and any(one.node.name == base for one in _family(found))


# -- finding ----------------------------------------------------------------------------------------------------------


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of a module's top level, those of `if` and `try` included."""
    waiting: list[Any] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.If | ast.Try):
            waiting = [*node.body, *node.orelse, *waiting]
        else:
            yield node


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    return [a.asname or a.name for a in node.names] if isinstance(node, ast.ImportFrom) else []


def _within(module: str, file: Path, names: tuple[str, ...]) -> Found | None:
    """A name, or a method of a class, as a module knows it."""
    for node in _statements(_tree(file)):
        if names[0] not in _bound(node):
            continue
        if isinstance(node, ast.ImportFrom):
            (original,) = (a.name for a in node.names if (a.asname or a.name) == names[0])
            return find(".".join((_absolute(node, module, file), original, *names[1:])))
        assert isinstance(node, ast.ClassDef | ast.FunctionDef)
        return _method(Found(module, file, node), names[1:])
    return None


def _method(found: Found, names: tuple[str, ...]) -> Found | None:
    if not names:
        return found
    for one in _family(found):
        member = _member(one.node, names[0])
        if isinstance(member, ast.FunctionDef) and isinstance(one.node, ast.ClassDef):
            return Found(one.module, one.file, member, one.node)
    return None


def _absolute(node: ast.ImportFrom, module: str, file: Path) -> str:
    """The module that an import names, relative dots resolved."""
    if not node.level:
        return node.module or ""
    package = module.split(".") if file.stem == "__init__" else module.split(".")[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def _family(found: Found) -> Iterator[Found]:
    """A class and its bases, as far as their sources are found, nearest first."""
    yield found
    for base in found.node.bases if isinstance(found.node, ast.ClassDef) else ():
        name = ast.unparse(base).partition("[")[0]
        above = find(f"{found.module}.{name}") or _imported(found, name)
        if above is not None and above.node is not found.node:
            yield from _family(above)


def _imported(found: Found, name: str) -> Found | None:
    """A base written as an attribute of an imported module: `nn.Module`, `pl.Callback`."""
    first, _, rest = name.partition(".")
    for node in _statements(_tree(found.file)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if rest and (alias.asname or alias.name) == first:
                    return find(f"{alias.name}.{rest}")
    return None


def _member(node: Definition, name: str) -> ast.stmt | None:
    """A method or an attribute of a class body."""
    for one in node.body if isinstance(node, ast.ClassDef) else ():
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        if getattr(one, "name", None) == name or any(getattr(target, "id", None) == name for target in targets):
            return one
    return None


# -- reading ----------------------------------------------------------------------------------------------------------

_TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, str, bool, list, dict, tuple, set, Path)},
    **{name: getattr(collections.abc, name) for name in ("Sequence", "Mapping", "Collection")},
    **{"List": list, "Dict": dict, "None": type(None)},
}
_NOTES: dict[str, Any] = {
    **{name: vars(notes)[name] for name in ("Above", "AtLeast", "Between", "Choice", "Like", "Called", "Probability")},
    **{kind.__name__: kind for kind in notes.CONTENTS},
}


def _annotation(node: ast.expr | None, module: str) -> Any:
    """An annotation as a typing object, from its syntax alone; what is not known here counts as anything."""
    match node:
        case ast.Constant(value=None):
            return type(None)
        case ast.Constant(value=str() as text):
            try:
                return _annotation(ast.parse(text, mode="eval").body, module)
            except SyntaxError:
                return Any
        case ast.BinOp(op=ast.BitOr()):
            return Union[_annotation(node.left, module), _annotation(node.right, module)]  # noqa: UP007
        case ast.Subscript():
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return _subscripted(ast.unparse(node.value).rpartition(".")[2], inner, module)
        case ast.Name() | ast.Attribute():
            name = ast.unparse(node).rpartition(".")[2]
            alias = None if name in _TYPES else _alias(name, module)
            return _TYPES.get(name, Any) if alias is None else _annotation(*alias)
    return Any


def _subscripted(name: str, inner: list[ast.expr], module: str) -> Any:
    """A generic type, a union, a literal, or a type with notes."""
    if name == "Literal":
        return Literal[tuple(_literal(one, None) for one in inner)]
    kinds = [_annotation(one, module) for one in (inner[:1] if name == "Annotated" else inner)]
    if name == "Annotated":
        beside = [note for one in inner[1:] if (note := _note(one, module)) is not None]
        return Annotated[(kinds[0], *beside)] if beside else kinds[0]  # type: ignore[return-value]
    if name == "Optional":
        kinds.append(type(None))
    if name in ("Union", "Optional"):
        return Union[tuple(kinds)]  # noqa: UP007
    try:
        return _TYPES[name][tuple(kinds)] if name in _TYPES else Any
    except TypeError:
        return Any


def _note(node: ast.expr, module: str) -> Any:
    """A note, of those that are known here: a text, a range, ..."""
    if isinstance(node, ast.Constant):
        return node.value
    call = node if isinstance(node, ast.Call) else None
    name = ast.unparse(call.func if call else node).rpartition(".")[2]
    if name not in _NOTES:
        alias = _alias(name, module) if call is None else None
        return None if alias is None else _note(*alias)
    if call is None:
        return _NOTES[name]
    named = {word.arg: _literal(word.value, None) for word in call.keywords if word.arg}
    return _NOTES[name](*(_literal(one, None) for one in call.args), **named)


def _alias(name: str, module: str) -> tuple[ast.expr, str] | None:
    """What a module's top level assigns to a name, or the module that the name is imported from; and that module."""
    file = module_file(module)
    for node in _statements(_tree(file)) if file is not None else ():
        if isinstance(node, ast.Assign) and any(getattr(target, "id", None) == name for target in node.targets):
            return node.value, module
        if isinstance(node, ast.ImportFrom) and file is not None and name in _bound(node):
            (original,) = (a.name for a in node.names if (a.asname or a.name) == name)
            source = _absolute(node, module, file)
            return _alias(original, source) if source.partition(".")[0] == module.partition(".")[0] else None
    return None


def _literal(node: ast.expr, otherwise: Any) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return otherwise


def _arguments(node: ast.FunctionDef, is_method: bool, module: str) -> Keys:
    """The arguments of a function, without self or cls."""
    given = [*node.args.posonlyargs, *node.args.args]
    if is_method and given and not any(ast.unparse(d) == "staticmethod" for d in node.decorator_list):
        given = given[1:]
    defaults: dict[str, ast.expr | None] = dict(
        zip([a.arg for a in given][::-1], list(node.args.defaults)[::-1], strict=False)
    )
    defaults |= {a.arg: d for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)}
    return Keys({a.arg: _key(a.arg, a.annotation, defaults.get(a.arg), module) for a in (*given, *node.args.kwonlyargs)},
                node.args.kwarg is not None)  # fmt: skip


def _key(name: str, annotation: ast.expr | None, default: ast.expr | None, module: str) -> Key:
    kind = _annotation(annotation, module)
    return Key(name, kind, notes.meaning_of(kind), REQUIRED if default is None else _literal(default, None))


def _is_dataclass(node: Definition) -> bool:
    return any(ast.unparse(d).partition("(")[0].endswith("dataclass") for d in node.decorator_list)


def _fields(node: ast.ClassDef, module: str) -> Iterator[Key]:
    """The fields of a dataclass body that its constructor takes."""
    for one in node.body:
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        default = "" if one.value is None else ast.unparse(one.value)
        if "ClassVar" not in ast.unparse(one.annotation) and "init=False" not in default:
            yield _key(one.target.id, one.annotation, one.value, module)


def _described(keys: Keys, docstrings: Iterable[str | None]) -> Keys:
    """The keys with the meanings that docstrings give; the first one that does counts."""
    meanings: dict[str, str] = {}
    for text in docstrings:
        meanings = {**(meanings_in(text, keys.keys) if text else {}), **meanings}
    described = {name: replace(key, meaning=key.meaning or meanings.get(name, "")) for name, key in keys.keys.items()}
    return Keys(described, keys.takes_any)


def meanings_in(docstring: str, names: Iterable[str]) -> dict[str, str]:
    """What a docstring says of names.

    It is read from lines "name  meaning" (or "a, b  meaning"), which go on in deeper lines. For the other names it is
    read from "name: meaning", up to a semicolon.
    """
    one = "|".join(map(re.escape, names)) or "(?!)"
    start = re.compile(rf"^(\s*)((?:{one})(?:, (?:{one}))*)(?:  +|: +)(\S.*)$")
    inside = re.compile(rf"(?<=[.;,] )({one}): ([^;]+)")
    found: dict[str, str] = {}
    also: dict[str, str] = {}
    open_names: list[str] = []
    indent = 0
    for line in lines_of(textwrap.dedent(docstring)):
        also |= {match[1]: match[2] for match in inside.finditer(line)}
        if match := start.match(line):
            open_names, indent = match[2].split(", "), len(match[1])
            found |= dict.fromkeys(open_names, match[3])
        elif line.strip() and len(line) - len(line.lstrip()) > indent:
            found |= {name: f"{found[name]} {line.strip()}" for name in open_names}
        else:
            open_names = []
    cut = re.compile(rf"; (?:{one}): .*")
    return {name: cut.sub("", meaning).rstrip("; .") for name, meaning in (also | found).items()}


def clear() -> None:
    """Forget what was read: `sys.path` or a file has changed."""
    for known in (keys_of, find, module_file, _tree):
        known.cache_clear()
    PathFinder.invalidate_caches()
    sys.path_importer_cache.clear()

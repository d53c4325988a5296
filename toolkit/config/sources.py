"""The keys that a class or function takes, read from its source file: nothing is imported, nothing evaluated.

The file of `_target_: package.module.Name` is found along `sys.path`, through re-exports and base classes. The keys are the
constructor's arguments, or a dataclass's fields. What an annotation names and no config can hold (a Tensor, a policy) counts
as anything. A meaning is a text among the annotation's notes, or the docstring's line "name  meaning" or "name: meaning".
"""

from __future__ import annotations

import ast
import collections.abc
import re
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union

from toolkit.config import notes
from toolkit.config.notes import REQUIRED, Key, Keys
from toolkit.errors import InputError
from toolkit.files.text import first_line, lines_of

Definition = ast.ClassDef | ast.FunctionDef
OTHERS = ("toolkit", "analysis", "data_gen", "hydra_plugins")  # packages of this toolkit
INSTALLED = {"site-packages", "dist-packages"}
_TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, str, bool, list, dict, tuple, set, Path)},
    **{name: getattr(collections.abc, name) for name in ("Sequence", "Mapping", "Collection")},
}
_NOTES: dict[str, Any] = {
    **{name: vars(notes)[name] for name in ("Above", "AtLeast", "Between", "Choice", "Like", "Called", "Probability")},
    **{kind.__name__: kind for kind in notes.CONTENTS},
}


class Defined(NamedTuple):
    """A definition in a module; `owner` is the class of a method."""

    module: str
    node: Definition
    owner: ast.ClassDef | None = None


@cache
def keys_of(target: str) -> Keys | None:
    """The keys of a class or function by its dotted name; None if its source is not found."""
    definition = find(target)
    if definition is None:
        return None
    module, node, owner = definition
    if isinstance(node, ast.FunctionDef):
        return _described(_arguments(node, module, owner is not None), [node, owner])
    family = list(_family(definition))
    nodes = [part.node for part in family]
    for number, part in enumerate(family):  # the nearest constructor counts
        if _is_dataclass(part.node):
            owners = [owner for owner in family[number:][::-1] if _is_dataclass(owner.node)]
            return _described(Keys({key.name: key for owner in owners for key in _fields(*owner[:2])}), nodes)
        init = _member(part.node, "__init__")
        if isinstance(init, ast.FunctionDef):
            return _described(_arguments(init, part.module, True), [init, *nodes])
    return Keys()


@cache
def find(target: str) -> Defined | None:
    """Where a dotted name is defined, through re-exports; None if no source says so."""
    parts = target.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module, names = ".".join(parts[:split]), parts[split:]
        if module_file(module) is None:
            continue
        node = _binding(module, names[0])
        if isinstance(node, ast.ImportFrom):
            return find(".".join([*_imported(node, module, names[0]), *names[1:]]))
        definition = Defined(module, node) if isinstance(node, Definition) else None
        if definition is None or len(names) == 1:
            return definition
        for part in _family(definition):
            member = _member(part.node, names[1])
            if isinstance(member, ast.FunctionDef) and isinstance(part.node, ast.ClassDef):
                return Defined(part.module, member, part.node)
    return None


@cache
def module_file(module: str) -> Path | None:
    """The source file of a module, found without importing it or its parents."""
    if not all(module.split(".")):
        return None
    folders: Any = None
    spec = None
    for depth in range(module.count(".") + 1):
        name = ".".join(module.split(".")[: depth + 1])
        finders: Any = (PathFinder, *sys.meta_path)  # packages that are installed as editable have their own
        spec = next((spec for finder in finders if (spec := finder.find_spec(name, folders)) is not None), None)
        if spec is None:
            return None
        folders = spec.submodule_search_locations or []
    path = Path(spec.origin) if spec is not None and spec.origin else None
    return path if path is not None and path.suffix == ".py" else None


def hidden(module: str) -> str | None:
    """What hides a module of this toolkit: a package of the user's that has the name of ours. None if nothing does."""
    package = module.partition(".")[0]
    own, file = Path(__file__).resolve().parents[2] / package / "__init__.py", module_file(package)
    if not own.is_file() or file is None or file.resolve() == own:
        return None
    return f"{file} hides this toolkit's {package}: rename it, or run the command in another folder"


def names_in(module: str) -> list[str]:
    """Public names that a module defines or imports, for suggestions."""
    kinds = (*typing.get_args(Definition), ast.ImportFrom)
    nodes = (node for node in _statements(module) if isinstance(node, kinds))
    return sorted({name for node in nodes for name in _bound(node) if not name.startswith("_")})


def says_all(module: str) -> bool:
    """Whether a module's file shows every name it has: none assigned, none by `import *` or `__getattr__`."""
    bound = {name for node in _statements(module) for name in _bound(node)}
    return module_file(module) is not None and not bound & {"*", "__getattr__"}


def constant(target: str, name: str) -> Any:
    """The literal value of a class's attribute, its own or inherited; None if there is none, or it is no literal."""
    definition = find(target)
    for part in _family(definition) if definition is not None else ():
        member = _member(part.node, name)
        if isinstance(member, ast.Assign | ast.AnnAssign) and member.value is not None:
            return _literal(member.value)
    return None


def is_kind(target: str, base: str) -> bool:
    """Whether a class, or one of its bases, has this name."""
    definition = find(target)
    return definition is not None and any(part.node.name == base for part in _family(definition))


def users_files(target: str) -> list[Path]:
    """The source files that a dotted name of a user's own comes from, with all of the user's own that they import.

    This toolkit's modules, Python's own and installed packages are not a user's.
    """
    files: dict[str, Path] = {}
    waiting = [target]
    while waiting:
        parts = waiting.pop().split(".")
        if parts[0] in OTHERS or parts[0] in sys.stdlib_module_names:
            continue
        for module in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            file = None if module in files else module_file(module)
            if file is None or INSTALLED.intersection(file.parts):
                continue
            files[module] = file
            for node in ast.walk(_tree(file)):
                if isinstance(node, ast.Import):
                    waiting += [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [alias.asname or alias.name for alias in node.names]
                    waiting += [".".join(_imported(node, module, name)) for name in names]
    return [files[module] for module in sorted(files)]


def clear() -> None:
    for remembered in (keys_of, find, module_file, _tree):
        remembered.cache_clear()
    PathFinder.invalidate_caches()
    sys.path_importer_cache.clear()


@cache
def _tree(file: Path) -> ast.Module:
    """A file's syntax tree. Raises InputError where it is no Python."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise InputError(f"{file}{line}: expected Python, got {first_line(error)}") from None


def _statements(module: str) -> Iterator[ast.stmt]:
    """Statements of a module's top level, those of `if` and `try` included."""
    file = module_file(module)
    waiting: list[Any] = [] if file is None else list(_tree(file).body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.If | ast.Try):
            waiting[:0] = [*node.body, *node.orelse]
        else:
            yield node


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, Definition):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _binding(module: str, name: str) -> ast.stmt | None:
    """The statement that binds a name at a module's top level."""
    return next((node for node in _statements(module) if name in _bound(node)), None)


def _imported(node: ast.ImportFrom, module: str, name: str) -> tuple[str, str]:
    """The module and the name there that an import binds as `name`, relative dots resolved."""
    (original,) = (a.name for a in node.names if (a.asname or a.name) == name)
    file = module_file(module)
    package = module.split(".") if file is not None and file.stem == "__init__" else module.split(".")[:-1]
    above = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])]), original


def _family(definition: Defined) -> Iterator[Defined]:
    """A class and its bases, as far as their sources are found, nearest first."""
    yield definition
    for base in definition.node.bases if isinstance(definition.node, ast.ClassDef) else ():
        first, _, rest = ast.unparse(base).partition("[")[0].partition(".")
        above = find(f"{definition.module}.{first}") if not rest else None
        for node in _statements(definition.module) if rest else ():  # an attribute of an imported module: pl.Callback
            for alias in node.names if isinstance(node, ast.Import) else ():
                if (alias.asname or alias.name) == first:
                    above = find(f"{alias.name}.{rest}")
        if above is not None and above.node is not definition.node:
            yield from _family(above)


def _member(node: Definition, name: str) -> ast.stmt | None:
    """A method or an attribute of a class body."""
    body = node.body if isinstance(node, ast.ClassDef) else ()
    return next((part for part in body if name in _bound(part)), None)


def _annotation(node: ast.expr | None, module: str) -> Any:
    """An annotation as a typing object, from its syntax alone; what is not known here counts as anything."""
    match node:
        case ast.Constant(value=None):
            return type(None)
        case ast.Constant(value=str() as text):
            with suppress(SyntaxError):
                return _annotation(ast.parse(text, mode="eval").body, module)
        case ast.BinOp(op=ast.BitOr()):
            return Union[_annotation(node.left, module), _annotation(node.right, module)]  # noqa: UP007
        case ast.Subscript():
            name = ast.unparse(node.value).rpartition(".")[2]
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if name == "Literal":
                return Literal[tuple(map(_literal, inner))]
            if name == "Annotated":
                beside = [note for part in inner[1:] if (note := _note(part, module)) is not None]
                kind = _annotation(inner[0], module)
                return Annotated[(kind, *beside)] if beside else kind  # type: ignore[return-value]
            kinds = tuple(_annotation(part, module) for part in inner)
            if name in ("Union", "Optional"):
                return Union[kinds if name == "Union" else (*kinds, type(None))]  # noqa: UP007
            with suppress(KeyError, TypeError):
                return _TYPES[name][kinds]
        case ast.Name() | ast.Attribute():
            name = ast.unparse(node).rpartition(".")[2]
            alias = None if name in _TYPES else _alias(name, module)
            return _TYPES.get(name, Any) if alias is None else _annotation(*alias)
    return Any


def _note(node: ast.expr, module: str) -> Any:
    """A note, of those that are known here: a text, a range, ...; None: another one."""
    if isinstance(node, ast.Constant):
        return node.value
    call = node if isinstance(node, ast.Call) else None
    name = ast.unparse(call.func if call else node).rpartition(".")[2]
    if call is not None and name in _NOTES:
        named = {word.arg: _literal(word.value) for word in call.keywords if word.arg}
        return _NOTES[name](*map(_literal, call.args), **named)
    alias = _alias(name, module) if call is None and name not in _NOTES else None
    return _note(*alias) if alias is not None else _NOTES.get(name)


def _alias(name: str, module: str) -> tuple[ast.expr, str] | None:
    """What a name stands for that a module assigns, or imports from a module of the same package; and that module."""
    node = _binding(module, name)
    if isinstance(node, ast.ImportFrom):
        source, original = _imported(node, module, name)
        return _alias(original, source) if source.partition(".")[0] == module.partition(".")[0] else None
    return (node.value, module) if isinstance(node, ast.Assign) else None


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def _arguments(node: ast.FunctionDef, module: str, is_method: bool) -> Keys:
    """The arguments of a function, without self or cls."""
    plain = [*node.args.posonlyargs, *node.args.args]
    last = zip(plain[::-1], node.args.defaults[::-1], strict=False)
    defaults: dict[str, ast.expr | None] = {a.arg: default for a, default in last}
    defaults |= {a.arg: default for a, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)}
    if is_method and not any(ast.unparse(d) == "staticmethod" for d in node.decorator_list):
        plain = plain[1:]
    keys = (_key(a.arg, a.annotation, defaults.get(a.arg), module) for a in (*plain, *node.args.kwonlyargs))
    return Keys({key.name: key for key in keys}, takes_any=node.args.kwarg is not None)


def _key(name: str, annotation: ast.expr | None, default: ast.expr | None, module: str) -> Key:
    kind = _annotation(annotation, module)
    return Key(name, kind, notes.meaning_of(kind), REQUIRED if default is None else _literal(default))


def _is_dataclass(node: Definition) -> bool:
    return "dataclass" in " ".join(map(ast.unparse, node.decorator_list))


def _fields(module: str, node: Definition) -> Iterator[Key]:
    """The fields of a dataclass body that its constructor takes."""
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            default = "" if part.value is None else ast.unparse(part.value)
            if "ClassVar" not in ast.unparse(part.annotation) and "init=False" not in default:
                yield _key(part.target.id, part.annotation, part.value, module)


def _described(keys: Keys, nodes: Iterable[Definition | None]) -> Keys:
    """The keys with the meanings that docstrings give; the first one that does counts."""
    meanings: dict[str, str] = {}
    for text in (ast.get_docstring(node) for node in nodes if node is not None):
        meanings = {**(meanings_in(text, keys.keys) if text else {}), **meanings}
    documented = {name: replace(key, meaning=key.meaning or meanings.get(name, "")) for name, key in keys.keys.items()}
    return Keys(documented, keys.takes_any)


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
    for line in lines_of(textwrap.dedent(docstring)):
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

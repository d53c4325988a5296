"""`--help`: what a command does, an example, and every key with its type, value and meaning. Plain text, 120 columns."""

from __future__ import annotations

import ast
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from toolkit.config import files as configs
from toolkit.config.check import keys_below, resolved
from toolkit.config.classes import module_file
from toolkit.config.commands import Command, Grid, command_of, group_of, keys_of, section_in
from toolkit.config.notes import REQUIRED, Internal, Key, Keys, notes
from toolkit.config.others import OTHERS
from toolkit.config.store import HYDRAS, composed
from toolkit.config.values import is_known, is_node, options, say

WIDTH = 120
LEFT = 30  # columns of a key's name
TAIL = (
    "The keys of another choice: add it to --help, as in `method=mcsd --help`. A key that is not in the config yet takes "
    "a +, as in +pair.revision=main. --cfg job prints the config, -m sweeps over KEY=A,B, --config-dir adds a folder laid "
    "out like conf/, --hydra-help lists Hydra's own flags."
)


def help_text(config_name: str, overrides: Iterable[str] = ()) -> str:
    """The help of a command, for the choices that the overrides make. Raises InputError if these do not compose."""
    section = command_of(config_name)
    unresolved = composed(config_name, list(overrides))
    config = without_repeats(resolved(unresolved, config_name), configs.unresolved(unresolved))
    if section is None or not issubclass(section, Command):
        return "\n".join(_entries("", config, Keys({name: Key(name) for name in config})))
    file = module_file(section.module)
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) if file is not None else None
    first, _, rest = (docstring or "").partition("\n\n")  # the first paragraph begins with the command line
    what = first.partition(": ")[2] or first
    paragraphs = (part for part in rest.split("\n\n") if part and not part.startswith(" "))  # without examples
    rest = re.sub(r"(?<=\.)\s[^.]*:$", "", next(paragraphs, ""))  # nor what announces a list
    lines = []
    for text in filter(None, (f"{section.module}: {what}", rest)):
        lines += [*textwrap.wrap(" ".join(text.split()), WIDTH), ""]
    lines += ["Example:", *_wrapped(f"python -m {section.module} {section.example}"), ""]
    declared = keys_of(section)
    plain = {}  # what is shown under no heading of its own: no groups, no sections of keys
    for name, value in config.items():
        key = declared.keys.get(name)
        if key is None or (group_of(key.annotation) is None and not isinstance(value, Mapping)):
            plain[name] = value
    lines += ["Keys, with their value now:", "", *_entries("", plain, declared)]
    listed: set[str] = set()
    for name, value in config.items():
        if name not in plain:
            lines += _part(name, value, declared.keys.get(name, Key(name)), listed)
    for group in section.appended:
        names = names_of(group)
        lines += ["", *_filled(f"+{group}=NAME", f"appends conf/{group}/NAME.yaml: {names}")]
    return "\n".join([*lines, "", *textwrap.wrap(TAIL, WIDTH)])


def without_repeats(config: Mapping[str, Any], unresolved: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved config without the nodes that only repeat a root key: of `model`, what says `optimizer: ${optimizer}`."""
    roots = [f"${{{name}}}" for name in config]
    shortened = dict(config)
    for name, value in config.items():
        if isinstance(value, Mapping) and isinstance(unresolved[name], Mapping):
            written = unresolved[name]
            repeats = [key for key in value if isinstance(value[key], Mapping) and written[key] in roots]
            shortened[name] = {key: content for key, content in value.items() if key not in repeats}
    return shortened


def names_of(group: str) -> str:
    """The choices of a config group in a row; those that differ in a number as one: table{1,2,3}."""
    rows: dict[str, list[str]] = {}
    for name in configs.choices(group):
        stem = name.rstrip("0123456789") if re.search(r"(table|figure)\d+$", name) else name
        rows.setdefault(stem, []).append(name.removeprefix(stem))
    return ", ".join(
        stem + (f"{{{','.join(sorted(numbers, key=int))}}}" if len(numbers) > 1 else numbers[0])
        for stem, numbers in rows.items()
    )


def _part(name: str, value: Any, key: Key, listed: set[str]) -> list[str]:
    """A blank line, the heading of a group or section and its keys; nothing of a class without keys that somebody sets.

    listed: groups whose choices were listed before.
    """
    group = group_of(key.annotation)
    names = names_of(group.name) if group is not None and group.name and group.name not in listed else ""
    lines = [*_keys_of_part(name, value, key)]
    if names and group is not None:
        listed.add(group.name)
        lines = [*_wrapped(f"{group.name}=NAME: {names}"), *lines]
    return ["", *textwrap.wrap(f"{name}: {key.meaning}", WIDTH), *lines] if lines or not is_node(value) else []


def _keys_of_part(name: str, value: Any, key: Key) -> Iterator[str]:
    """One entry per key of a group or section."""
    mappings = [arguments for option in options(key.annotation) if (arguments := typing.get_args(option))]
    named = next((section_in(arguments[1]) for arguments in mappings if len(arguments) == 2), None)  # of every entry
    if issubclass(section_in(key.annotation) or Command, Grid):
        for path, values in configs.flatten(value).items():
            yield from _filled(f"{name}.{path}", _value(values))
    elif named is not None:
        yield from _entries(f"{name}.NAME.", {}, keys_of(named), every=True)
    elif isinstance(value, Mapping):
        yield from _entries(f"{name}.", value, keys_below(value, key.annotation) or Keys())


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _entries(prefix: str, values: Mapping[str, Any], declared: Keys, every: bool = False) -> Iterator[str]:
    """One entry per key, those of classes below it. With `every`, and of classes, also the keys that have no value here."""
    keys = entries = declared.keys
    if is_node(values):
        keys, every = (keys_below(values) or Keys()).keys, True
        entries = OTHERS.get(values["_target_"], keys)  # type: ignore[arg-type]  # of classes that are not ours, what somebody may want
    for name, key in {**keys, **{n: Key(n) for n in values if n not in keys and n not in HYDRAS}}.items():
        value = values.get(name)
        if isinstance(value, Mapping) and value:
            yield from _entries(f"{prefix}{name}.", value, keys_below(value, key.annotation) or Keys())
        elif name in values:
            yield from _entry(f"{prefix}{name}", key, _value(value))
        elif every and name in entries and _is_settable(key, bool(values.get("_partial_"))):
            plus = "+" if is_node(values) else ""
            yield from _entry(f"{plus}{prefix}{name}", key, "" if key.default is REQUIRED else _value(key.default))


def _is_settable(key: Key, is_partial: bool) -> bool:
    """Whether somebody may want to set a key that the config does not have. The rest of a partial class is the command's."""
    is_filled = any(isinstance(note, Internal) for note in notes(key.annotation))
    is_filled = is_filled or (is_partial and key.default is REQUIRED)
    return bool(key.meaning) and not is_filled and all(map(is_known, options(key.annotation)))


def _entry(path: str, key: Key, value: str) -> list[str]:
    kind = f" ({say(key.annotation)})" if is_known(key.annotation) else ""
    as_yaml = {"None": "null", "True": "true", "False": "false"}
    meaning = re.sub(r"\b(None|True|False)\b", lambda match: as_yaml[match[0]], key.meaning)
    return _filled(path, f"{value}{kind}{': ' if meaning else ''}{meaning}".strip())


def _filled(path: str, text: str) -> list[str]:
    """A name on the left, a text wrapped beside it."""
    first = f"  {path}".ljust(LEFT) + "  "
    indent = " " * (LEFT + 2)
    if len(first) > LEFT + 2:
        return [f"  {path}", *textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)]
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=indent) or [first.rstrip()]


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_value, value))}]"
    text = " ".join(str(value).split()) or '""'
    return text if len(text) <= 60 else text[:57] + "..."

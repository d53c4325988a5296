"""Config files: where they lie, which names they offer, how values are written in them.

`conf/` is always addressed by its absolute path, because a user's own folder of that name would shadow a package path. Folders
of the user's own that are laid out like it (`--config-dir`, `searching`) add choices to its groups.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import RLock
from typing import Any

from toolkit.config import papers, parts
from toolkit.errors import InputError

CONF = Path(__file__).resolve().parents[2] / "conf"
BARE = re.compile(r"[A-Za-z./_][A-Za-z0-9./_@+-]*")  # a text that an override may hold without quotes
QUOTED_OR_HOME = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?:^|(?<=[\[{,:]))~(?=/[^\s\]}])""", re.DOTALL)
# What Hydra wants in quotes.
UNQUOTED = re.compile(r"""(?=.*[^\w\t ./+%*@?|:-])[^][{}(),$"'\\]+""", re.ASCII | re.DOTALL)
ESCAPE, ESCAPED = re.compile(r"(\\+)([ntr])"), {"n": "\n", "t": "\t", "r": "\r"}
# A grid lists only what it sweeps; a template's options are its own, and so are an engine's.
OPEN = ("grid.", "pair.chat_template_options", "served.request=", "served.request.")
MOST = 256  # configs and methods that are kept; composing one takes tens of milliseconds
NOT_TEXT = ("true", "false", "null", "nan", "inf")  # words that are read as something else
LOCK = RLock()  # of what is composed and kept: methods are built from configs
_KEPT: dict[tuple[object, ...], Any] = {}
_process_folders: tuple[Path, ...] = ()  # the user's own, of the command line
_searched: ContextVar[tuple[Path, ...]] = ContextVar("searched", default=())  # more of them, of `searching`


def user_folders() -> tuple[Path, ...]:
    """Config folders of the user's own, beside `conf/`, as absolute paths."""
    return (*_process_folders, *_searched.get())


def use_folders(*folders: str | Path) -> None:
    """From now on look for configs in these folders, too. Raises InputError if there is no such folder."""
    global _process_folders
    _process_folders = _resolved(folders)


@contextmanager
def searching(*folders: str | Path) -> Iterator[None]:
    """Within this context configs are looked for in these folders, too: `with searching("my_conf"): method("mine")`.

    Other threads do not see them. Raises InputError if there is no such folder.
    """
    token = _searched.set((*_searched.get(), *_resolved(folders)))
    try:
        yield
    finally:
        _searched.reset(token)


def _resolved(folders: Sequence[str | Path]) -> tuple[Path, ...]:
    for folder in folders:
        if not Path(folder).is_dir():
            raise InputError(f"--config-dir: expected a folder laid out like conf/, got {folder}, which is none")
    return tuple(Path(folder).resolve() for folder in folders)


def kept(make: Callable[..., Any], *arguments: Any) -> Any:
    """What `make(*arguments)` returned for these configuration files; it is called once for them, by one thread.

    `conf/` is read once per process, folders of the user's own again when a file there has changed.
    """
    folders = user_folders()
    below = ("*", "*/*", "*/*/*")  # roots, groups, and the bases inside groups
    paths = [*folders, *(path for folder in folders for pattern in below for path in folder.glob(pattern))]
    stats = [(path, path.stat()) for path in paths]
    key = (make, arguments, folders, *((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats))
    with LOCK:
        if key not in _KEPT:
            if len(_KEPT) >= MOST:
                _KEPT.clear()
            _KEPT[key] = make(*arguments)
        return _KEPT[key]


def choices(group: str) -> list[str]:
    """Names that a config group offers: in `conf/`, in the user's own folders, and by classes."""
    folders = (CONF, *user_folders())
    names = {path.stem for folder in folders for path in (folder / group).glob("*.yaml")}
    return sorted(names.union(parts.classes_in(group), papers.names(folders) if group in papers.GROUPS else ()))


def find(group: str, name: str) -> Path:
    """The file of a choice, `conf/`'s first."""
    paths = [folder / group / f"{name}.yaml" for folder in (CONF, *user_folders())]
    return next((path for path in paths if path.is_file()), paths[0])


def plain(config: Any) -> Any:
    """A config as plain containers, interpolations resolved."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


def unresolved(config: Any) -> Any:
    """A config as plain containers, interpolations as they are written; a copy."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config, resolve=False) if OmegaConf.is_config(config) else copy.deepcopy(config)


def escaped(text: str) -> str:
    """A text as a config's value: "${" in it is no interpolation."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def with_texts(change: Callable[[str], str], value: Any) -> Any:
    """A container with its texts changed."""
    if isinstance(value, dict):
        return {key: with_texts(change, part) for key, part in value.items()}
    if isinstance(value, list):
        return [with_texts(change, part) for part in value]
    return change(value) if isinstance(value, str) else value


def quoted(text: str) -> str:
    """A text as an override's value: whatever it holds, it stays one text."""
    text = escaped(text)
    text = re.sub(r'(\\*)(["ntr]|$)', lambda match: match[1] * 2 + ("\\" if match[2] == '"' else "") + match[2], text)
    return f'"{text}"'


def settable(word: str) -> str:
    """An override as Hydra reads it: \\n, \\t and \\r in quotes are escapes, ~/ is the home folder, texts with = are quoted.

    One of a key that may be new there (`OPEN`) does without a +.
    """
    home = os.path.expanduser("~")

    def unescaped(match: re.Match[str]) -> str:  # a pair is one backslash, as before a quote
        return "\\" * (len(match[1]) // 2) + (ESCAPED[match[2]] if len(match[1]) % 2 else match[2])

    def meant(match: re.Match[str]) -> str:
        if match[1] is None:
            return home
        text = ESCAPE.sub(unescaped, match[1])
        is_path = text[1:3] == "~/" and text[3:-1] != ""
        return text[0] + home + text[2:] if is_path else text

    key, sign, value = word.partition("=")
    value = QUOTED_OR_HOME.sub(meant, value)
    word = key + sign + (quoted(value) if UNQUOTED.fullmatch(value) else value)
    return f"++{word.lstrip('+')}" if word.lstrip("+").startswith(OPEN) else word


def override(key: str, value: Any) -> str:
    """`key=value` without blanks, as it is read back on a command line: texts, paths, numbers, lists, mappings and null."""
    return f"{key}={_written(value)}"


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else repr(float(value) if isinstance(value, float) else value).lower()
    text = str(value)
    return text if BARE.fullmatch(text) and text.lower() not in NOT_TEXT else quoted(text)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as {"a.b": value}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat

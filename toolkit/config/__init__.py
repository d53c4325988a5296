"""Configuration as a library: compose a config by name, checked against the schema, and build what it describes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from toolkit.config import files
from toolkit.config.classes import instantiate
from toolkit.config.files import (
    CONF,
    NOT_TEXT,
    choices,
    escaped,
    find,
    flatten,
    override,
    plain,
    quoted,
    searching,
    unresolved,
    use_folders,
    user_folders,
)
from toolkit.config.values import checked
from toolkit.errors import InputError, unknown_name

__all__ = [
    "CONF", "NOT_TEXT", "choice", "choices", "compose", "escaped", "find", "flatten", "instantiate", "method", "method_config",
    "override", "plain", "quoted", "searching", "unresolved", "use_folders", "user_folders",
]  # fmt: skip
SIGN = re.compile(r"^([+~]*)")  # of an override
PREFIX = re.compile(r"\bmethod\.(?=\w)")


@checked
def compose(config_name: str, overrides: Sequence[str] = (), *, checked: bool = True) -> Any:
    """The composed config `conf/<config_name>.yaml`, beside a Hydra application that may be running: neither sees the other.

    checked  raise InputError, one line, for unknown keys, wrong types and numbers out of range (`toolkit.config`). Keys
             that have no value yet (???) are left to the code that needs them
    """
    from toolkit.config.check import check, composed

    config = composed(config_name, [*map(files.settable, overrides)])
    if checked:
        check(config, config_name, complete=False)
    return config


def choice(group: str, name: str) -> dict[str, Any]:
    """A choice of a config group by itself, as plain containers."""
    from toolkit.config.store import composed

    return dict(plain(composed(f"{group}/{name}"))[group])


@checked
def method(name: str, overrides: Sequence[str] = (), head: str | None = None, statistics: str | None = None) -> Any:
    """The method `conf/method/<name>.yaml`, with overrides relative to it ("policy.threshold=.3").

    Another policy or rule is chosen as on the command line: "rule@method.rule=block". A method is built once per process
    and set of arguments (methods hold no state), and again when a configuration file has changed.
    """
    return files.kept(_built, name, tuple(overrides), head, statistics)


def _built(*arguments: Any) -> Any:
    return instantiate(method_config(*arguments))


@checked
def method_config(
    name: str, overrides: Sequence[str] = (), head: str | None = None, statistics: str | None = None
) -> Any:
    """What `method` builds from: the composed config.

    Raises InputError with the nearest names for an unknown one. Messages say keys as the overrides do: relative to the method.
    """
    if name not in choices("method"):
        raise unknown_name("method", name, choices("method"))
    words = [word if "@" in word.partition("=")[0] else SIGN.sub(r"\1method.", word, count=1) for word in overrides]
    files_of = {"head": head, "statistics": statistics}
    paths = [f"{key}={'null' if path is None else quoted(path)}" for key, path in files_of.items()]
    try:
        return compose("method_only", [f"method={name}", *paths, *words]).method
    except InputError as error:
        raise InputError(PREFIX.sub("", str(error))) from error

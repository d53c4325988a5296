"""Keys of earlier revisions that are gone: accepted at the value that changed nothing, else refused with the reason.

A pattern is a command's name, a slash, and the key from the top, in which * stands for any text: "timing/values",
"*/head.output". `MIGRATION.md` has a row for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from toolkit.errors import InputError

NO_MAPS = "fitted calibrations were no better on other data"
ANY = object()  # every value changed nothing
REMOVED: dict[str, tuple[Any, str]] = {
    "timing/values": (False, "solving the stopping problem gained 0 to 1.3 % over the rate rule"),
    "timing/max_drafted": (ANY, "it bounded the rounds of values=true"),
    "heads/fit": (None, NO_MAPS),
    "heads/kind": (ANY, NO_MAPS),
    "heads/max_depth": (ANY, NO_MAPS),
    "*calibrated": (False, NO_MAPS),
    "*/head.output": ("token", "heads of whole rounds were no faster"),
    "*/head.layers": ([], "earlier layers of the draft gained nothing"),
    "*/pair.draft_layers": ([], "earlier layers of the draft gained nothing"),
    "*/data.draft.layers": ([], "earlier layers of the draft gained nothing"),
    "*/data.on_missing": ("generate", "cached states are made before the training"),
    "*/loss.gamma": (0, "the focal loss gained nothing"),
    "*/loss.position_weights": ([1, 1], "no weights but equal ones gained anything"),
}


def without_removed_words(command: str, overrides: Sequence[str]) -> list[str]:
    """The overrides of a command without those of removed keys. Raises InputError for one that asks for something."""
    return [word for word in overrides if "=" not in word or not _is_removed_word(command, word)]


def _is_removed_word(command: str, word: str) -> bool:
    key, _, text = word.lstrip("+").partition("=")
    if not _patterns(command, key):
        return False
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    return is_removed(command, key, value)


def drop_removed(command: str, config: Any) -> None:
    """Delete removed keys from a composed config, where a yaml of an earlier revision sets them. Raises InputError."""
    from omegaconf import OmegaConf, open_dict

    content = OmegaConf.to_container(config, resolve=False)
    for path, value in list(_paths(content)):
        if is_removed(command, path, value):
            parent, _, name = path.rpartition(".")
            with open_dict(config):
                del (OmegaConf.select(config, parent) if parent else config)[name]


def is_removed(command: str, key: str, value: Any) -> bool:
    """Whether a key is gone. Raises InputError if its value asked for something."""
    for pattern in _patterns(command, key):
        neutral, reason = REMOVED[pattern]
        if neutral is not ANY and value != neutral:
            raise InputError(f"{key}: this key was removed ({reason}): delete it, got {value}")
        return True
    return False


def _patterns(command: str, key: str) -> list[str]:
    return [pattern for pattern in REMOVED if fnmatchcase(f"{command}/{key}", pattern)]


def _paths(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths of all keys below a plain mapping, with their values."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            yield f"{prefix}{name}", value
            yield from _paths(value, f"{prefix}{name}.")

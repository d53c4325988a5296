"""Keys of earlier revisions that are gone: accepted at the value that changed nothing, else refused with the reason.

A pattern is a command's name, a slash, and the key from the top; * stands for any text: "timing/values", "*/head.output".
Keys of a class of somebody else's are left alone. `MIGRATION.md` has a row for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from toolkit.errors import InputError

ANY = object()  # every value changed nothing
NO_MAPS, NO_LAYERS = "fitted calibrations were no better on other data", "earlier layers of the draft gained nothing"
REMOVED: dict[str, tuple[Any, str]] = {  # pattern -> neutral value, reason
    "timing/values": (False, "solving the stopping problem gained 0 to 1.3 % over the rate rule"),
    "timing/max_drafted": (ANY, "it bounded the rounds of values=true"),
    "heads/fit": (None, NO_MAPS),
    "heads/kind": (ANY, NO_MAPS),
    "heads/max_depth": (ANY, NO_MAPS),
    "*.calibrated": (False, NO_MAPS),
    "*/head.output": ("token", "heads of whole rounds were no faster"),
    "*/head.layers": ([], NO_LAYERS),
    "*/pair.draft_layers": ([], NO_LAYERS),
    "*/data.draft.layers": ([], NO_LAYERS),
    "*/data.on_missing": ("generate", "cached states are written before the training"),
    "*/loss.gamma": (0, "the focal loss gained nothing"),
    "*/loss.position_weights": ([1, 1], "unequal weights gained nothing"),
}


def is_removed(command: str, key: str, value: Any) -> bool:
    """Whether a key is gone. Raises InputError if its value asked for something."""
    for pattern, (neutral, reason) in REMOVED.items():
        if fnmatchcase(f"{command}/{key}", pattern):
            if ANY not in (neutral, value) and value != neutral:
                raise InputError(f"{key}={value}: this key was removed ({reason}): delete it")
            return True
    return False


def without(command: str, key: str, overrides: Sequence[str]) -> list[str]:
    """The overrides without those of a key that is not there: all of them, unless it is a removed one."""
    return [word for word in overrides if _key(word) != key or not is_removed(command, key, _value(word))]


def drop_removed(command: str, config: Any) -> None:
    """Delete removed keys from a composed config, where a yaml of an earlier revision sets them. Raises InputError."""
    from omegaconf import OmegaConf, open_dict

    for path, name, value in list(_keys(OmegaConf.to_container(config, resolve=False))):
        if is_removed(command, f"{path}.{name}".lstrip("."), value):
            with open_dict(config):
                del (OmegaConf.select(config, path) if path else config)[name]


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _value(word: str) -> Any:
    """What an override sets, or deletes; of "~key", which deletes any value, `ANY`."""
    import yaml

    if "=" not in word:
        return ANY
    try:
        return yaml.safe_load(word.partition("=")[2])
    except yaml.YAMLError:
        return word


def _keys(content: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """The path of its mapping, the name and the value of every key, those of other people's classes left out."""
    if isinstance(content, Mapping) and str(content.get("_target_", "toolkit.")).startswith("toolkit."):
        for name, value in content.items():
            yield path, str(name), value
            yield from _keys(value, f"{path}.{name}".lstrip("."))

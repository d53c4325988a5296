"""What Hydra says of a config that does not compose, in one line with the nearest names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from toolkit.config import files as configs
from toolkit.config.check import keys_at
from toolkit.config.store import compose_unchecked
from toolkit.errors import InputError, unknown_name
from toolkit.files.text import first_line

LOST = re.compile(r"(?:In '(?P<by>[^']*)': )?Could not find '(?P<path>[^']*)'")
STRUCT = re.compile(r"Could not override '([^']*)'")
GONE = re.compile(r"Could not delete from config\. (?:The value of )?'([^']*)'")
THERE = re.compile(r"Could not append to config\. An item is already at '([^']*)'")


def composed(config_name: str, overrides: Sequence[str] = ()) -> Any:
    """conf/<config_name>.yaml with these overrides. Raises InputError, one line, if it does not compose."""
    from hydra.errors import HydraException

    try:
        return compose_unchecked(config_name, overrides)
    except (HydraException, ValueError) as error:
        raise error if isinstance(error, InputError) else complaint(error, config_name, overrides) from error
    except (TypeError, AttributeError, KeyError, AssertionError, RecursionError) as error:  # a choice that is no name
        odd = [word for word in overrides if configs.choices(word.lstrip("+~").partition("=")[0].partition("@")[0])]
        raise InputError(
            f"configuration {config_name}: expected names as choices of config groups, got {' '.join(odd) or first_line(error)}"
        ) from error


def complaint(error: Exception, config_name: str, overrides: Sequence[str]) -> InputError:
    """The line for an error that composing conf/<config_name>.yaml with these overrides raised."""
    from hydra.errors import OverrideParseException

    text = str(error)
    if match := LOST.search(text):
        group, _, name = match["path"].rpartition("/")
        by = "" if match["by"] in (None, config_name) else f"(named in {match['by']}.yaml)"
        return unknown_name(group or "config", name, configs.choices(group), by)
    if text.startswith("Cannot find primary config"):
        return unknown_name("config", config_name, configs.choices("."))
    if match := THERE.search(text):
        return InputError(f"{match[1]} is in the config already: expected {match[1]}=VALUE, without the +")
    if match := STRUCT.search(text) or GONE.search(text):
        return _no_such_key(match[1], config_name, overrides)
    if isinstance(error, OverrideParseException):
        key, sign, _ = error.override.partition("=")
        hint = f" (brackets and quotes come in pairs; text with one is written '{key}=\"TEXT\"')" if sign else ""
        return InputError(f"expected KEY=VALUE, got {error.override!r}{hint}")
    if text.startswith("Ambiguous value"):
        word = text.partition("'")[2].partition("'")[0]
        key, _, value = word.partition("=")
        return InputError(
            f"{word}: expected one value; a list is written {key}=[{value}], and -m sweeps over the values"
        )
    if text.startswith("Config group override must be"):
        nulls = [
            word for word in overrides if word.endswith("=null") and configs.choices(word.partition("=")[0].lstrip("+"))
        ]
        return InputError(f"expected a choice of a config group, got {', '.join(nulls) or 'null'}")
    return InputError(f"configuration {config_name}: {' '.join(text.split())}")


def _no_such_key(key: str, config_name: str, overrides: Sequence[str]) -> InputError:
    """The key is not in the config: it could be added, or there is none of that name."""
    others = [word for word in overrides if word.lstrip("+~").partition("=")[0].partition("@")[0] != key]
    try:
        before: Any = configs.plain(composed(config_name, others)) if len(others) < len(overrides) else {}
    except (InputError, ValueError):
        before = {}
    parent, _, name = key.rpartition(".")
    names = list(keys_at(before, config_name, parent))
    if any(word.startswith(f"{key}={{") for word in overrides) and configs.choices(key):
        return InputError(f"{key} is chosen by name: for a mapping of your own expected ~{key} '+{key}={{...}}'")
    if name in names or (not parent and configs.choices(key)):
        return InputError(f"{key} is not in the config yet: expected +{key}=VALUE, with a +")
    return unknown_name("key", key, [f"{parent}.{other}".lstrip(".") for other in names])

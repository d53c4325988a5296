"""Composing by Hydra: the defaults of every command are in a ConfigStore, choices of groups in `conf/`.

What has been composed is kept. A Hydra application that is running in this process is neither asked nor changed.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

from toolkit.config import classes, files, papers, parts
from toolkit.config.commands import command_of, defaults_of, keys_of, section_in
from toolkit.config.files import LOCK, choices, kept, plain, user_folders
from toolkit.config.notes import Keys
from toolkit.config.values import is_node
from toolkit.errors import InputError, unknown_name
from toolkit.files.text import first_line

if TYPE_CHECKING:
    from hydra.core.config_store import ConfigStore

KEYS = "_keys.yaml"  # after a command's name
HYDRAS = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")
NO_KEY = re.compile(r"(?:Could not override|Could not delete from config\.(?: The value of)?) '([^']*)'")
NO_CHOICE = re.compile(r"(?:In '(?P<by>[^']*)': )?Could not find '(?P<path>[^']*)'")
NO_PLUS = re.compile(r"Could not append to config\. An item is already at '([^']*)'")


def register(store: ConfigStore, config_name: str) -> None:
    """Put the keys of a command, with their defaults, into a store of Hydra's, and those that were composed before."""
    _store().load(f"{config_name}{KEYS}")
    store.repo |= {name: node for name, node in _store().repo.items() if name.endswith(KEYS)}


def composed(config_name: str, overrides: Sequence[str] = ()) -> Any:
    """The config conf/<config_name>.yaml with these overrides, unchecked: a copy for every call.

    Raises InputError, one line, if it does not compose.
    """
    from hydra.errors import HydraException

    try:
        if any(word.startswith("hydra.searchpath=") for word in overrides):  # files there are not watched
            with LOCK:
                return _compose(config_name, *overrides)
        return deepcopy(kept(_compose, config_name, *overrides))
    except InputError:
        raise
    except (HydraException, ValueError) as error:
        raise complaint(error, config_name, overrides) from error
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # of a config that no file can have
            raise
        raise unknown_name("config", config_name, choices(".")) from error
    except (TypeError, AttributeError, KeyError, AssertionError, RecursionError) as error:  # a choice that is no name
        odd = [word for word in overrides if choices(word.lstrip("+~").partition("=")[0].partition("@")[0])]
        raise InputError(
            f"configuration {config_name}: expected names as choices of config groups, got {' '.join(odd) or first_line(error)}"
        ) from error


def _compose(config_name: str, *overrides: str) -> Any:
    """What `hydra.compose` returns, by a loader of its own."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import ConfigRepository
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin
    from hydra.types import RunMode
    from omegaconf import open_dict

    store, folders = _store(), (files.CONF, *user_folders())
    parts.register(store, folders)
    if any(word.lstrip("+").startswith(papers.CHOSEN) for word in overrides):
        papers.register(store, overrides, folders)

    class Sources(ConfigRepository):
        def initialize_sources(self, config_search_path: Any) -> None:
            super().initialize_sources(config_search_path)
            self.get_schema_source().store = store  # type: ignore[attr-defined]

    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    path.append("main", f"file://{files.CONF}")
    for folder in user_folders():
        path.append("user", f"file://{folder}")
    if any(word.lstrip("+~").startswith("hydra/") for word in overrides):  # hydra/job_logging=colorlog
        for plugin in Plugins.instance().discover(SearchPathPlugin):
            plugin().manipulate_search_path(path)  # type: ignore[attr-defined]
    path.append("schema", "structured://")
    loader = ConfigLoaderImpl(path)
    loader.repository = Sources(path)
    config = loader.load_configuration(config_name, [*overrides], RunMode.RUN, from_shell=False)
    with open_dict(config):
        del config["hydra"]
    return config


@cache
def _store() -> ConfigStore:
    """A store of configs with Hydra's own entries and the keys of every command, and nothing of an application's.

    A command's keys are put there when a config names them: one of many commands is composed.
    """
    from hydra.conf import HydraConf
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    class Store(ConfigStore):
        def __deepcopy__(self, memo: Any) -> Store:
            return self  # Hydra copies its sources, and only reads them

        def _open(self, path: str) -> Any:
            section = command_of(path.removesuffix(KEYS))
            if path.endswith(KEYS) and path not in self.repo and section is not None:
                self.store(path, defaults_of(section))
            return super()._open(path)

    Plugins.instance()  # launchers and sweepers enter themselves
    store = Store.__new__(Store)  # calling the class would enter it among Hydra's singletons
    store.repo = {"hydra": dict(ConfigStore.instance().repo["hydra"])}
    store.store("config", HydraConf(), group="hydra", provider="hydra")
    return store


# -- what Hydra says of a config that does not compose -----------------------------------------------------------------


def complaint(error: Exception, config_name: str, overrides: Sequence[str]) -> InputError:
    """The line for an error that composing conf/<config_name>.yaml with these overrides raised."""
    from hydra.errors import OverrideParseException

    text = str(error)
    if match := NO_CHOICE.search(text):
        group, _, name = match["path"].rpartition("/")
        by = "" if match["by"] in (None, config_name) else f"(named in {match['by']}.yaml)"
        return unknown_name(group or "config", name, choices(group), by)
    if text.startswith("Cannot find primary config"):
        return unknown_name("config", config_name, choices("."))
    if match := NO_PLUS.search(text):
        return InputError(f"{match[1]} is in the config already: expected {match[1]}=VALUE, without the +")
    if match := NO_KEY.search(text):
        return _no_such_key(match[1], config_name, overrides)
    if isinstance(error, OverrideParseException):
        key, sign, _ = error.override.partition("=")
        hint = f" (brackets and quotes come in pairs; text with one is written '{key}=\"TEXT\"')" if sign else ""
        return InputError(f"expected KEY=VALUE, got {error.override!r}{hint}")
    if text.startswith("Ambiguous value"):
        word = text.partition("'")[2].partition("'")[0]
        key, _, value = word.partition("=")
        return InputError(f"{word}: expected one value; a list is written {key}=[{value}], and -m sweeps over values")
    if text.startswith("Config group override must be"):
        nulls = [word for word in overrides if word.endswith("=null") and choices(word.partition("=")[0].lstrip("+"))]
        return InputError(f"expected a choice of a config group, got {', '.join(nulls) or 'null'}")
    return InputError(f"configuration {config_name}: {' '.join(text.split())}")


def _no_such_key(key: str, config_name: str, overrides: Sequence[str]) -> InputError:
    """The key is not in the config: it could be added, or there is none of that name."""
    others = [word for word in overrides if word.lstrip("+~").partition("=")[0].partition("@")[0] != key]
    try:
        below: Any = plain(composed(config_name, others)) if len(others) < len(overrides) else {}
    except ValueError:
        below = {}
    parent, _, name = key.rpartition(".")
    section = command_of(config_name)
    declared, appended = Keys() if section is None else keys_of(section), getattr(section, "appended", ())
    for part in filter(None, parent.split(".")):
        section = section_in(declared.keys[part].annotation) if part in declared.keys else None
        declared, appended = Keys() if section is None else keys_of(section), ()
        value = below.get(part)
        below = value if isinstance(value, Mapping) else {}
    if is_node(below) and not classes.is_misspelt(name, below):  # a class is imported to know all of its keys
        declared = classes.keys_of(str(below["_target_"])) or Keys()
    names = sorted({*below, *declared.keys, *appended} - {*HYDRAS})
    if any(word.startswith(f"{key}={{") for word in overrides) and choices(key):
        return InputError(f"{key} is chosen by name: for a mapping of your own expected ~{key} '+{key}={{...}}'")
    if name in names or (not parent and choices(key)):
        return InputError(f"{key} is not in the config yet: expected +{key}=VALUE, with a +")
    if not names:  # what is not there is the parent
        return unknown_name("key", parent, _sections(plain(composed(config_name, others))))
    return unknown_name("key", key, [f"{parent}.{other}".lstrip(".") for other in names])


def _sections(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted names of all mappings in a config."""
    inside = [(f"{prefix}{name}", value) for name, value in values.items() if isinstance(value, Mapping)]
    return [each for name, value in inside for each in (name, *_sections(value, f"{name}."))]

"""Composing by Hydra, unchecked: the defaults of every command are in a ConfigStore, choices of groups in `conf/`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import TYPE_CHECKING, Any

from toolkit.config import files, papers, removed
from toolkit.config.commands import COMMANDS, defaults_of

if TYPE_CHECKING:
    from hydra.core.config_store import ConfigStore

STRUCT = re.compile(r"Could not override '([^']*)'")
GONE = re.compile(r"Could not delete from config\. (?:The value of )?'([^']*)'")
_COMPOSED: dict[tuple[object, ...], Any] = {}


def register(store: ConfigStore) -> None:
    """Put the keys of every command, with their defaults, into a store of Hydra's: `decode_keys` and so on."""
    for name, section in COMMANDS.items():
        store.store(f"{name}_keys", defaults_of(section))


def compose_unchecked(config_name: str, overrides: Sequence[str] = ()) -> Any:
    """The composed config `conf/<config_name>.yaml`: a copy for every call.

    It is composed once per process and set of overrides, and again when a configuration file has changed. A Hydra
    application that is running in this process is neither asked nor changed.
    Raises what Hydra raises: HydraException, ValueError.
    """
    if any(word.startswith("hydra.searchpath=") for word in overrides):  # files there are not watched
        with files.LOCK:
            return _composed(config_name, overrides)
    return deepcopy(files.cached(_COMPOSED, (config_name, *overrides), lambda: _composed(config_name, overrides)))


def removed_words(config_name: str, overrides: Sequence[str]) -> set[str]:
    """Those of the overrides whose key is gone and whose value changed nothing (`toolkit.config.removed`)."""
    with files.LOCK:
        left_out = set[str]()
        if any(removed.is_named(config_name, word) for word in overrides):
            _composed(config_name, overrides, left_out)
        return left_out


def _composed(config_name: str, overrides: Sequence[str], left_out: set[str] | None = None) -> Any:
    """What `hydra.compose` returns, by a loader of its own: `GlobalHydra` and `ConfigStore` are the application's."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import ConfigRepository
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra.core.plugins import Plugins
    from hydra.errors import ConfigCompositionException
    from hydra.plugins.search_path_plugin import SearchPathPlugin
    from hydra.types import RunMode
    from omegaconf import open_dict

    store = _store()
    if any(word.lstrip("+").startswith(papers.CHOSEN) for word in overrides):
        papers.register(store, overrides, (files.CONF, *files.user_folders()))

    class Sources(ConfigRepository):
        def initialize_sources(self, config_search_path: Any) -> None:
            super().initialize_sources(config_search_path)
            self.get_schema_source().store = store  # type: ignore[attr-defined]

    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    path.append("main", f"file://{files.CONF}")
    for folder in files.user_folders():
        path.append("user", f"file://{folder}")
    if any(word.lstrip("+~").startswith("hydra/") for word in overrides):  # hydra/job_logging=colorlog
        for plugin in Plugins.instance().discover(SearchPathPlugin):
            plugin().manipulate_search_path(path)  # type: ignore[attr-defined]
    path.append("schema", "structured://")
    loader = ConfigLoaderImpl(path)
    loader.repository = Sources(path)
    words = [*overrides]
    while True:
        try:
            config = loader.load_configuration(config_name, words, RunMode.RUN, from_shell=False)
            break
        except ConfigCompositionException as error:
            match, before = STRUCT.search(str(error)) or GONE.search(str(error)), words
            words = removed.without(config_name, match[1], words) if match else words
            if words == before:
                raise
    if left_out is not None:
        left_out.update({*overrides} - {*words})
    with open_dict(config):
        del config["hydra"]
    removed.drop_removed(config_name, config)
    return config


@cache
def _store() -> ConfigStore:
    """A store of configs with Hydra's own entries and the keys of every command, and nothing of an application's."""
    from hydra.conf import HydraConf
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    class Store(ConfigStore):
        def __deepcopy__(self, memo: Any) -> Store:
            return self  # Hydra copies its sources, and only reads them

    Plugins.instance()  # launchers and sweepers enter themselves
    store = Store.__new__(Store)  # calling the class would enter it among Hydra's singletons
    store.repo = {"hydra": dict(ConfigStore.instance().repo["hydra"])}
    store.store("config", HydraConf(), group="hydra", provider="hydra")
    register(store)
    return store

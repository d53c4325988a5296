"""Composing by Hydra, unchecked: the defaults of every command are in its ConfigStore, choices of groups in `conf/`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.config import files, papers
from toolkit.config.commands import COMMANDS, defaults_of

MOST = 256  # configs and methods that are kept; composing one takes tens of milliseconds
_COMPOSED: dict[tuple[object, ...], Any] = {}


@cache
def register() -> None:
    """Put the keys of every command, with their defaults, into Hydra's ConfigStore: `decode_keys` and so on."""
    from hydra.core.config_store import ConfigStore

    for name, section in COMMANDS.items():
        ConfigStore.instance().store(f"{name}_keys", defaults_of(section))


def compose_unchecked(config_name: str, overrides: Sequence[str] = ()) -> Any:
    """The composed config `conf/<config_name>.yaml`, inside or outside a running Hydra application: a copy for every call.

    It is composed once per process and set of overrides, and again when a configuration file has changed.
    Raises what Hydra raises: HydraException, ValueError.
    """
    if any(word.startswith("hydra.searchpath=") for word in overrides):  # files there are not watched
        return _composed(config_name, overrides)
    return deepcopy(cached(_COMPOSED, (config_name, *overrides), lambda: _composed(config_name, overrides)))


def cached(results: dict[tuple[object, ...], Any], arguments: tuple[object, ...], make: Callable[[], Any]) -> Any:
    """What `make` returned for these arguments and configuration files; it is called once for them."""
    from hydra.core.global_hydra import GlobalHydra

    newest = 0  # when a config file last changed: of the folders, where files come and go, and of the files
    level = [files.CONF, *files.user_folders()]
    for _ in range(3):  # roots, groups, and the bases inside groups
        for folder in level:
            newest = max(newest, folder.stat().st_mtime_ns, *(entry.stat().st_mtime_ns for entry in os.scandir(folder)))
        level = [Path(entry.path) for folder in level for entry in os.scandir(folder) if entry.is_dir()]
    hydra = GlobalHydra.instance().hydra  # its search path counts for what is composed
    key = (arguments, files.user_folders(), hydra and id(hydra), newest)
    if key not in results:
        if len(results) >= MOST:
            results.clear()
        results[key] = make()
    return results[key]


def _composed(config_name: str, overrides: Sequence[str]) -> Any:
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    register()
    words = [*overrides]
    papers.register(words, (files.CONF, *files.user_folders()))
    if files.user_folders() and not any(word.startswith("hydra.searchpath=") for word in words):
        folders = ",".join(files.quoted(f"file://{folder}") for folder in files.user_folders())
        words.append(files.settable(f"hydra.searchpath=[{folders}]"))
    if GlobalHydra.instance().is_initialized():
        return hydra.compose(config_name=config_name, overrides=words)
    with hydra.initialize_config_dir(config_dir=str(files.CONF), version_base="1.3"):
        return hydra.compose(config_name=config_name, overrides=words)

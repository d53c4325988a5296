"""Composing by Hydra, unchecked: the defaults of every command are in its ConfigStore, choices of groups in `conf/`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from toolkit.config import files, papers
from toolkit.config.commands import COMMANDS, defaults_of


@cache
def register() -> None:
    """Put the keys of every command, with their defaults, into Hydra's ConfigStore: `decode_keys` and so on."""
    from hydra.core.config_store import ConfigStore

    for name, section in COMMANDS.items():
        ConfigStore.instance().store(f"{name}_keys", defaults_of(section))


def compose_unchecked(config_name: str, overrides: Sequence[str] = ()) -> Any:
    """The composed config `conf/<config_name>.yaml`, inside or outside a running Hydra application.

    Raises what Hydra raises: HydraException, ValueError.
    """
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

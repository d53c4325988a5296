"""Configuration as a library: find `conf/`, compose a config by name, build what it describes.

`conf/` lies beside the packages, in the source tree and in an installed wheel alike; it is always addressed by its
absolute path, because a user's own folder of that name would shadow a package path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, unknown_name

CONF = Path(__file__).resolve().parent.parent / "conf"


def choices(group: str) -> list[str]:
    """Names that a config group offers."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def compose(config_name: str, overrides: Sequence[str] = ()) -> Any:
    """The composed config `conf/<config_name>.yaml`, inside or outside a running Hydra application."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    try:
        if GlobalHydra.instance().is_initialized():
            return hydra.compose(config_name=config_name, overrides=list(overrides))
        with hydra.initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            return hydra.compose(config_name=config_name, overrides=list(overrides))
    except HydraException as error:
        raise InputError(f"configuration {config_name}: {' '.join(str(error).split())}") from error


def instantiate(config: Any, **extra: Any) -> Any:
    """Build what a config describes; an InputError raised inside comes out as itself."""
    import hydra
    from hydra.errors import InstantiationException

    try:
        return hydra.utils.instantiate(config, **extra)
    except InstantiationException as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, InputError):
                raise cause from None
            cause = cause.__cause__
        raise InputError(" ".join(str(error).split())) from error


def method(name: str, overrides: Sequence[str] = (), head: str | None = None) -> Any:
    """The method `conf/method/<name>.yaml`, with overrides relative to it ("policy.threshold=.3").

    Another policy or rule is chosen as on the command line: "rule@method.rule=block".
    """
    return instantiate(method_config(name, overrides, head))


def method_config(name: str, overrides: Sequence[str] = (), head: str | None = None) -> Any:
    """What `method` builds from: the composed config. Raises InputError with the nearest names for an unknown one."""
    if name not in choices("method"):
        raise unknown_name("method", name, choices("method"))
    prefixed = [override if "@" in override.partition("=")[0] else f"method.{override}" for override in overrides]
    # Quoted as JSON, a path may hold anything (epoch=3, blanks).
    return compose("method_only", [f"method={name}", f"head={json.dumps(head, ensure_ascii=False)}", *prefixed]).method


def plain(config: Any) -> Any:
    """A config as plain containers, interpolations resolved."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as {"a.b": value}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat

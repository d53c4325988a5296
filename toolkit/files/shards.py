"""The files of a GGUF model that was split: NAME-00001-of-00003.gguf and so on."""

from __future__ import annotations

import re
from pathlib import Path

from toolkit.errors import InputError

ENDING = ".gguf"
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


def is_gguf(path: Path | str) -> bool:
    """Whether a name is that of a GGUF file."""
    return str(path).lower().endswith(ENDING)


def shards(path: Path) -> list[Path]:
    """All files of the model of which one is named. Raises InputError naming the first that is missing."""
    match = SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    paths = [path.with_name(f"{stem}-{i:05d}-of-{count}{path.suffix}") for i in range(1, int(count) + 1)]
    for shard in paths:
        if not shard.is_file():
            raise InputError(f"{path} is one of {int(count)} shards: expected {shard.name} beside it, found none")
    return paths

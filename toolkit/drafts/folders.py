"""Which kind of draft a folder holds; its config and weights, by the names of `speculators`.

Kinds that are read here state what claims a folder (`DraftKind`). OTHERS are known by name, to be refused by name.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.drafts.kinds import SEPARATE, DraftKind, all_kinds, reading_kinds
from toolkit.errors import InputError
from toolkit.files.text import first_line

CONFIG = "config.json"
OTHERS = {  # by the names of classes and model types
    "P-EAGLE": r"p-?eagle",
    "Medusa": r"medusa",
    "Hydra": r"^hydra",
    "MTP": r"nextn|mtp",
    "MLP speculator": r"mlp_?speculator",
    "EAGLE-1": r"^eagle$|^eagle\w*forcausallm$|forcausallmeagle$",
}
OTHERS_BY_KEY = {"medusa_num_heads": "Medusa", "hydra_num_heads": "Hydra"}
SHARDS = (("model.safetensors", "model-*.safetensors"), ("pytorch_model.bin", "pytorch_model-*.bin"))


def kind_in(source: str | Path | None) -> DraftKind:
    """The kind of draft in a folder; the separate one for models like any other, names of the hub, and None.

    Raises InputError for a draft of a kind that is not read here, and says which; for a config that is not JSON, and where
    weights decide, for files that are not whole.
    """
    folder = Path(source or "")
    kind = _claimed(folder) if source is not None and (folder / CONFIG).is_file() else SEPARATE
    if isinstance(kind, DraftKind):
        return kind
    names = ", ".join(readable.name for readable in all_kinds())
    raise InputError(
        f"{folder} holds a draft of the kind {kind}, which is not supported: expected a causal language model with the "
        f"target's tokenizer, or {reading_kinds()}; toolkit.distill trains one (kind={names})"
    )


def _claimed(folder: Path) -> DraftKind | str:
    """The kind that claims a folder, or the name of one that is not read here."""
    config = read_config(folder)
    if stated := config.get("speculators_model_type"):
        return _named([str(stated)]) or str(stated)
    classes = config.get("architectures") or []
    words = [*(classes if isinstance(classes, list) else [classes]), config.get("model_type", "")]
    if named := _named(list(map(str, words))):
        return named
    if claimed := next((kind for kind in all_kinds() if any(map(config.get, kind.keys))), None):
        return claimed
    if other := next((name for key, name in OTHERS_BY_KEY.items() if config.get(key)), None):
        return other
    return _claimed_by_weights(folder) if config.get("num_hidden_layers", 1) == 1 else SEPARATE


def _named(words: Sequence[str]) -> DraftKind | str | None:
    """The first kind that one of some names is of."""

    def matches(pattern: str) -> bool:
        return any(re.search(pattern, word, re.IGNORECASE) for word in words)

    read_here = next((kind for kind in all_kinds() if matches(kind.names)), None)
    return read_here or next((name for name, pattern in OTHERS.items() if matches(pattern)), None)


def _claimed_by_weights(folder: Path) -> DraftKind | str:
    names = read_weights(folder).keys()  # memory-mapped: nothing else is read
    for kind in all_kinds():
        if kind.weights and kind.weights <= names:
            return kind
    if names and all(name.startswith("mtp") for name in names):
        return "MTP"
    if "fc.weight" in names and "lm_head.weight" not in names and any(name.startswith("layers.0.") for name in names):
        return "EAGLE-1"
    return SEPARATE


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json. Raises InputError unless it is an object in JSON."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder / CONFIG} cannot be read: {first_line(error)}; expected a whole file in JSON"
        ) from error
    if not isinstance(config, dict):
        raise InputError(f"{folder / CONFIG}: expected an object in JSON, got {type(config).__name__}")
    return config


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder, by the names of `speculators`. Raises InputError for files that are not whole."""
    state: dict[str, Tensor] = {}
    for path in _files(folder):
        try:
            state |= _tensors(path)
        except Exception as error:  # whatever a file that is cut off makes its reader raise
            raise InputError(f"{path} is not a whole file of weights: {first_line(error)}; copy it again") from error
    renamed = {}
    for name, tensor in state.items():
        name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
        if not name.endswith("rotary_emb.inv_freq"):  # of old versions, a function of the config
            if name in renamed:
                raise InputError(f"{folder} holds {name} twice, under two names")
            renamed[name] = tensor
    return renamed


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, memory-mapped."""
    from safetensors.torch import load_file

    if path.suffix == ".safetensors":
        return load_file(path)
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise InputError("expected tensors by name")
    return content


def _files(folder: Path) -> Sequence[Path]:
    """The files with a folder's weights: one, or those that an index names, or all shards; safetensors first."""
    for single, shards in SHARDS:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / f"{single}.index.json").is_file():
            return [folder / name for name in sorted(set(_index(folder / f"{single}.index.json").values()))]
        if paths := sorted(folder.glob(shards)):
            return paths
    return []


def _index(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text("utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}; expected the index of a checkpoint") from error

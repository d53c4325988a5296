"""Heads in the layout of the published SpecDec++ code, rewritten once in ours.

    config.json                            {"hidden_size": D, "num_layers": depth}
    model.safetensors, pytorch_model.bin   model.0.linear.{weight, bias}: one block, applied `depth` times; and
                                           model.{depth}.{weight, bias}: a read-out of two classes, class 1 accepts

Such files hold each tensor of the one block once, or under a name per block. Blocks that differ are refused, because another
program must have written them. The files name neither the draft nor w_rej, so both stay unknown here, and only the size of the
draft's states is compared. The probabilities are taken as the head gives them, as in the published decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.acceptance.head import AcceptanceHead
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash, file_hash, read_json
from toolkit.files.digests import cache_folder
from toolkit.files.tensors import load_tensors
from toolkit.files.text import first_line

CONFIG, FILES = "config.json", ("model.safetensors", "pytorch_model.bin")
PARTS = ("weight", "bias")
HINT = "download the head again"


def is_published(folder: Path) -> bool:
    """Whether a folder holds a head in the published layout."""
    try:
        if not (folder / CONFIG).is_file() or weights_of(folder) is None:
            return False
        config = read_json(folder / CONFIG)
    except (OSError, ValueError, InputError):  # a name that no file can have; what is not JSON
        return False
    return (
        isinstance(config, dict) and "hidden_size" in config and "architectures" not in config and "head" not in config
    )


def weights_of(folder: Path) -> Path | None:
    """The file of the weights."""
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def rewritten(folder: Path) -> Path:
    """The head in this toolkit's layout, in the user's cache: made at the first call. Raises InputError."""
    path = weights_of(folder)
    if path is None:
        raise InputError(f"{folder}: expected {' or '.join(FILES)}, found neither")
    digest = content_hash([file_hash(path), file_hash(folder / CONFIG)])
    cached = cache_folder() / "published" / f"{folder.resolve().name}-{digest}"
    if not AcceptanceHead.is_in(cached):
        head = head_of(_tensors(path), read_json(folder / CONFIG), path)
        head.save(cached, {"name": folder.resolve().name, "source": str(folder)})
        print(
            f"{folder}: a head of the published SpecDec++ code (its draft and w_rej are not recorded), read as {cached}"
        )
    return cached


def head_of(state: Mapping[str, Tensor], config: Mapping[str, Any], path: Path) -> AcceptanceHead:
    """The head of published weights. Raises InputError if they do not have the layout that the config says."""
    size, depth = config.get("hidden_size"), config.get("num_layers", 0)
    if not isinstance(size, int) or not isinstance(depth, int) or size < 1 or depth < 0:
        raise InputError(
            f"{path.with_name(CONFIG)}: expected whole numbers hidden_size and num_layers, got {dict(config)}"
        )
    shapes = {f"model.{i}.linear.{part}": (size, size)[: 2 - j] for i in range(depth) for j, part in enumerate(PARTS)}
    shapes |= {f"model.{depth}.{part}": (2, size)[: 2 - j] for j, part in enumerate(PARTS)}
    for name, tensor in state.items():
        if name not in shapes or tuple(tensor.shape) != shapes[name]:
            expected = f"shape {shapes[name]}" if name in shapes else f"the tensors of {depth} blocks and a read-out"
            raise InputError(f"{path}: expected {expected}, got {name} of shape {tuple(tensor.shape)}")
    first = {part: f"model.0.linear.{part}" for part in PARTS} if depth else {}
    missing = [name for name in (*first.values(), *(f"model.{depth}.{part}" for part in PARTS)) if name not in state]
    if missing:
        raise InputError(f"{path}: expected {', '.join(missing)}, found {', '.join(state) or 'no tensor'}")
    for name, tensor in state.items():
        block = first.get(name.rpartition(".")[2]) if ".linear." in name else None
        if block is not None and not torch.equal(tensor, state[block]):
            raise InputError(f"{path}: expected one block applied {depth} times, but {name} differs from {block}")
    return AcceptanceHead.from_published({name: tensor.float() for name, tensor in state.items()}, depth)


def _tensors(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return load_tensors(path, "file of a published head's weights", HINT)[0]
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and torch each raise their own errors for other files
        raise InputError(f"{path} is not a file of tensors: {first_line(error)}; {HINT}") from None
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise InputError(f"{path}: expected a mapping of names to tensors; {HINT}")
    return dict(tensors)

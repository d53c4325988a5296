"""Tensors in safetensors files with a checksum: a changed bit, a truncated or an empty file is found when it is read.

The checksum is SHA-256 over all tensors and over the file's other metadata, in which it lies.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from toolkit.errors import InputError
from toolkit.files.atomic import write_atomic
from toolkit.files.text import first_line

CHECKSUM, KEY = "sha256", "toolkit"
HINT = "delete it and run the command that made it again"


def save_tensors(path: Path | str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    """One safetensors file with its checksum, whole or not at all."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    facts = {**(metadata or {})}
    facts[CHECKSUM] = checksum(held, facts)
    header = {KEY: json.dumps(facts, sort_keys=True)}  # one key: the library writes several in any order
    return write_atomic(path, lambda temporary: save_file(held, temporary, metadata=header))


def num_weights(path: Path) -> int:
    """How many numbers a file's tensors hold, by its header."""
    with safe_open(path, framework="pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def load_tensors(
    path: Path | str, what: str = "file of tensors", hint: str = HINT
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors, memory-mapped, and metadata. Files of other programs may lack a checksum.

    Raises InputError, one line that names the file, if it is missing, empty, cut short or not what was written.
    """
    path = Path(path)
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path} is empty: expected a {what}; {hint}")
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            header = dict(file.metadata() or {})
        metadata: dict[str, str] = json.loads(header[KEY]) if KEY in header else {}
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"expected a {what} at {path}, found none") from None
    except Exception as error:  # safetensors raises its own kinds
        raise InputError(f"{path} is not a whole {what}: {first_line(error)}; {hint}") from None
    recorded = metadata.pop(CHECKSUM, None)
    foreign = KEY not in header and set(header) <= {"format"}
    if not foreign and recorded != checksum(tensors, metadata):
        raise InputError(f"{path} is damaged: its checksum does not match; {hint}")
    return tensors, metadata


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of tensors and metadata, independent of their order."""
    sha = hashlib.sha256(json.dumps(sorted((k, v) for k, v in metadata.items() if k != CHECKSUM)).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()

"""What a GGUF file holds: its keys and its tensors, of all shards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.files.shards import ENDING, shards
from toolkit.files.text import first_line


@dataclass(frozen=True)
class GGUFFile:
    """Keys and tensors of a GGUF file.

    keys     every key's value
    tensors  gguf's readers of the tensors by name; their data stays on the disk
    types    every key's gguf types, as a writer takes them
    """

    path: Path
    keys: Mapping[str, Any]
    tensors: Mapping[str, Any]
    types: Mapping[str, tuple[Any, Any]]

    @classmethod
    def read(cls, path: Path) -> GGUFFile:
        """The file at a path, with all its shards. Raises InputError for a file that is damaged, cut off or no GGUF."""
        import gguf

        keys: dict[str, Any] = {}
        types: dict[str, tuple[Any, Any]] = {}
        tensors: dict[str, Any] = {}
        paths = shards(path)
        for i, shard in enumerate(paths):
            try:
                reader = gguf.GGUFReader(shard)
                own = {name: field.contents() for name, field in reader.fields.items()}
            except Exception as error:  # what damaged bytes make the reader raise
                raise InputError(
                    f"{shard} is no whole GGUF file, it is damaged or cut off: {first_line(error)}"
                ) from error
            number, count = own.get("split.no", 0), own.get("split.count", 0) or 1
            if (number, count) != (i, len(paths)):
                raise InputError(
                    f"{shard} says that it is shard {number + 1} of {count}: expected its name to end with "
                    f"-{number + 1:05d}-of-{count:05d}{ENDING}, and the others beside it"
                )
            for name, field in reader.fields.items():
                keys.setdefault(name, own[name])
                types.setdefault(name, (field.types[0], field.types[1] if len(field.types) > 1 else None))
            for tensor in reader.tensors:
                if tensor.name in tensors:
                    raise InputError(f"{shard} holds {tensor.name}, which an earlier shard holds, too")
                tensors[tensor.name] = tensor
        if len(paths) > 1 and keys.get("split.tensors.count", len(tensors)) != len(tensors):
            raise InputError(f"{path}: its shards hold {len(tensors)} tensors, expected {keys['split.tensors.count']}")
        if not isinstance(keys.get("general.architecture"), str):
            raise InputError(f"{path} does not say which architecture it holds (general.architecture)")
        return cls(path, keys, tensors, types)

    @property
    def architecture(self) -> str:
        return str(self.keys["general.architecture"])

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key of the architecture: `rope.freq_base` is `llama.rope.freq_base`."""
        return self.keys.get(f"{self.architecture}.{name}", default)

    def names(self, pattern: str) -> list[str]:
        """The tensors whose whole name matches a pattern."""
        return [name for name in self.tensors if re.fullmatch(pattern, name)]

    def tensor(self, name: str) -> Tensor | None:
        """A tensor in float32, None if there is no such one."""
        from gguf import quants

        if name not in self.tensors:
            return None
        entry = self.tensors[name]
        return torch.from_numpy(np.array(quants.dequantize(entry.data, entry.tensor_type), dtype=np.float32))

    def link(self, path: Path) -> None:
        """Put the whole file at another path: a link, or one file of all shards."""
        paths = shards(self.path)
        if len(paths) == 1:
            path.symlink_to(self.path.absolute())
            return
        self.copy(path)

    def copy(self, path: Path, float16: bool = False) -> None:
        """Write all of it to one file. float16: matrices in that format, whatever they are stored in."""
        import gguf

        writer = gguf.GGUFWriter(path, self.architecture)
        keys = {**self.keys, **({"general.file_type": int(gguf.LlamaFileType.MOSTLY_F16)} if float16 else {})}
        for name, value in keys.items():
            if not name.startswith(("GGUF.", "split.")) and name != "general.architecture":
                writer.add_key_value(name, value, *self.types.get(name, (gguf.GGUFValueType.UINT32, None)))
        for name, tensor in self.tensors.items():
            if float16 and len(tensor.shape) > 1:
                writer.add_tensor(name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float16))
            else:
                writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)


def finish(writer: Any) -> None:
    """Write what a gguf writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""What every trained head shares: two files, written whole and read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors.torch import load_file, save_file
from torch import nn

from toolkit.errors import InputError
from toolkit.io import read_json, write_atomic, write_json


class SavedHead(nn.Module):
    """A module whose constructor arguments are its attributes of the same names (`arguments`).

    weights_file, config_file  names within the head's folder; what: how messages call it
    summary, method            for its card: what it predicts, and a method that uses it
    """

    weights_file: ClassVar[str]
    config_file: ClassVar[str]
    what: ClassVar[str]
    summary: ClassVar[str]
    method: ClassVar[str]
    arguments: ClassVar[tuple[str, ...]]

    @property
    def config(self) -> dict[str, Any]:
        """What `__init__` needs to build it again."""
        return {name: getattr(self, name) for name in self.arguments}

    def save(self, folder: Path | str, about: Mapping[str, Any] | None = None) -> Path:
        """Write weights and config; `about` records the draft's fingerprint, sampling, metrics and so on."""
        folder = Path(folder)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        write_atomic(folder / self.weights_file, lambda path: save_file(state, path))
        write_json(folder / self.config_file, {"head": self.config, **(about or {})})
        return folder

    @classmethod
    def is_in(cls, folder: Path | str) -> bool:
        """Whether the folder holds one."""
        return all((Path(folder) / name).exists() for name in (cls.weights_file, cls.config_file))

    @classmethod
    def load(cls, folder: Path | str) -> tuple[Self, dict[str, Any]]:
        """The head and what was recorded about it. Weights are loaded strictly. Raises InputError."""
        folder = Path(folder)
        if not cls.is_in(folder):
            raise InputError(f"expected {cls.what} ({cls.config_file} and {cls.weights_file}) in {folder}, found none")
        about = read_json(folder / cls.config_file)
        try:
            head = cls(**about["head"])
            weights = load_file(folder / cls.weights_file)
            head.load_state_dict({k: v.float() for k, v in weights.items()}, strict=True)
        except (KeyError, TypeError, RuntimeError) as error:
            raise InputError(f"{folder} does not hold {cls.what} as a whole: {str(error).splitlines()[0]}") from error
        return head.eval().requires_grad_(False), about

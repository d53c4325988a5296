"""What every trained head shares: two files, written whole and read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import nn

from toolkit.errors import InputError
from toolkit.io import content_hash, read_json, write_json
from toolkit.lines import first_line
from toolkit.schema.arguments import checked
from toolkit.tensors import CHECKSUM, load_tensors, save_tensors

MEND = "export the head again (run its training's command once more), or copy it from where it is whole"


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

    @checked
    def save(self, folder: Path | str, about: Mapping[str, Any] | None = None) -> Path:
        """Write weights and config; `about` records the draft's fingerprint, sampling, metrics and so on."""
        folder = Path(folder)
        said = {"head": self.config, **(about or {})}
        save_tensors(folder / self.weights_file, self.state_dict(), {"what": self.what})
        write_json(folder / self.config_file, {**said, CHECKSUM: content_hash(said, 64)})
        return folder

    @classmethod
    def is_in(cls, folder: Path | str) -> bool:
        """Whether the folder holds one."""
        try:
            return all((Path(folder) / name).exists() for name in (cls.weights_file, cls.config_file))
        except (OSError, ValueError):  # a name that no file can have
            return False

    @classmethod
    @checked
    def load(cls, folder: Path | str) -> tuple[Self, dict[str, Any]]:
        """The head and what was recorded about it. Weights are loaded strictly. Raises InputError."""
        folder = Path(folder)
        if not cls.is_in(folder):
            raise InputError(f"expected {cls.what} ({cls.config_file} and {cls.weights_file}) in {folder}, found none")
        weights, said = load_tensors(folder / cls.weights_file, "file of a head's weights", MEND)
        about = _checked(folder / cls.config_file, needed=bool(said))
        try:
            head = cls(**about["head"])
            head.load_state_dict({k: v.float() for k, v in weights.items()}, strict=True)
        except (KeyError, TypeError, RuntimeError) as error:
            raise InputError(f"{folder} does not hold {cls.what} as a whole: {first_line(error)}") from error
        return head.eval().requires_grad_(False), about


def _checked(path: Path, needed: bool) -> dict[str, Any]:
    """A head's config without its checksum. Raises InputError if that does not match; configs of other programs have none."""
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty: expected a head's config; {MEND}")
    about = read_json(path)
    if not isinstance(about, dict):
        raise InputError(f"{path} is not a head's config; {MEND}")
    found = about.pop(CHECKSUM, None)
    if (found is not None or needed) and found != content_hash(about, 64):
        raise InputError(f"{path} is damaged: its checksum does not match; {MEND}")
    return about

"""What every trained head shares: weights, config and card, written whole and read strictly; and the way to the Hub.

`save` and `load` define the format. `save_pretrained`, `from_pretrained` and `push_to_hub` are those of huggingface_hub,
over the same files. The mixin's own readers and writers are not used: they know one file of weights per folder and load
it loosely.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin, snapshot_download
from torch import Tensor, nn

from toolkit.acceptance import card
from toolkit.acceptance.inputs import Inputs
from toolkit.config.values import checked
from toolkit.errors import InputError
from toolkit.files import generate_folder
from toolkit.files.atomic import content_hash, read_json, write_json, write_text
from toolkit.files.tensors import CHECKSUM, load_tensors, save_tensors
from toolkit.files.text import first_line

REMOVED = {"output": "probabilities of whole rounds", "layers": "states of earlier layers"}  # inputs of earlier heads
HINT = "export the head again (run its training's command once more), or copy it from where it is whole"


class AtWork:
    """What the scorers of all kinds of heads say of their head, `module`."""

    module: SavedHead

    @property
    def key(self) -> str:
        """The name of the head's logits in recordings."""
        return self.module.key

    @property
    def num_history(self) -> int:
        """The number of positions before a step that the head reads."""
        return self.module.inputs.num_history

    @property
    def reads_depth(self) -> bool:
        """Whether a step's score depends on where its round starts."""
        return self.module.inputs.round_depth > 0


class SavedHead(nn.Module, PyTorchModelHubMixin, library_name=card.LIBRARY, tags=[*card.TAGS]):
    """A module whose constructor arguments are its attributes of the same names (`arguments`).

    weights_file, config_file  names within the head's folder; what: how messages call it
    summary, method            for its card: what it predicts, and a method that uses it
    about                      what was recorded with it: the draft's fingerprint, sampling, metrics and so on
    inputs                     what it reads beside the newest state
    key                        the name of its logits in recordings; of a head in a folder a hash of the folder's heads
    """

    weights_file: ClassVar[str]
    config_file: ClassVar[str]
    what: ClassVar[str]
    summary: ClassVar[str]
    method: ClassVar[str]
    arguments: ClassVar[tuple[str, ...]]
    inputs: Inputs
    log_w_rej: float
    key: str = "head"

    def __init__(self) -> None:
        super().__init__()
        self.about: dict[str, Any] = {}

    @property
    def config(self) -> dict[str, Any]:
        """What `__init__` needs to build it again."""
        return {name: getattr(self, name) for name in self.arguments}

    def corrected(self, logits: Tensor) -> Tensor:
        """Raw logits with the class weight's shift undone."""
        return logits + self.log_w_rej

    @checked
    def save(self, folder: Path | str, about: Mapping[str, Any] | None = None) -> Path:
        """Write weights, config and card; `about` records what is known of the head, None: what it was loaded with."""
        folder = Path(folder)
        record = {"head": self.config, **(self.about if about is None else about)}
        save_tensors(folder / self.weights_file, self.state_dict(), {"what": self.what})
        write_json(folder / self.config_file, {**record, CHECKSUM: content_hash(record, 64)})
        write_card(folder)
        generate_folder.write(folder)
        return folder

    @classmethod
    def is_in(cls, folder: Path | str) -> bool:
        """Whether the folder holds a head of this kind."""
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
        weights, metadata = load_tensors(folder / cls.weights_file, "file of a head's weights", HINT)
        record = _checked(folder / cls.config_file, needed=bool(metadata))
        for name, reason in REMOVED.items():
            if name in record.get("head", {}):
                raise InputError(
                    f"the head in {folder} was trained with head.{name}={record['head'][name]}, {reason}, which was removed: "
                    "train it again without, or decode with revision 2243aa39"
                )
        try:
            with torch.device("cpu"):
                head = cls(**record["head"]).float()
            head.load_state_dict({k: v.float() for k, v in weights.items()}, strict=True)
        except (KeyError, TypeError, RuntimeError) as error:
            raise InputError(f"{folder} does not hold {cls.what} as a whole: {first_line(error)}") from error
        if not all(bool(weight.isfinite().all()) for weight in weights.values()):
            raise InputError(f"{folder} holds {cls.what} whose weights are not all numbers: {HINT}")
        head.about = {name: fact for name, fact in record.items() if name != "head"}
        return head.eval().requires_grad_(False), record

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        config: Any = None,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        model_card_kwargs: dict[str, Any] | None = None,
        **push_to_hub_kwargs: Any,
    ) -> str | None:
        """`save`, by the name that users of the Hub look for; a folder may hold a head of each kind.

        config, model_card_kwargs  have no meaning here: the head's own config and card are written
        push_to_hub                upload it to `repo_id`, too; returns the commit's address then
        """
        self.save(save_directory)
        if not push_to_hub:
            return None
        return str(self.push_to_hub(repo_id or Path(save_directory).name, **push_to_hub_kwargs))

    @classmethod
    def from_pretrained(  # type: ignore[override]  # no other keywords: a wrong one is an error
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        force_download: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
        map_location: str = "cpu",
        strict: bool = True,
    ) -> Self:
        """The head of a folder or of a hub name, in evaluation mode; `about` says what was recorded with it.

        Raises InputError for a head that is damaged or of another shape: tensors must be neither missing nor left over.
        """
        if not strict:
            raise InputError("heads are loaded strictly: expected strict=True, got False")
        source, folder = str(pretrained_model_name_or_path), Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            try:
                folder = Path(
                    snapshot_download(
                        source,
                        revision=revision,
                        cache_dir=cache_dir,
                        force_download=force_download,
                        token=token,
                        local_files_only=local_files_only,
                        allow_patterns=[cls.weights_file, cls.config_file, card.FILE],
                    )
                )
            except Exception as error:  # the client's own kinds, and those of the network
                raise InputError(
                    f"expected {cls.what} in a folder or on the Hub under {source}, found none: {first_line(error)}"
                ) from error
        return cls.load(folder)[0].to(map_location)

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The card that `save` writes, as an object of huggingface_hub."""
        return ModelCard(card.card_of([(type(self), {"head": self.config, **self.about})]))


def write_card(folder: Path | str) -> Path:
    """README.md of a folder: about all heads that it holds."""
    kinds = [kind for kind in SavedHead.__subclasses__() if kind.is_in(folder)]
    return write_text(
        Path(folder) / card.FILE,
        card.card_of([(kind, _checked(Path(folder) / kind.config_file, needed=False)) for kind in kinds]),
    )


def _checked(path: Path, needed: bool) -> dict[str, Any]:
    """A head's config without its checksum. Raises InputError if that does not match; configs of other programs have none."""
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty: expected a head's config; {HINT}")
    record = read_json(path)
    if not isinstance(record, dict):
        raise InputError(f"{path} is not a head's config; {HINT}")
    checksum = record.pop(CHECKSUM, None)
    if (checksum is not None or needed) and checksum != content_hash(record, 64):
        raise InputError(f"{path} is damaged: its checksum does not match; {HINT}")
    return record

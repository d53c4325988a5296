"""What heads are trained on: the draft's states where a token is drafted, and labels; batches of them, whatever the source.

Shapes: P positions, D hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from toolkit.acceptance.saved import SavedHead
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.models.fingerprint import Weights
from toolkit.runs.stage import MANIFEST, read_manifest
from toolkit.training.batches import ExampleBatches, Examples, ResumableData

SUMMARY = "summary.json"


class Positions(NamedTuple):
    """A batch: the masked-in positions of some examples, one after another, without padding.

    hidden [P, D]   the draft's final state that has read the drafted token
    labels [P]      the token's probability of acceptance
    confidence [P]  the draft's own probability of the token, unwarped: what a head is compared with
    """

    hidden: Tensor
    labels: Tensor
    confidence: Tensor

    def emptied(self) -> Positions:
        """A batch of no positions: the share of a process for which too few examples are left."""
        return Positions(*(values[:0] for values in self))


def joined(parts: Sequence[Positions]) -> Positions:
    return parts[0] if len(parts) == 1 else Positions(*(torch.cat(values) for values in zip(*parts, strict=True)))


def check_labels(labels: Tensor, where: str, hint: str) -> None:
    """Raises InputError, one line, unless all labels [P] are numbers in [0, 1]."""
    wrong = ~((labels >= 0) & (labels <= 1))
    if bool(wrong.any()):
        raise InputError(
            f"{where}: labels are probabilities of acceptance, expected numbers in [0, 1]; {int(wrong.sum())} of {len(labels)} "
            f"are not, the first is {float(labels[wrong][0]):g}; {hint}"
        )


class ExampleData(ResumableData):
    """`batch_size` examples of the training split make a batch; both splits are in `states` once it is set up.

    path           folder of the stage that made the data
    draft          the model that drafted in them
    shuffle, seed  a new order of the training examples for every epoch

    Raises InputError if the folder is not finished, or the draft another one.
    """

    # The command, what its folder has beside the manifest, how messages call that.
    made_by: ClassVar[tuple[str, str, str]]

    def __init__(self, path: str | Path, draft: Any, batch_size: int, shuffle: bool, seed: int):
        super().__init__()
        self.path, self.draft = Path(path), draft
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        (summary,) = self.inputs(self.path)
        self.summary: dict[str, Any] = read_json(summary)
        self.weights = Weights.of(draft)
        if (reason := Weights.changed(self.summary, self.weights)) is not None:
            raise InputError(
                f"the data in {path} were made with another draft ({reason}): set pair.draft to that one, or make them again"
            )
        self.states: dict[str, Examples] = {}

    @classmethod
    def inputs(cls, folder: Path) -> list[Path]:
        """The files that describe a folder of data. Raises InputError if it is not a folder of data, or not finished."""
        command, part, data = cls.made_by
        if not (folder / MANIFEST).exists() or not (folder / part).exists():
            raise InputError(f"data.path: expected a folder of {command} (with {MANIFEST} and {part}), got {folder}")
        if read_manifest(folder).get("status") != "finished":
            raise InputError(f"the {data} in {folder} are not finished: run {command} again first")
        return [folder / SUMMARY]

    @abstractmethod
    def head_sizes(self) -> dict[str, int]:
        """What a head must know of the draft to be built."""

    def further_sizes(self) -> dict[str, int]:
        """Further sizes, which heads that read more than the newest state need."""
        return {}

    def read_by(self, head: SavedHead) -> None:
        """Tell the data which head they will train, before `setup`: heads may differ in what they read and learn."""
        return None

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What a head trained on these data should remember of them."""

    def whole_validation(self) -> ExampleBatches:
        """All validation batches, whatever the number of processes."""
        return ExampleBatches(self.states["validation"], self.batch_size)

    def shuffled_training(self, batch_size: int | None = None) -> ExampleBatches:
        """All training batches in a fixed random order, whatever the number of processes and where the trainer stands."""
        return ExampleBatches(self.states["train"], batch_size or self.batch_size, shuffle=True, seed=self.seed)

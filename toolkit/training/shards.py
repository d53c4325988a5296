"""Files of states: float16, memory-mapped, with a checksum, and with the draft and the data that they belong to.

    hidden-<hash of draft and data>/
        train-0000000-<hash>.safetensors      examples [E], ends [E], hidden [P, D] float16, labels [P], confidence [P];
                                              example examples[i] has positions ends[i-1] .. ends[i]

A file is whole or absent, and its contents name the examples that it holds. So a cache needs no index. An interrupted cache
lacks some files, and the next training makes only those.

Shapes: E examples of a file, P positions of it, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.files.tensors import load_tensors, save_tensors
from toolkit.training.states import Positions, check_labels, joined

FORMAT = torch.float16
LARGEST = torch.finfo(FORMAT).max
MOST_LOST = 0.01  # of the states' norm, by rounding
MEND = "delete that file: the next training writes it again, and it alone"
OTHERS = {"draft": "another draft", "dtype": "a draft in another number format", "data": "other data"}
INSTEAD = "train with data.features=online"


class Shards:
    """The files of one split in a cache folder.

    owner  {"draft", "dtype", "data"}: whose states these are; files of others are refused
    spans  example -> its file's positions, and the first and last of its own
    """

    def __init__(self, folder: Path, split: str, owner: Mapping[str, str]):
        self.folder, self.split, self.owner = folder, split, dict(owner)
        self.spans: dict[int, tuple[Positions, int, int]] = {}
        self._opened: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        """Open files that are new. Raises InputError, one line, if one is damaged or of another draft."""
        for path in sorted(self.folder.glob(f"{self.split}-*.safetensors")):
            if path.name not in self._opened:
                self._open(path)

    def missing(self, examples: Sequence[int]) -> list[int]:
        """Those of the examples that no file holds."""
        return [example for example in examples if example not in self.spans]

    def read(self, examples: Sequence[int]) -> Positions:
        """The positions of these examples, copied from the files."""
        spans = [self.spans[example] for example in examples]
        return joined([Positions(*(values[i:j] for values in positions)) for positions, i, j in spans])

    def write(self, positions: Mapping[int, Positions]) -> float:
        """Write one file of these examples, which is on the disk when this returns.

        Returns the share of the states' norm that rounding lost.
        """
        examples = sorted(positions)
        all_of_them = joined([positions[example] for example in examples])
        hidden, lost = rounded(all_of_them.hidden)
        path = self.folder / f"{self.split}-{examples[0]:07d}-{content_hash(examples)}.safetensors"
        tensors = {
            "examples": torch.tensor(examples),
            "ends": torch.tensor([len(positions[example].labels) for example in examples]).cumsum(0),
            "hidden": hidden,
            "labels": all_of_them.labels,
            "confidence": all_of_them.confidence,
        }
        save_tensors(path, tensors, self.owner)
        self._open(path)
        return lost

    def _open(self, path: Path) -> None:
        tensors, metadata = load_tensors(path, "file of hidden states", MEND)
        for key, what in OTHERS.items():
            if metadata.get(key) != self.owner[key]:
                raise InputError(
                    f"{path} holds states of {what}: expected {key} {self.owner[key]}, got {metadata.get(key)}; {MEND}"
                )
        if tensors["hidden"].dtype != FORMAT:
            raise InputError(f"{path} holds states in {tensors['hidden'].dtype}, expected {FORMAT}; {MEND}")
        check_labels(tensors["labels"], str(path), MEND)
        positions, first = Positions(*(tensors[name] for name in Positions._fields)), 0
        for example, end in zip(tensors["examples"].tolist(), tensors["ends"].tolist(), strict=True):
            self.spans.setdefault(example, (positions, first, end))
            first = end
        self._opened.add(path.name)


def rounded(hidden: Tensor) -> tuple[Tensor, float]:
    """States [P, D] as float16 on the CPU, and the share of their norm that this loses.

    Raises InputError, one line, if states do not fit: they exceed 65,504, are not numbers, or are too small for float16.
    """
    hidden = hidden.cpu()
    largest = float(hidden.abs().max())
    if not largest <= LARGEST:
        raise InputError(
            f"expected states of at most {LARGEST:,.0f} to keep them as float16, got {largest:g}; {INSTEAD}"
        )
    stored = hidden.to(FORMAT)
    norm = float(hidden.double().norm())
    lost = float((stored.double() - hidden.double()).norm()) / norm if norm else 0.0
    if lost > MOST_LOST:
        raise InputError(
            f"float16 would lose {lost:.1%} of the states' norm, expected at most {MOST_LOST:.0%}; {INSTEAD}"
        )
    return stored, lost


def size_of(num_examples: int, num_positions: int, width: int) -> int:
    """Bytes of the tensors of some examples and positions with states of a width."""
    return num_positions * (width * FORMAT.itemsize + 2 * torch.float32.itemsize) + num_examples * 2 * 8

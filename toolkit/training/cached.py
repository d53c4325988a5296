"""States that are kept in files, made before the training: every epoch of every head reads them.

    hidden-<hash of draft and data>/
        train-0000000-<hash>.safetensors      examples [E], ends [E], hidden [P, D] float16, labels [P], confidence [P];
                                              example examples[i] has positions ends[i-1] .. ends[i]

A file is whole or absent, and its contents name the examples that it holds. So a cache needs no index. An interrupted cache
lacks some files, and the next training makes only those.

Shapes: E examples of a file, P positions of it, D hidden size.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.files.tensors import load_tensors, save_tensors
from toolkit.training.batches import Examples
from toolkit.training.examples import Positions, check_labels, joined
from toolkit.training.online import OnlineStates

FORMAT = torch.float16
LARGEST = torch.finfo(FORMAT).max
MOST_LOST = 0.01  # of the states' norm, by rounding
HINT = "delete that file: the next training writes it again, and it alone"
OTHERS = {"draft": "another draft", "dtype": "a draft in another number format", "data": "other data"}
INSTEAD = "train with data.features=online"


class StoredStates(Examples):
    """The examples of a split, read from the files of a folder.

    `fill` has `online` compute what no file holds, and writes it.

    owner  {"draft", "dtype", "data"}: whose states these are; files of others are refused
    spans  example -> its file's positions, and the first and last of its own
    lost   the largest share of a file's norm that float16 has lost so far
    """

    def __init__(self, folder: Path, split: str, owner: Mapping[str, str], online: OnlineStates):
        self.folder, self.split, self.owner, self.online, self.lost = folder, split, dict(owner), online, 0.0
        self.spans: dict[int, tuple[Positions, int, int]] = {}
        self._opened: set[str] = set()
        self._refresh()
        self.num_examples, self.num_positions = online.num_examples, online.num_positions

    def batch(self, examples: Sequence[int]) -> Positions:
        spans = [self.spans[example] for example in examples]
        return joined([Positions(*(values[i:j] for values in positions)) for positions, i, j in spans])

    def missing(self) -> list[int]:
        return [example for example in range(self.online.num_examples) if example not in self.spans]

    def fill(self) -> None:
        """Write the states of all examples that no file holds; files that an interrupted run has written are kept."""
        width = self.online.most_examples()
        with tqdm(total=self.num_examples, desc=f"hidden states, {self.split}", unit="example") as bar:
            for first in range(0, self.num_examples, width):
                block = range(first, min(first + width, self.num_examples))
                self._provide(block)
                bar.update(len(block))
        if self.lost:
            print(f"hidden states, {self.split}: float16 loses at most {self.lost:.1e} of a file's norm", flush=True)

    def size_of(self, examples: Sequence[int]) -> int:
        """Bytes of the tensors of some examples."""
        num_positions = int(self.online.sequences.counts[list(examples)].sum())
        width = self.online.width * FORMAT.itemsize + 2 * torch.float32.itemsize
        return num_positions * width + len(examples) * 2 * 8

    def _provide(self, examples: Sequence[int]) -> None:
        """Write a file of those examples that no file holds."""
        if all(example in self.spans for example in examples):
            return
        self._refresh()  # another process may have written them
        if not (missing := sorted(example for example in examples if example not in self.spans)):
            return
        computed = self.online.gather(missing)
        together = joined([computed[example] for example in missing])
        hidden, lost = rounded(together.hidden)
        self.lost = max(self.lost, lost)
        path = self.folder / f"{self.split}-{missing[0]:07d}-{content_hash(missing)}.safetensors"
        tensors = {
            "examples": torch.tensor(missing),
            "ends": torch.tensor([len(computed[example].labels) for example in missing]).cumsum(0),
            "hidden": hidden,
            "labels": together.labels,
            "confidence": together.confidence,
        }
        save_tensors(path, tensors, self.owner)
        self._open(path)

    def _refresh(self) -> None:
        """Open files that are new. Raises InputError, one line, if one is damaged or of another draft."""
        for path in sorted(self.folder.glob(f"{self.split}-*.safetensors")):
            if path.name not in self._opened:
                self._open(path)

    def _open(self, path: Path) -> None:
        tensors, metadata = load_tensors(path, "file of hidden states", HINT)
        for key, what in OTHERS.items():
            if metadata.get(key) != self.owner[key]:
                other = f"expected {key} {self.owner[key]}, got {metadata.get(key)}"
                raise InputError(f"{path} holds states of {what}: {other}; {HINT}")
        if tensors["hidden"].dtype != FORMAT:
            raise InputError(f"{path} holds states in {tensors['hidden'].dtype}, expected {FORMAT}; {HINT}")
        check_labels(tensors["labels"], str(path), HINT)
        positions, first = Positions(*(tensors[name] for name in Positions._fields)), 0
        for example, end in zip(tensors["examples"].tolist(), tensors["ends"].tolist(), strict=True):
            self.spans.setdefault(example, (positions, first, end))
            first = end
        self._opened.add(path.name)


def announce(folder: Path, splits: Sequence[StoredStates]) -> None:
    """Print the size of all states and of those to be written. Raises InputError if the disk has no room for the latter."""
    everything = sum(states.size_of(range(states.num_examples)) for states in splits)
    missing = sum(states.size_of(states.missing()) for states in splits)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    positions, width = sum(states.num_positions for states in splits), max(states.online.width for states in splits)
    print(
        f"hidden states: {positions:,} positions x {width} x 16 bits = {everything:,} bytes in {folder}; "
        f"{missing:,} bytes to be written, {free:,} free",
        flush=True,
    )
    if missing > free:
        raise InputError(
            f"the hidden states need {missing:,} bytes in {folder}, {free:,} are free: make room, or {INSTEAD}"
        )


def rounded(hidden: Tensor) -> tuple[Tensor, float]:
    """States [P, D] as float16 on the CPU, and the share of their norm that this loses.

    Raises InputError, one line, if states do not fit: they exceed 65,504, are not numbers, or are too small for float16.
    """
    hidden = hidden.cpu()
    largest = float(hidden.abs().max())
    if not largest <= LARGEST:
        most = f"at most {LARGEST:,.0f} to keep them as float16"
        raise InputError(f"expected states of {most}, got {largest:g}; {INSTEAD}")
    stored = hidden.to(FORMAT)
    norm = float(hidden.double().norm())
    lost = float((stored.double() - hidden.double()).norm()) / norm if norm else 0.0
    if lost > MOST_LOST:
        most = f"expected at most {MOST_LOST:.0%}; {INSTEAD}"
        raise InputError(f"float16 would lose {lost:.1%} of the states' norm, {most}")
    return stored, lost

"""States that are kept in files: made before the training (`cached`), or when they are first needed (`hybrid`).

Both read the float16 states of the files in every epoch. So heads are the same, bit for bit, whichever of the two wrote
the files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from toolkit.errors import InputError
from toolkit.training.online import OnlineStates
from toolkit.training.shards import INSTEAD, Shards, size_of
from toolkit.training.states import Positions, States


class CachedStates(States):
    """The examples of a split that the files hold; examples without states in a file are left out."""

    def __init__(self, shards: Shards, num_examples: int):
        self.shards = shards
        self.examples = [example for example in range(num_examples) if example in shards.spans]
        self.num_examples = len(self.examples)
        self.num_positions = sum(last - first for _, first, last in map(shards.spans.__getitem__, self.examples))

    def batch(self, examples: Sequence[int]) -> Positions:
        return self.shards.read([self.examples[example] for example in examples])


class HybridStates(States):
    """All examples: read from the files, and computed and written first where no file holds them.

    Examples are computed in the groups of `OnlineStates`. Each group is on the disk before its first batch comes out.

    lost  the largest share of a file's norm that float16 has lost so far
    """

    def __init__(self, shards: Shards, online: OnlineStates):
        self.shards, self.online, self.lost = shards, online, 0.0
        self.num_examples, self.num_positions = online.num_examples, online.num_positions

    def batch(self, examples: Sequence[int]) -> Positions:
        self._provide(examples)
        return self.shards.read(examples)

    def batches(self, parts: Sequence[Sequence[int]], start: int = 0) -> Iterator[Positions]:
        for first, group in self.online.groups(parts, start):
            self._provide(sorted({example for part in group for example in part}))
            for part in group[max(start - first, 0) :]:
                yield self.shards.read(part)

    def _provide(self, examples: Sequence[int]) -> None:
        if self.shards.missing(examples):
            self.shards.refresh()  # another process may have written them
        if missing := self.shards.missing(examples):
            self.lost = max(self.lost, self.shards.write(self.online.gather(missing)))


def announce(folder: Path, shards: Mapping[str, Shards], online: Mapping[str, OnlineStates]) -> None:
    """Print the size of all states and of those to be written. Raises InputError if the disk has no room for the latter."""
    everything = sum(_size(states, range(states.num_examples)) for states in online.values())
    missing = sum(_size(states, shards[name].missing(range(states.num_examples))) for name, states in online.items())
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    positions = sum(states.num_positions for states in online.values())
    width = max(states.width for states in online.values())
    print(
        f"hidden states: {positions:,} positions x {width} x 16 bits = {everything:,} bytes in {folder}; "
        f"{missing:,} bytes to be written, {free:,} free",
        flush=True,
    )
    if missing > free:
        raise InputError(
            f"the hidden states need {missing:,} bytes in {folder}, {free:,} are free: make room, or {INSTEAD}"
        )


def fill(shards: Shards, online: OnlineStates) -> None:
    """Write the states of all examples that no file holds; files that an interrupted run has written are kept."""
    from tqdm.auto import tqdm

    width, lost = online.most_examples(), 0.0
    with tqdm(total=online.num_examples, desc=f"hidden states, {shards.split}", unit="example") as bar:
        for first in range(0, online.num_examples, width):
            block = range(first, min(first + width, online.num_examples))
            if missing := shards.missing(block):
                lost = max(lost, shards.write(online.gather(missing)))
            bar.update(len(block))
    if lost:
        print(f"hidden states, {shards.split}: float16 loses at most {lost:.1e} of a file's norm", flush=True)


def check_present(shards: Mapping[str, Shards], online: Mapping[str, OnlineStates], may_lack: bool) -> None:
    """Print how many examples have no states.

    Raises InputError, one line, if there are such examples and `may_lack` is False.
    """
    lacking = {name: len(shards[name].missing(range(states.num_examples))) for name, states in online.items()}
    if not any(lacking.values()):
        return
    counts = " and ".join(
        f"{lacking[name]:,} of {states.num_examples:,} examples ({name})" for name, states in online.items()
    )
    folder = next(iter(shards.values())).folder
    if not may_lack:
        raise InputError(
            f"data.on_missing=raise: {counts} have no states in {folder}: make them with data.on_missing=generate, or "
            "leave them out with data.on_missing=skip"
        )
    print(f"data.on_missing=skip: {counts} have no states in {folder} and are left out", flush=True)


def _size(online: OnlineStates, examples: Sequence[int]) -> int:
    positions = sum(online.texts.counts[list(examples)].tolist())
    return size_of(len(examples), positions, online.width)

"""What heads are trained on: the draft's states at the positions that hold a drafted token, and their labels.

Either computed for every batch (`LiveStates`) or once for all heads and epochs (`CachedStates`, from `write_cache`).
The cache keeps the draft's own number format. Rounding to a smaller one would make cached and live training differ, and
a larger one would only hold zeros.

    hidden-<hash of draft and data>/
        index.json                   written last: a folder without it is under way
        train-00000.safetensors ...  SHARD_EXAMPLES examples each: hidden [P, D], labels [P], confidence [P], ends [examples],
                                     example i being positions ends[i-1] .. ends[i]

Shapes: P positions, D hidden size.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.io import read_json, write_json
from toolkit.teacher import hidden_size, pad_right, picked, states_and_logits_of
from toolkit.tensors import load_tensors, save_tensors

INDEX = "index.json"
SHARD_EXAMPLES = 512
MEND = "delete that folder of hidden states: the next training writes it again"


class Positions(NamedTuple):
    """A batch: the masked-in positions of some examples, one after another.

    hidden [P, D]   the draft's final state that has read the drafted token
    labels [P]      the token's chance of acceptance
    confidence [P]  the draft's own probability of the token, unwarped: what a head is compared with
    """

    hidden: Tensor
    labels: Tensor
    confidence: Tensor

    def emptied(self) -> Positions:
        """A batch of no positions: the share of a process for which too few examples are left."""
        return Positions(*(values[:0] for values in self))


class States(ABC):
    """Positions of one split, by example. Examples without any are left out, so example numbers differ from the data set's."""

    num_examples: int
    num_positions: int

    @abstractmethod
    def batch(self, examples: Sequence[int]) -> Positions:
        """The positions of these examples."""


class LiveStates(States):
    """States computed when they are asked for, at most `batch_size` examples in one forward of the draft.

    split  a datasets.Dataset with the columns of data_gen.mix
    """

    def __init__(self, draft: Any, split: Any, batch_size: int):
        self.draft, self.batch_size = draft, batch_size
        self.split = split.with_format("torch", columns=["input_ids", "labels", "mask"])
        counts = [sum(mask) for mask in split["mask"]]
        self.examples = [example for example, count in enumerate(counts) if count]
        self.num_examples, self.num_positions = len(self.examples), sum(counts)

    def batch(self, examples: Sequence[int]) -> Positions:
        """The positions of these examples, from forwards of the draft."""
        chunks = [examples[first : first + self.batch_size] for first in range(0, len(examples), self.batch_size)]
        found = [positions for chunk in chunks for positions in self.forward(chunk)]
        return _join(found)

    def forward(self, examples: Sequence[int]) -> list[Positions]:
        """The positions of each of these examples, from one forward."""
        chosen = [self.split[self.examples[example]] for example in examples]
        tokens = [example["input_ids"] for example in chosen]
        states, logits = states_and_logits_of(self.draft, pad_right([text.tolist() for text in tokens]))
        found = []
        for row, (text, example) in enumerate(zip(tokens, chosen, strict=True)):
            places = example["mask"].nonzero().squeeze(1)
            read = places.to(states.device)
            before = logits[row, (places - 1).to(logits.device)].float().log_softmax(-1).exp()
            confidence = picked(before, text[places].to(before.device)).to(states.device)
            found.append(Positions(states[row, read], example["labels"][places], confidence))
        return found

    def length(self, example: int) -> int:
        """Tokens of an example, prompt included."""
        return len(self.split[self.examples[example]]["input_ids"])


class CachedStates(States):
    """States read from a cache folder, memory-mapped."""

    def __init__(self, folder: Path, split: str):
        self.shards = [
            load_tensors(path, "file of hidden states", MEND)[0]
            for path in sorted(folder.glob(f"{split}-*.safetensors"))
        ]
        self.first_examples, self.num_examples, self.num_positions = [], 0, 0
        expected = read_json(folder / INDEX)["examples"][split]
        for shard in self.shards:
            self.first_examples.append(self.num_examples)
            self.num_examples += len(shard["ends"])
            self.num_positions += len(shard["labels"])
        if self.num_examples != expected:
            raise InputError(f"{folder} holds {self.num_examples} of {expected} examples ({split}); {MEND}")

    def batch(self, examples: Sequence[int]) -> Positions:
        """The positions of these examples, copied from the files."""
        places = [self._place(example) for example in examples]
        return _join([Positions(*(shard[name][i:j] for name in Positions._fields)) for shard, i, j in places])

    def _place(self, example: int) -> tuple[dict[str, Tensor], int, int]:
        number = bisect_right(self.first_examples, example) - 1
        ends, inside = self.shards[number]["ends"], example - self.first_examples[number]
        return self.shards[number], int(ends[inside - 1]) if inside else 0, int(ends[inside])


def write_cache(folder: Path, draft: Any, splits: Mapping[str, Any], batch_size: int) -> None:
    """Write the states of all splits, unless they are there; shards that an interrupted run has written are kept.

    Prints the size before it begins. Raises InputError if the disk has no room for it.
    """
    if (folder / INDEX).exists():
        return
    live = {name: LiveStates(draft, split, batch_size) for name, split in splits.items()}
    _announce(folder, draft, sum(states.num_positions for states in live.values()))
    for name, states in live.items():
        _write_split(folder, name, states)
    facts = {
        "hidden_size": hidden_size(draft),
        "examples": {name: states.num_examples for name, states in live.items()},
        "positions": {name: states.num_positions for name, states in live.items()},
    }
    write_json(folder / INDEX, facts)


def _announce(folder: Path, draft: Any, num_positions: int) -> None:
    width, bits = hidden_size(draft), torch.finfo(draft.dtype).bits
    size = num_positions * (width * bits // 8 + 8)
    print(
        f"caching hidden states: {num_positions} positions x {width} x {bits} bits = {size / 1e6:,.1f} MB in {folder}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if size > free:
        raise InputError(
            f"the hidden states need {size / 1e9:.1f} GB in {folder}, {free / 1e9:.1f} GB are free; "
            "make room, or train with data.cache_hidden=false"
        )


def _write_split(folder: Path, name: str, states: LiveStates) -> None:
    from tqdm.auto import tqdm

    with tqdm(total=states.num_examples, desc=f"hidden states, {name}", unit="example") as bar:
        for first in range(0, states.num_examples, SHARD_EXAMPLES):
            examples = range(first, min(first + SHARD_EXAMPLES, states.num_examples))
            path = folder / f"{name}-{first // SHARD_EXAMPLES:05d}.safetensors"
            if not path.exists():
                save_tensors(path, _shard(states, examples))
            bar.update(len(examples))


def _shard(states: LiveStates, examples: Sequence[int]) -> dict[str, Tensor]:
    """The content of one file; examples of like length share a forward."""
    by_length = sorted(examples, key=states.length)
    found: dict[int, Positions] = {}
    for first in range(0, len(by_length), states.batch_size):
        chunk = by_length[first : first + states.batch_size]
        found |= zip(chunk, states.forward(chunk), strict=True)
    joined = _join([found[example] for example in examples])
    ends = torch.tensor([len(found[example].labels) for example in examples]).cumsum(0)
    return {"hidden": joined.hidden.cpu(), "labels": joined.labels, "confidence": joined.confidence.cpu(), "ends": ends}


def _join(parts: Sequence[Positions]) -> Positions:
    return Positions(*(torch.cat(values) for values in zip(*parts, strict=True)))

"""A split of mixed data as flat arrays: tokens of all examples, positions of drafted tokens, and their labels.

Examples without a drafted token are left out. An example is read up to its last drafted token. The tokens
after it have no label, and the draft's states before them do not depend on them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.training.depths import drawn_depths
from toolkit.training.states import check_labels


class MixedTexts:
    """The examples of a split.

    split  a datasets.Dataset with the columns of data_gen.mix
    where  names it in messages; mend: says there what to do

    num_examples, num_positions  examples with drafted tokens, drafted tokens in all
    counts [examples]            drafted tokens of each
    lengths [examples]           tokens up to the last drafted one
    Raises InputError if a label is not a probability.
    """

    def __init__(self, split: Any, where: str, mend: str):
        table = split.with_format("arrow")[:]
        self._tokens, mask, labels = (_flat(table[name]) for name in ("input_ids", "mask", "labels"))
        self._accept_probs, self._drafted = labels, np.flatnonzero(mask)
        ends = np.cumsum([len(row) for row in table["input_ids"]], dtype=np.int64)
        drafted = self._drafted
        rows = np.searchsorted(ends, drafted, side="right")
        counts = np.bincount(rows, minlength=len(ends))
        nonempty = np.flatnonzero(counts)
        starts = ends - np.diff(ends, prepend=0)
        self._starts, self._positions = starts[nonempty], drafted - starts[rows]
        self._labels = torch.from_numpy(labels[drafted])
        check_labels(self._labels, where, mend)
        self.counts = counts[nonempty]
        self._ends = np.cumsum(self.counts)
        self.lengths = self._positions[self._ends - 1] + 1 if len(nonempty) else self.counts
        self.num_examples, self.num_positions = len(nonempty), len(drafted)
        self._where, self._first, self._row_lengths = where, None, np.diff(ends, prepend=0)
        if "prompt_length" in table.column_names:
            self._first = starts + table["prompt_length"].to_numpy()
        self._nonempty = nonempty

    def depths(self, most: int, seed: int) -> Tensor:
        """Depths in the round of all drafted tokens [num_positions], in 1..most (`toolkit.training.depths`).

        Labels are probabilities of the token drafted at a position, even where the text goes on with another token.
        """
        generator, probs = torch.Generator().manual_seed(seed), torch.from_numpy(self._accept_probs.copy())
        first = torch.from_numpy(np.repeat(self._responses(), self._row_lengths))
        depths = drawn_depths(probs, first, most, generator)
        return depths[torch.from_numpy(self._drafted)]

    def response_start(self, example: int) -> int:
        """The position within an example where its response begins. Raises InputError if the data do not say."""
        return int(self._responses()[self._nonempty[example]] - self._starts[example])

    def _responses(self) -> np.ndarray:
        if self._first is None:
            raise InputError(
                f"{self._where} does not say where prompts end, which this head needs: run data_gen.mix again"
            )
        return self._first

    def span(self, example: int) -> slice:
        """The slice of an example's drafted tokens among the drafted tokens of all examples."""
        return slice(int(self._ends[example] - self.counts[example]), int(self._ends[example]))

    def tokens(self, example: int) -> list[int]:
        """Token ids of an example, prompt included, up to its last drafted token."""
        start = self._starts[example]
        tokens: list[int] = self._tokens[start : start + self.lengths[example]].tolist()
        return tokens

    def drafted(self, example: int) -> tuple[Tensor, Tensor]:
        """Positions [n] of the drafted tokens within an example, and their labels [n]."""
        span = self.span(example)
        return torch.from_numpy(self._positions[span]), self._labels[span]


def _flat(column: Any) -> np.ndarray:
    """All values of a column of lists, one after another."""
    parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.zeros(0)

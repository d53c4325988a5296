"""States that the draft computes when a batch needs them.

The examples of several batches are read together, sorted by length, so that little of a forward pass is padding. Which batches
these are is a function of their numbers alone, so a training that goes on in mid-epoch computes the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.acceptance.inputs import Inputs
from toolkit.acceptance.preread import embedding_table
from toolkit.engine.facts import vocab_size
from toolkit.errors import InputError
from toolkit.models.teacher import LOGITS, hidden_size, pad_right, picked, states_and_logits_of
from toolkit.sampling import seed_of
from toolkit.training.batches import Examples
from toolkit.training.examples import Positions, check_labels, joined
from toolkit.training.recorded import drawn_depths
from toolkit.types import SMALLEST, History

MOST_EXAMPLES, MOST_BYTES = 512, 2**27  # of states that are computed together, in the draft's number format
ENOUGH_TOKENS = 1024  # a forward pass of this many tokens takes no further example whose padding exceeds
MOST_PADDING = 0.05  # of the longest one; another forward pass begins with that example


class MixedSequences:
    """A split of mixed data as flat arrays: tokens of all examples, positions of drafted tokens, and their labels.

    Examples without a drafted token are left out. An example is read up to its last drafted token.

    split  a datasets.Dataset with the columns of data_gen.mix
    where  names it in messages; hint: says there what to do
    counts [examples]   drafted tokens of each
    lengths [examples]  tokens up to the last drafted one
    Raises InputError if a label is not a probability.
    """

    def __init__(self, split: Any, where: str, hint: str):
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
        check_labels(self._labels, where, hint)
        self.counts = counts[nonempty]
        self._ends = np.cumsum(self.counts)
        self.lengths = self._positions[self._ends - 1] + 1 if len(nonempty) else self.counts
        self.num_examples, self.num_positions = len(nonempty), len(drafted)
        self._where, self._first, self._row_lengths = where, None, np.diff(ends, prepend=0)
        if "prompt_length" in table.column_names:
            self._first = starts + table["prompt_length"].to_numpy()
        self._nonempty = nonempty

    def depths(self, most: int, seed: int) -> Tensor:
        """Depths in the round of all drafted tokens [num_positions], in 1..most (`toolkit.training.recorded`).

        Labels are probabilities of the token drafted at a position, even where the text goes on with another token.
        """
        generator, probs = torch.Generator().manual_seed(seed_of(seed)), torch.from_numpy(self._accept_probs.copy())
        first = torch.from_numpy(np.repeat(self._responses(), self._row_lengths))
        depths = drawn_depths(probs, first, most, generator)
        return depths[torch.from_numpy(self._drafted)]

    def response_start(self, example: int) -> int:
        """The position within an example where its response begins. Raises InputError if the data do not say."""
        return int(self._responses()[self._nonempty[example]] - self._starts[example])

    def _responses(self) -> np.ndarray:
        if self._first is None:
            advice = "which this head needs: run data_gen.mix again"
            raise InputError(f"{self._where} does not say where prompts end, {advice}")
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


class OnlineStates(Examples):
    """At most `batch_size` examples in one forward pass of the draft.

    inputs  what the head to be trained reads beside the states; seed: of the depths in the round
    width   features of a position
    tokens_read, tokens_computed  of all forward passes so far; their difference is padding
    """

    def __init__(
        self, draft: Any, sequences: MixedSequences, batch_size: int, inputs: Inputs | None = None, seed: int = 0
    ):
        self.draft, self.sequences, self.batch_size, self.inputs = draft, sequences, batch_size, inputs or Inputs()
        most = self.inputs.round_depth
        self.depths = sequences.depths(most, seed) if most else torch.ones(sequences.num_positions, dtype=torch.long)
        self.table = embedding_table(draft) if self.inputs.earlier else None
        size = hidden_size(draft)
        self.width = size + self.inputs.size_of_more(size, 0 if self.table is None else self.table.shape[1])
        self.num_examples, self.num_positions = sequences.num_examples, sequences.num_positions
        self.tokens_read = self.tokens_computed = 0

    def batch(self, examples: Sequence[int]) -> Positions:
        positions = self.gather(examples)
        return joined([positions[example] for example in examples])

    def batches(self, parts: Sequence[Sequence[int]], start: int = 0) -> Iterator[Positions]:
        for first, group in self.groups(parts, start):
            positions = self.gather(sorted({example for part in group for example in part}))
            for part in group[max(start - first, 0) :]:
                yield joined([positions[example] for example in part])

    def groups(self, parts: Sequence[Sequence[int]], start: int = 0) -> Iterator[tuple[int, Sequence[Sequence[int]]]]:
        """Groups that are read together, from that of `start` on: each group's first batch number, and its batches."""
        largest = max((len(part) for part in parts), default=1)
        width = max(self.most_examples() // largest, 1)
        for first in range(start // width * width, len(parts), width):
            yield first, parts[first : first + width]

    def most_examples(self) -> int:
        """The number of examples of mean length that are computed together: MOST_EXAMPLES, fewer if they exceed MOST_BYTES."""
        mean = self.num_positions / max(self.num_examples, 1) * self.width * self.draft.dtype.itemsize
        return max(min(MOST_EXAMPLES, int(MOST_BYTES / max(mean, 1))), 1)

    def gather(self, examples: Iterable[int]) -> dict[int, Positions]:
        """The positions of each of these examples; those of like length share a forward pass."""
        positions: dict[int, Positions] = {}
        for chunk in self._chunks(examples):
            positions |= zip(chunk, self._forward(chunk), strict=True)
        return positions

    def _chunks(self, examples: Iterable[int]) -> Iterator[list[int]]:
        """The examples of each forward pass, the longest first: at most `batch_size`, fewer rather than much padding, or than
        more than LOGITS logits."""
        chunk: list[int] = []
        most = LOGITS // vocab_size(self.draft)  # tokens
        for example in sorted(examples, key=lambda example: (-self.sequences.lengths[example], example)):
            longest = int(self.sequences.lengths[chunk[0]]) if chunk else 0
            padding = longest - int(self.sequences.lengths[example])
            wasteful = longest * len(chunk) >= ENOUGH_TOKENS and padding > MOST_PADDING * longest
            if len(chunk) == self.batch_size or wasteful or (chunk and longest * (len(chunk) + 1) > most):
                yield chunk
                chunk = []
            chunk.append(example)
        if chunk:
            yield chunk

    def _forward(self, examples: Sequence[int]) -> list[Positions]:
        sequences = [self.sequences.tokens(example) for example in examples]
        tokens = pad_right(sequences)
        self.tokens_read += sum(map(len, sequences))
        self.tokens_computed += tokens.numel()
        states, logits = states_and_logits_of(self.draft, tokens)
        positions = []
        for row, example in enumerate(examples):
            drafted, labels = self.sequences.drafted(example)
            read = drafted.to(states.device)
            before = logits[row, (drafted - 1).to(logits.device)].float().log_softmax(-1).exp()
            confidence = picked(before, tokens[row, drafted].to(before.device)).to(states.device)
            features = self._features(states[row], logits[row], sequences[row], read, example)
            positions.append(Positions(features, labels, confidence))
        return positions

    def _features(self, states: Tensor, logits: Tensor, text: Sequence[int], positions: Tensor, example: int) -> Tensor:
        """A head's inputs [n, F] at `positions` [n] of a text, from the draft's states [T, D] and logits [T, V]."""
        before, length = None, len(text)
        if self.inputs.num_history:
            tokens, logits = torch.tensor(text, device=states.device), logits[:length].to(states.device)
            first, count = self.sequences.response_start(example), self.inputs.num_history
            before = history_at(states[:length], logits, tokens, positions, first, count)
        depth = self.depths[self.sequences.span(example)].to(states.device)
        return self.inputs.with_more(states[positions], before, self.table, depth)


def history_at(states: Tensor, logits: Tensor, tokens: Tensor, positions: Tensor, first: int, count: int) -> History:
    """The `count` newest positions up to and including each of `positions` [n]: what the draft has once it has read them.

    Live decoding keeps the same. An entry holds the state that its token was drawn from, its token (drafted or the target's)
    and the shape of q, the draft's own over its whole output layer.

    states [T, D], logits [T, V] after every token, tokens [T]; first: the response's first position, from 1
    """
    probs = logits[:-1].float().softmax(-1)  # of the tokens at positions 1..T-1
    token_prob = probs.gather(-1, tokens[1:].unsqueeze(-1)).squeeze(-1)
    log_probs = token_prob.double().clamp(min=SMALLEST).log()
    log_probs[: first - 1] = 0
    back = torch.arange(count, device=positions.device).flip(0)
    at = positions.unsqueeze(1) - back
    present = at >= first
    before = (at - 1).clamp(min=0)
    entropy = torch.special.entr(probs).sum(-1)
    read, top = tokens[at.clamp(min=0)], probs.topk(2, -1).values[before]
    entries = (states[before], read, token_prob[before], entropy[before], top)
    hidden, token_ids, prob, entropies, top = (v * present.view(*present.shape, *[1] * (v.dim() - 2)) for v in entries)
    likelihood, number = log_probs.cumsum(0)[positions - 1].float(), (positions - first + 1).float()
    return History(hidden, token_ids, prob, entropies, top, present, likelihood, number)

"""States that the draft computes when a batch needs them.

The examples of several batches are read together, sorted by length, so that little of a forward pass is padding. The resulting
positions lie one after another, without padding. Which batches are read together is a function of their numbers alone.
So a training that goes on in mid-epoch computes the same numbers as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from toolkit.acceptance.inputs import Inputs
from toolkit.acceptance.preread import embedding_table
from toolkit.models.teacher import hidden_size, pad_right, picked, states_and_logits_of
from toolkit.training.mixed_texts import MixedTexts
from toolkit.training.states import Positions, States, joined
from toolkit.types import SMALLEST, Earlier

MOST_EXAMPLES, MOST_BYTES = 512, 2**27  # of states that are computed together, in the draft's number format
ENOUGH_TOKENS = 1024  # a forward pass of this many tokens takes no further example whose padding exceeds
MOST_PADDING = 0.05  # of the longest one; another forward pass begins with that example


class OnlineStates(States):
    """At most `batch_size` examples in one forward pass of the draft.

    inputs  what the head to be trained reads beside the states; seed: of the depths in the round
    width   features of a position
    tokens_read, tokens_computed  of all forward passes so far; their difference is padding
    """

    def __init__(self, draft: Any, texts: MixedTexts, batch_size: int, inputs: Inputs | None = None, seed: int = 0):
        self.draft, self.texts, self.batch_size, self.inputs = draft, texts, batch_size, inputs or Inputs()
        most = self.inputs.round_depth
        self.depths = texts.depths(most, seed) if most else torch.ones(texts.num_positions, dtype=torch.long)
        self.table = embedding_table(draft) if self.inputs.earlier else None
        size = hidden_size(draft)
        self.width = size + self.inputs.size_of_more(size, 0 if self.table is None else self.table.shape[1])
        self.num_examples, self.num_positions = texts.num_examples, texts.num_positions
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
        """The examples of each forward pass, the longest first: at most `batch_size`, fewer rather than much padding."""
        chunk: list[int] = []
        for example in sorted(examples, key=lambda example: (-self.texts.lengths[example], example)):
            longest = int(self.texts.lengths[chunk[0]]) if chunk else 0
            padding = longest - int(self.texts.lengths[example])
            if len(chunk) == self.batch_size or (
                longest * len(chunk) >= ENOUGH_TOKENS and padding > MOST_PADDING * longest
            ):
                yield chunk
                chunk = []
            chunk.append(example)
        if chunk:
            yield chunk

    def _forward(self, examples: Sequence[int]) -> list[Positions]:
        texts = [self.texts.tokens(example) for example in examples]
        tokens = pad_right(texts)
        self.tokens_read += sum(map(len, texts))
        self.tokens_computed += tokens.numel()
        states, logits = states_and_logits_of(self.draft, tokens)
        positions = []
        for row, example in enumerate(examples):
            drafted, labels = self.texts.drafted(example)
            read = drafted.to(states.device)
            before = logits[row, (drafted - 1).to(logits.device)].float().log_softmax(-1).exp()
            confidence = picked(before, tokens[row, drafted].to(before.device)).to(states.device)
            positions.append(
                Positions(self._features(states[row], logits[row], texts[row], read, example), labels, confidence)
            )
        return positions

    def _features(self, states: Tensor, logits: Tensor, text: Sequence[int], positions: Tensor, example: int) -> Tensor:
        """A head's inputs [n, F] at `positions` [n] of a text, from the draft's states [T, D] and logits [T, V]."""
        before, length = None, len(text)
        if self.inputs.num_earlier:
            tokens, logits = torch.tensor(text, device=states.device), logits[:length].to(states.device)
            first, count = self.texts.response_start(example), self.inputs.num_earlier
            before = earlier_at(states[:length], logits, tokens, positions, first, count)
        depth = self.depths[self.texts.span(example)].to(states.device)
        return self.inputs.with_more(states[positions], before, self.table, depth)


def earlier_at(states: Tensor, logits: Tensor, tokens: Tensor, positions: Tensor, first: int, count: int) -> Earlier:
    """The `count` newest positions up to and including each of `positions` [n]: what the draft has once it has read them.

    Live decoding keeps the same. An entry holds the state that its token was drawn from, its token (drafted or the target's)
    and the shape of q. Positions are those of the response. Distributions are the draft's own, over its whole output layer.

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
    entries = (
        states[before],
        tokens[at.clamp(min=0)],
        token_prob[before],
        entropy[before],
        probs.topk(2, -1).values[before],
    )
    hidden, token_ids, prob, entropies, top = (v * present.view(*present.shape, *[1] * (v.dim() - 2)) for v in entries)
    likelihood, number = log_probs.cumsum(0)[positions - 1].float(), (positions - first + 1).float()
    return Earlier(hidden, token_ids, prob, entropies, top, present, likelihood, number)

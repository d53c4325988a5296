"""The target's responses as batches of texts, in an order that a training can leave and take up again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Annotated

import torch

from toolkit.config.notes import AtLeast, Between
from toolkit.errors import InputError
from toolkit.models.teacher import Text
from toolkit.sampling import seed_of
from toolkit.training.batches import Examples, ResumableData

MEASURED = 500  # produced tokens of validation texts
TOKENS_AT_ONCE = 4096


class DraftBatch:
    """Some texts, and per text the produced tokens that are looked at, from 0 (None: all); `labels` are those tokens.

    most  tokens that a forward pass reads at once
    """

    def __init__(
        self, sequences: Sequence[Text], positions: Sequence[Sequence[int]] | None = None, most: int = TOKENS_AT_ONCE
    ):
        self.sequences, self.most = list(sequences), most
        self.positions = positions or [range(len(produced)) for _, produced in sequences]
        labels = [
            produced[i] for (_, produced), where in zip(self.sequences, self.positions, strict=True) for i in where
        ]
        self.labels = torch.tensor(labels, dtype=torch.long)

    def emptied(self) -> DraftBatch:
        """A batch of no texts: the share of a process for which too few are left."""
        return DraftBatch([])

    def parts(self) -> Iterator[DraftBatch]:
        """The texts that a forward pass reads at once, group by group."""
        for group in groups([length_of(text) for text in self.sequences], self.most):
            yield DraftBatch([self.sequences[i] for i in group], [self.positions[i] for i in group], self.most)


def length_of(text: Text) -> int:
    """Tokens of prompt and response."""
    return len(text[0]) + len(text[1])


def groups(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Numbers of texts, in groups that have `most` tokens with their padding, or one text; of similar length, if several."""
    if lengths and len(lengths) * max(lengths) <= most:
        return [list(range(len(lengths)))]
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= most:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


class TextPart(Examples):
    """The texts of a split.

    most            of their produced tokens that are looked at, evenly spread over all texts; texts without any are left out
    tokens_at_once  that a forward pass reads
    """

    def __init__(self, sequences: Sequence[Text], most: int | None = None, tokens_at_once: int = TOKENS_AT_ONCE):
        ends = [0, *accumulate(len(produced) for _, produced in sequences)]
        total = self.total = ends[-1]
        count = self.num_positions = total if most is None else min(most, total)
        positions = [  # number n of `count` is token n * total // count of all texts
            [n * total // count - begin for n in range(-(-begin * count // total), -(-end * count // total))]
            for begin, end in pairwise(ends)
        ]
        looked_at = [(text, where) for text, where in zip(sequences, positions, strict=True) if where]
        self.whole = DraftBatch([text for text, _ in looked_at], [where for _, where in looked_at], tokens_at_once)
        self.num_examples = len(looked_at)

    def batch(self, examples: Sequence[int]) -> DraftBatch:
        sequences, positions = self.whole.sequences, self.whole.positions
        return DraftBatch([sequences[i] for i in examples], [positions[i] for i in examples], self.whole.most)


class TextData(ResumableData):
    """Responses to a share of the prompts are kept for validation, which looks at MEASURED of their tokens at most.

    texts                of all prompts
    batch_size           texts per step (and process)
    tokens_at_once       that a forward pass reads, padding included; a longer text is read alone. It bounds the memory, and
                         changes nothing else: loss and gradients are those of the whole step
    validation_fraction  of the prompts
    shuffle              a new order of the texts for every epoch
    seed                 of the orders and of the split
    """

    def __init__(
        self,
        sequences: Sequence[Text],
        batch_size: Annotated[int, AtLeast(1)] = 16,
        validation_fraction: Annotated[float, Between(0, 1, "()")] = 0.1,
        shuffle: bool = True,
        seed: int = 0,
        tokens_at_once: Annotated[int, AtLeast(1)] = TOKENS_AT_ONCE,
    ):
        super().__init__()
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        train, validation = split(sequences, validation_fraction, seed)
        self.states: dict[str, TextPart] = {
            "train": TextPart(train, None, tokens_at_once),
            "validation": TextPart(validation, MEASURED, tokens_at_once),
        }


def split(sequences: Sequence[Text], fraction: float, seed: int) -> tuple[list[Text], list[Text]]:
    """Training and validation texts; all texts of a prompt are on one side. Raises InputError for a single prompt."""
    prompts = list(dict.fromkeys(tuple(prompt) for prompt, _ in sequences))
    if len(prompts) < 2:
        raise InputError(f"expected responses to at least 2 prompts, to train and to validate on, got {len(prompts)}")
    count = min(max(round(fraction * len(prompts)), 1), len(prompts) - 1)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed_of(seed))).tolist()
    held_out = {prompts[i] for i in order[:count]}
    train = [text for text in sequences if tuple(text[0]) not in held_out]
    return train, [text for text in sequences if tuple(text[0]) in held_out]

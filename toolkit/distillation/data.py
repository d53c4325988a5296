"""The target's responses as batches of texts, in an order that a training can leave and take up again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated

import torch

from toolkit.config.notes import AtLeast, Between
from toolkit.errors import InputError
from toolkit.models.teacher import Text
from toolkit.training.batches import Examples, ResumableData

MEASURED = 500  # produced tokens of validation texts


class DraftBatch:
    """Some texts, and per text the produced tokens that are looked at, from 0 (None: all); `labels` are those tokens."""

    def __init__(self, texts: Sequence[Text], positions: Sequence[Sequence[int]] | None = None):
        self.texts = list(texts)
        self.positions = positions or [range(len(produced)) for _, produced in texts]
        labels = [produced[i] for (_, produced), where in zip(self.texts, self.positions, strict=True) for i in where]
        self.labels = torch.tensor(labels, dtype=torch.long)

    def emptied(self) -> DraftBatch:
        """A batch of no texts: the share of a process for which too few are left."""
        return DraftBatch([])


class TextPart(Examples):
    """The texts of a split.

    most  of their produced tokens that are looked at, evenly spread over all texts; texts without any are left out
    """

    def __init__(self, texts: Sequence[Text], most: int | None = None):
        ends = [0, *accumulate(len(produced) for _, produced in texts)]
        total = self.total = ends[-1]
        count = self.num_positions = total if most is None else min(most, total)
        positions = [  # number n of `count` is token n * total // count of all texts
            [n * total // count - begin for n in range(-(-begin * count // total), -(-end * count // total))]
            for begin, end in pairwise(ends)
        ]
        looked_at = [(text, where) for text, where in zip(texts, positions, strict=True) if where]
        self.whole = DraftBatch([text for text, _ in looked_at], [where for _, where in looked_at])
        self.num_examples = len(looked_at)

    def batch(self, examples: Sequence[int]) -> DraftBatch:
        return DraftBatch([self.whole.texts[i] for i in examples], [self.whole.positions[i] for i in examples])


class TextData(ResumableData):
    """Responses to a share of the prompts are kept for validation, which looks at MEASURED of their tokens at most.

    texts                of all prompts
    batch_size           texts per step (and process)
    validation_fraction  of the prompts
    shuffle              a new order of the texts for every epoch
    seed                 of the orders and of the split
    """

    def __init__(
        self,
        texts: Sequence[Text],
        batch_size: Annotated[int, AtLeast(1)] = 16,
        validation_fraction: Annotated[float, Between(0, 1, "()")] = 0.1,
        shuffle: bool = True,
        seed: int = 0,
    ):
        super().__init__()
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        train, validation = split(texts, validation_fraction, seed)
        self.states: dict[str, TextPart] = {"train": TextPart(train), "validation": TextPart(validation, MEASURED)}


def split(texts: Sequence[Text], fraction: float, seed: int) -> tuple[list[Text], list[Text]]:
    """Training and validation texts; all texts of a prompt are on one side. Raises InputError for a single prompt."""
    prompts = list(dict.fromkeys(tuple(prompt) for prompt, _ in texts))
    if len(prompts) < 2:
        raise InputError(f"expected responses to at least 2 prompts, to train and to validate on, got {len(prompts)}")
    count = min(max(round(fraction * len(prompts)), 1), len(prompts) - 1)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = {prompts[i] for i in order[:count]}
    train = [text for text in texts if tuple(text[0]) not in held_out]
    return train, [text for text in texts if tuple(text[0]) in held_out]

"""The target's responses as batches of texts, in an order that a training can leave and take up again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch

from toolkit.config.notes import AtLeast, Between
from toolkit.errors import InputError
from toolkit.models.teacher import Text
from toolkit.training.batches import Examples
from toolkit.training.resumable import ResumableData


class TextBatch:
    """Some texts; `labels` are their produced tokens, one after another."""

    def __init__(self, texts: Sequence[Text]):
        self.texts = list(texts)
        self.labels = torch.tensor([token for _, produced in texts for token in produced], dtype=torch.long)

    def emptied(self) -> TextBatch:
        """A batch of no texts: the share of a process for which too few are left."""
        return TextBatch([])


class TextPart(Examples):
    """The texts of a split."""

    def __init__(self, texts: Sequence[Text]):
        self.texts = list(texts)
        self.num_examples = len(self.texts)

    @property
    def num_tokens(self) -> int:
        """Produced tokens of all texts."""
        return sum(len(produced) for _, produced in self.texts)

    def batch(self, examples: Sequence[int]) -> TextBatch:
        """The texts of these numbers."""
        return TextBatch([self.texts[i] for i in examples])


class TextData(ResumableData):
    """Responses to a share of the prompts are kept for validation.

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
        self.states: dict[str, Any] = {"train": TextPart(train), "validation": TextPart(validation)}


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

"""Given texts, and which of their positions are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolkit.errors import InputError
from toolkit.pair import ModelPair


@dataclass(frozen=True)
class Text:
    """What the target responded to one prompt."""

    prompt: str
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]


def check_texts(pair: ModelPair, texts: Sequence[Text]) -> None:
    """Raises InputError if the pair cannot read a text."""
    for text in texts:
        ids = [*text.prompt_ids, *text.token_ids]
        if len(ids) > pair.max_length:
            raise InputError(f"text {text.prompt}: {len(ids)} tokens exceed the context of {pair.max_length}")
        if ids and not 0 <= min(ids) <= max(ids) < pair.vocab_size:
            raise InputError(
                f"text {text.prompt}: expected token ids in [0, {pair.vocab_size}), got {min(ids)}..{max(ids)}"
            )


def choose_positions(length: int, most: int | None, generator: torch.Generator) -> list[int]:
    """At most `most` of a text's positions, drawn without replacement, in order; None: all."""
    if most is None or length <= most:
        return list(range(length))
    return sorted(torch.randperm(length, generator=generator)[:most].tolist())

"""p and q along given texts, by one teacher-forced pass of the target and one of the (first) draft.

Shapes: n chosen positions of a text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.pair import ModelPair, vocab_size
from toolkit.sampling import Sampling, warp
from toolkit.teacher import logits_of, pad_right


@dataclass(frozen=True)
class Text:
    """What the target responded to one prompt."""

    prompt: str
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]

    def before(self, position: int) -> list[int]:
        """Everything in front of the produced token number `position`."""
        return [*self.prompt_ids, *self.token_ids[:position]]


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


@torch.inference_mode()
def laws_along(
    pair: ModelPair,
    texts: Sequence[Text],
    positions: Sequence[Sequence[int]],
    sampling: Sampling,
    draft_temperature: float | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """p and q [n, V] of the produced tokens at the chosen positions, text by text: warped as in decoding."""
    reads = pad_right([text.before(max(chosen)) for text, chosen in zip(texts, positions, strict=True)])
    target = logits_of(pair.target, reads)
    draft = logits_of(pair.draft, reads.clamp(max=vocab_size(pair.draft) - 1))
    for row, (text, chosen) in enumerate(zip(texts, positions, strict=True)):
        places = [len(text.prompt_ids) + position - 1 for position in chosen]
        seen = _seen(text, chosen, pair, sampling)
        p = warp(target[row, places].to(pair.device), sampling, seen)
        q = warp(pair.fit(draft[row, places]), sampling.at(draft_temperature), seen)
        yield p, q.to(p.dtype)


def _seen(text: Text, chosen: Sequence[int], pair: ModelPair, sampling: Sampling) -> Any:
    """Tokens in front of each position [n, V] bool; None if no penalty asks for them."""
    if sampling.repetition_penalty == 1.0:
        return None
    seen = torch.zeros(len(chosen), pair.vocab_size, dtype=torch.bool, device=pair.device)
    for row, position in enumerate(chosen):
        seen[row, text.before(position)] = True
    return seen

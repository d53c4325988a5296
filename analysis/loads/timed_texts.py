"""Prompts that are cut or continued to the lengths behind which rounds are timed."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.loads.tabulated import APART, FAR, NEAR
from toolkit.decoding import Sampling
from toolkit.pair import ModelPair

# Tokens of a response. For contexts behind longer ones the line of costs is continued.
FARTHEST = 512
# Tokens behind a prompt that small models are timed for, or `num_rounds` rounds if these make more.
STEADY = 64


def texts_of(
    pair: ModelPair, prompts: Sequence[Sequence[int]], sampling: Sampling, room: int
) -> dict[str, list[list[int]]]:
    """Prompts of rounds near and far. Of near ones, small models' timed tokens have their middle at a quarter of a longest
    response, or start at once where that is too early. Far ones are longer by a whole one.

    Only near ones if no more than `room` tokens fit behind longer ones.
    """
    longest = max(len(prompt) for prompt in prompts)
    more = max(min(sampling.max_new_tokens, FARTHEST, pair.max_length - longest - room), 0)
    near = max(more // 4 - STEADY // 2, 0)
    places = {NEAR: near} | ({FAR: more} if more - near >= APART else {})
    return {where: [of_length(prompt, len(prompt) + by) for prompt in prompts] for where, by in places.items()}


def filled(batch: int, prompts: Sequence[list[int]]) -> list[list[int]]:
    """As many of the prompts as a batch has slots, of evenly spread lengths. A batch of one gets one of the median length."""
    ordered = sorted(prompts, key=len)
    return [ordered[int((slot + 0.5) / batch * len(ordered))] for slot in range(batch)]


def of_length(tokens: Sequence[int], count: int) -> list[int]:
    """A prompt of `count` tokens: the last ones of this prompt, which is repeated if it has fewer."""
    return (list(tokens) * -(-count // len(tokens)))[-count:]

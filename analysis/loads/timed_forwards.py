"""Rounds of a fixed draft length, and readings of prompts, decoded and timed: a line per round and model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from analysis.loads.tabulated import PROMPT
from toolkit.decoding import ChainProposer, Method, Sampling
from toolkit.decoding.decode import decode_measured
from toolkit.errors import InputError
from toolkit.pair import ModelPair
from toolkit.session.hf import GRANULE
from toolkit.stopping import Fixed
from toolkit.types import Generation
from toolkit.verification import get

WARM_UP = 1  # the rounds of a batch that are left out: the first one reads the prompts
Reader = Callable[[], list[dict[str, Any]]]  # times one reading of prompts


def decoded(
    pair: ModelPair, prompts: Sequence[Any], sampling: Sampling, length: int, tokens: int, capacity: int = 0
) -> list[Generation]:
    """Rounds that make this many tokens behind every prompt, all side by side, and a last round."""
    limit = replace(sampling, max_new_tokens=tokens + 1, max_length=None, stop=())
    found = decode_measured(
        pair, prompts, _fixed(length), limit, batch_size=len(prompts), timed=True, capacity=capacity
    )
    return found.generations


def forwards(generations: Sequence[Generation], length: int, where: str) -> list[dict[str, Any]]:
    """The timed rounds that all rows took part in, with full drafts.

    generations  of one batch, decoded with drafts of `length` tokens
    where        kind of the texts, for the lines

    Raises InputError if a prompt failed.
    """
    _refuse_failed(generations)
    lines: list[dict[str, Any]] = []
    texts = [len(g.prompt_ids) for g in generations]
    for number in range(min(len(g.rounds) for g in generations) - 1):
        rounds = [g.rounds[number] for g in generations]
        if number >= WARM_UP and min(r.num_drafted for r in rounds) == length:
            window = max(texts) // GRANULE * GRANULE + GRANULE / 2
            shared = {"batch": len(generations), "context": window, "drafted": length, "texts": where}
            first = rounds[0]
            own = first.target_seconds if length else first.draft_seconds + first.target_seconds
            lines.append({"model": "target", "width": length + 1, **shared, "seconds": own})
            if length:
                lines.append({"model": "draft", "width": 1, **shared, "seconds": first.draft_seconds})
        texts = [text + r.num_produced for text, r in zip(texts, rounds, strict=True)]
    return lines


def reader(pair: ModelPair, prompts: Sequence[list[int]], sampling: Sampling) -> Reader:
    """Times readings of prompts by forwards that are never captured. The first one is not counted.

    prompts  all of one length

    Raises InputError, now or in a later reading, if a prompt fails.
    """
    uncaptured = replace(pair, draft=None, options=replace(pair.options, cuda_graphs="off"))
    _reading(uncaptured, prompts, sampling)
    return partial(_reading, uncaptured, prompts, sampling)


# -- inside -----------------------------------------------------------------------------------------------------------


def _reading(pair: ModelPair, prompts: Sequence[list[int]], sampling: Sampling) -> list[dict[str, Any]]:
    """A timed first round: the draft reads the prompts, all of one length, and the target reads them and a drafted token."""
    generations = decoded(pair, prompts, sampling, 1, tokens=2)
    _refuse_failed(generations)
    first, width = generations[0].rounds[0], len(prompts[0])
    shared = {"batch": len(prompts), "context": 0.0, "drafted": 1, "texts": PROMPT}
    return [
        {"model": "draft", "width": width, **shared, "seconds": first.draft_seconds},
        {"model": "target", "width": width + 1, **shared, "seconds": first.target_seconds},
    ]


def _fixed(length: int) -> Method:
    return Method(
        f"K={length}", Fixed(max(length, 1)), get("rejection"), ChainProposer(), min_drafted=0, max_drafted=length
    )


def _refuse_failed(generations: Sequence[Generation]) -> None:
    failed = next((g.error for g in generations if g.error), None)
    if failed is not None:
        raise InputError(f"a prompt cannot be timed: {failed}")

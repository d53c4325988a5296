"""Causes of several kinds of drafts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from toolkit.drafts.causes import Case, Cause, ReplayedText, whole_context


def shifted_positions(_: Case) -> Iterator[Cause]:
    """Positions after the prompt alone: where all are shifted, relative ones stay what they are."""
    meaning = "the draft's positions after the prompt are one too"
    yield Cause(f"{meaning} high", positions=lambda positions, prompt: positions + (positions >= prompt).long())
    yield Cause(f"{meaning} low", positions=lambda positions, prompt: positions - (positions >= prompt).long())


def cut_contexts(case: Case) -> Iterator[Cause]:
    for size in [2**power for power in range(6, 24)] if case.windows is None else case.windows:
        if size < case.longest:
            meaning, setting = f"the draft reads the last {size} tokens alone", "a longer context of the draft"
            yield Cause(meaning, setting, partial(last_tokens, size=size))


def last_tokens(text: ReplayedText, size: int) -> list[int]:
    return whole_context(text)[-size:]


def penalty_of_target_alone(case: Case) -> Iterator[Cause]:
    if case.sampling.repetition_penalty != 1.0:
        meaning, setting = "the repetition penalty is the target's alone", "repetition_penalty=1 in requests"
        yield Cause(meaning, setting, sampling=lambda sampling: replace(sampling, repetition_penalty=1.0))


def other_format(case: Case) -> Iterator[Cause]:
    """The draft in bfloat16; where it has no more bits, in float32."""
    name = "bfloat16" if case.draft.dtype in (torch.float32, torch.float64) else "float32"
    setting = f"pair.dtype={name} here, or the format of the draft there"
    yield Cause(
        f"the draft computes in {name}",
        setting,
        draft=lambda draft: copy.deepcopy(draft).to(getattr(torch, name)),
        rounding=True,
    )

"""Causes of several kinds of drafts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn

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
    shorter = case.draft.dtype in (torch.float32, torch.float64)
    name, draft = ("bfloat16", in_bfloat16) if shorter else ("float32", in_float32)
    setting = f"pair.dtype={name} here, or the format of the draft there"
    yield Cause(f"the draft computes in {name}", setting, draft=draft, rounding=True)


def in_float32(draft: nn.Module) -> nn.Module:
    return copy.deepcopy(draft).float()


def in_bfloat16(draft: nn.Module) -> nn.Module:
    """The draft in bfloat16. On a CPU its linear layers multiply rounded numbers in float32 and round the product.

    oneDNN does the same where the processor has instructions for it; where it has none, it takes some ten times as long.
    """
    draft = copy.deepcopy(draft).to(torch.bfloat16)
    for module in draft.modules():
        if isinstance(module, nn.Linear) and module.weight.device.type == "cpu":
            for name, values in list(module.named_parameters(recurse=False)):
                # A parameter of its own: the output layer's may be the embeddings, too.
                setattr(module, name, nn.Parameter(values.float(), requires_grad=False))
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
            module.register_forward_hook(lambda _, inputs, product: product.bfloat16())
    return draft

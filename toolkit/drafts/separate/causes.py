"""What engines get wrong with a draft that is a causal language model of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from toolkit.drafts.causes import Case, Cause, ReplayedText, whole_context

QUESTION = "\0"  # stands for one in a chat template


def causes(case: Case) -> list[Cause]:
    """The causes that apply to a case."""
    parts = (
        stale_caches,
        shifted_positions,
        begin_tokens,
        bare_prompts,
        cut_contexts,
        penalty_of_target_alone,
        other_format,
    )
    return [cause for part in parts for cause in part(case)]


def stale_caches(_: Case) -> Iterator[Cause]:
    for most, which in ((1, "one rejected token"), (None, "all rejected tokens")):
        yield Cause(f"the draft's cache keeps {which} of a round", context=partial(with_rejected, most=most))


def with_rejected(text: ReplayedText, most: int | None) -> list[int]:
    """The context with the first `most` (None: all) rejected tokens of each round; a round's last token is not read."""
    ids, read = list(text.prompt_ids), 0
    for start, drafted, accepted in text.rounds:
        ids += text.token_ids[read : start + accepted] + drafted[accepted:-1][:most]
        read = start + accepted
    return ids + text.token_ids[read : text.start]


def shifted_positions(_: Case) -> Iterator[Cause]:
    """Positions after the prompt alone: where all are shifted, relative ones stay what they are."""
    meaning = "the draft's positions after the prompt are one too"
    yield Cause(f"{meaning} high", positions=lambda positions, prompt: positions + (positions >= prompt).long())
    yield Cause(f"{meaning} low", positions=lambda positions, prompt: positions - (positions >= prompt).long())


def begin_tokens(case: Case) -> Iterator[Cause]:
    begin = getattr(case.tokenizer, "bos_token_id", None)
    if begin is None:
        return
    setting = "prompts as token ids, or add_special_tokens=false where a chat template writes the begin token"
    extra = of_prompt(lambda prompt: [begin, *prompt])
    if all(prompt[0] == begin and len(prompt) > 1 for prompt in case.prompts):
        yield Cause("the draft reads the prompt without its begin token", setting, of_prompt(lambda prompt: prompt[1:]))
        yield Cause("the draft reads the prompt with two begin tokens", setting, extra)
    else:
        yield Cause("the draft reads the prompt with a begin token before it", setting, extra)


def of_prompt(change: Callable[[list[int]], list[int]]) -> Callable[[ReplayedText], list[int]]:
    """The context after another prompt."""
    return lambda text: [*change(text.prompt_ids), *text.token_ids[: text.start]]


def bare_prompts(case: Case) -> Iterator[Cause]:
    """Prompts without what the tokenizer's chat template puts around a question, where some begin and end with it."""
    tokenizer = case.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        return
    question = [{"role": "user", "content": QUESTION}]
    whole = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    before, _, after = whole.partition(QUESTION)

    def bare(prompt: list[int]) -> list[int]:
        text = tokenizer.decode(prompt)
        if not (text.startswith(before) and text.endswith(after)):
            return prompt
        return list(tokenizer(text[len(before) : len(text) - len(after)]).input_ids) or prompt

    if any(bare(prompt) != prompt for prompt in case.prompts):
        setting = "prompts as token ids, or the target's chat template for both"
        yield Cause("the draft reads the prompt without its chat template", setting, of_prompt(bare))


def cut_contexts(case: Case) -> Iterator[Cause]:
    for size in case.windows or [2**power for power in range(6, 24)]:
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

"""What engines get wrong with a draft that is a causal language model of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from toolkit.drafts.causes import Case, Cause, ReplayedText
from toolkit.drafts.causes.shared import cut_contexts, other_format, penalty_of_target_alone, shifted_positions

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


def stale_caches(case: Case) -> Iterator[Cause]:
    """At temperature 0: rejected tokens that were drawn are not in the counts."""
    if case.sampling.temperature:
        return
    for most, which in ((1, "one rejected token"), (None, "all rejected tokens")):
        yield Cause(f"the draft's cache keeps {which} of a round", context=partial(with_rejected, most=most))


def with_rejected(text: ReplayedText, most: int | None) -> list[int]:
    """The context with the first `most` (None: all) rejected tokens of each round; a round's last token is not read."""
    ids, read = list(text.prompt_ids), 0
    for start, drafted, accepted in text.rounds:
        ids += text.token_ids[read : start + accepted] + drafted[accepted:-1][:most]
        read = start + accepted
    return ids + text.token_ids[read : text.start]


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

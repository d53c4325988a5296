"""Chat messages to token ids through the tokenizer's template, and the options that templates read (`enable_thinking`)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from toolkit.errors import InputError, warn

# What `apply_chat_template` is called with here: no template's business.
OURS = ("conversation", "add_generation_prompt", "tokenize", "return_dict", "return_tensors", "padding", "truncation",
        "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask")  # fmt: skip
TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1""")  # how a template asks for the date, and in which format


def hint_of_template(tokenizer: Any, contents: Sequence[Any]) -> str | None:
    """The line that a chat model's user sees whose prompts are all plain text; None for other models and prompts.

    Texts with a special token of the tokenizer, or with Llama 2's [INST], were formatted by hand.
    """
    if not contents or not getattr(tokenizer, "chat_template", None):
        return None
    marks = {"[INST]", *map(str, getattr(tokenizer, "all_special_tokens", ()))} - {""}
    if not all(isinstance(text, str) and not any(mark in text for mark in marks) for text in contents):
        return None
    return (
        "hint: this tokenizer has a chat template, and the prompts are plain text, which is read as it stands. "
        '"messages": [{"role": "user", "content": "..."}] in the place of "prompt" would apply it '
        "(data sets of the hub: prompts.turns=FIELD prompts.chat=tokenizer)"
    )


def check_options(options: Mapping[str, Any], tokenizer: Any) -> None:
    """Raises InputError for options that are not the template's; warns of those that it reads nowhere."""
    for name in options:
        if name in OURS:
            raise InputError(f"chat_template_options.{name}: prompts are encoded with their own value; leave it out")
    if not options or not getattr(tokenizer, "chat_template", None):
        return
    template = tokenizer.get_chat_template()
    if unread := [name for name in options if not re.search(rf"\b{re.escape(name)}\b", template)]:
        message = f"the chat template reads no option called {', '.join(unread)}: it has no effect"
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> list[int]:
    """Token ids of a conversation, up to where the answer begins. Raises InputError if there is no template.

    Warns of a template that writes today's date.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("the prompt is a list of messages, but the tokenizer has no chat template")
    ids: list[int] = list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, **options)
    )
    dates = [datetime.now().strftime(pattern) for _, pattern in TODAY.findall(tokenizer.get_chat_template())]
    if dates and any(date in tokenizer.decode(ids) for date in dates):
        warn(
            "the chat template writes today's date, so prompts differ from day to day; many templates take another one: "
            "chat_template_options={date_string: '26 Jul 2024'}"
        )
    return ids

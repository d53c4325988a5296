"""Chat messages to token ids through the tokenizer's template, and the options that templates read (`enable_thinking`)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.errors import InputError

# What `apply_chat_template` is called with here: no template's business.
OURS = ("conversation", "add_generation_prompt", "tokenize", "return_dict", "return_tensors", "padding", "truncation",
        "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask")  # fmt: skip


def check_options(options: Mapping[str, Any], tokenizer: Any) -> None:
    """Raises InputError for options that are not the template's; warns of those that it reads nowhere."""
    for name in options:
        if name in OURS:
            raise InputError(
                f"chat_template_options.{name}: prompts are encoded with a value of their own; leave it out"
            )
    if not options or not getattr(tokenizer, "chat_template", None):
        return
    template = tokenizer.get_chat_template()
    unread = [name for name in options if not re.search(rf"\b{re.escape(name)}\b", template)]
    if unread:
        warnings.warn(
            f"the chat template reads no option called {', '.join(unread)}: it has no effect",
            RuntimeWarning,
            stacklevel=3,
        )


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> list[int]:
    """Token ids of a conversation, up to where the answer begins. Raises InputError if there is no template."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("the prompt is a list of messages, but the tokenizer has no chat template")
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, **options)
    )

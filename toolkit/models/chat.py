"""Chat messages to token ids through the tokenizer's template, and the options that templates read (`enable_thinking`)."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from toolkit.config.values import checked, shown
from toolkit.errors import InputError, warn

# What `apply_chat_template` is called with here: no template's business.
OURS = ("conversation", "add_generation_prompt", "tokenize", "return_dict", "return_tensors", "padding", "truncation",
        "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask")  # fmt: skip
CONTINUE = "continue_final_message"
Objects = Sequence[dict[str, Any]] | None
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


@checked
def read_request(
    messages: Sequence[Any],
    tools: Objects = None,
    documents: Objects = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages as templates read them, and what a request says to the template beside them. Raises InputError if malformed."""
    options = dict(chat_template_kwargs or {})
    check_options(options, None, "chat_template_kwargs")
    lists = {"tools": tools, "documents": documents}
    return [_message(turn) for turn in messages], options | {key: it for key, it in lists.items() if it is not None}


def _message(turn: Any) -> dict[str, Any]:
    """A turn as servers hand it to a template: its content as text, the arguments of its tool calls as objects."""
    match turn:
        case {"role": str(), "content": str(text) | [{"type": "text", "text": str(text)}]}:
            turn = {**turn, "content": text}
        case {"role": str(), "tool_calls": [_, *_]} if turn.get("content") is None:
            turn = {**turn, "content": ""}
        case _:
            expected = 'expected messages as a list of {"role": "...", "content": "..."}, null beside tool_calls alone'
            raise InputError(f"{expected} and at most one part of text, got {shown(turn)}")
    if isinstance(turn.get("tool_calls"), list):
        turn["tool_calls"] = [_tool_call(call) for call in turn["tool_calls"]]
    return turn


def _tool_call(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str(text)} as function}:
            try:
                return {**call, "function": {**function, "arguments": json.loads(text or "{}")}}
            except (ValueError, RecursionError):
                raise InputError(f"expected JSON as the arguments of a tool call, got {shown(text)}") from None
    return call


def check_options(options: Mapping[str, Any], tokenizer: Any, key: str = "chat_template_options") -> None:
    """Raises InputError for options that are not the template's; warns of those that it reads nowhere. key: that holds them."""
    for name in options:
        if name in OURS:
            raise InputError(f"{key}.{name}: prompts are encoded with their own value; leave it out")
    if not options or not getattr(tokenizer, "chat_template", None):
        return
    template = tokenizer.get_chat_template(tools=options.get("tools"))
    if unread := [name for name in options if name != CONTINUE and not re.search(rf"\b{re.escape(name)}\b", template)]:
        message = f"the chat template reads no option called {', '.join(unread)}: it has no effect"
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
    """Token ids of a conversation, up to where the answer begins: with CONTINUE, inside a last text of the assistant's.

    Raises InputError if there is no template. Warns of a template that writes today's date.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("the prompt is a list of messages, but the tokenizer has no chat template")
    goes_on = bool(options.get(CONTINUE)) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    options = {name: value for name, value in options.items() if name != CONTINUE or goes_on}
    options |= {"add_generation_prompt": not goes_on, "tokenize": True, "return_dict": False}
    ids: list[int] = list(tokenizer.apply_chat_template(messages, **options))
    template = tokenizer.get_chat_template(tools=options.get("tools"))
    dates = [datetime.now().strftime(pattern) for _, pattern in TODAY.findall(template)]
    if dates and any(date in tokenizer.decode(ids) for date in dates):
        warn(
            "the chat template writes today's date, so prompts differ from day to day; many templates take another one: "
            "chat_template_options={date_string: '26 Jul 2024'}"
        )
    return ids

"""From a row of a data set to messages, and from messages to what a model reads.

Templates are Jinja, as chat templates are: `{{ question }}` is a field of the row, `row["odd name"]` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from toolkit.errors import InputError, unknown_name
from toolkit.models.prompts import Message

CHATS = ("none", "llama2", "tokenizer")
ROLES = {"human": "user", "gpt": "assistant"}  # names of roles in ShareGPT-like files; others are kept
Row = Mapping[str, Any]

_ENVIRONMENT = ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True
)


def render(template: str, row: Row) -> str:
    """The template filled in with one row. Raises InputError for a field that the row lacks and for a bad template."""
    try:
        return _compile(template).render({**row, "row": row})
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise InputError(f"the template failed: {error}; the row's fields are {', '.join(row)}") from None


@cache
def _compile(template: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(template)


@dataclass(frozen=True)
class Conversation:
    """What to ask (`messages`), the reference `reply` if one is known, and a user's `later_turns`, not asked yet."""

    messages: list[Message]
    reply: str | None = None
    later_turns: tuple[str, ...] = ()


def conversation(turns: Sequence[Any]) -> Conversation:
    """What a field of turns asks.

    Texts are a user's turns: the first is asked, because the later ones need a model's replies. Otherwise each turn is
    a role and a text ({"role", "content"} or {"from", "value"}), and what is asked for is the assistant's last reply.
    """
    if all(isinstance(turn, str) for turn in turns):
        return Conversation([{"role": "user", "content": turn} for turn in turns[:1]], None, tuple(turns[1:]))
    messages = [_message(turn) for turn in turns]
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    return Conversation(messages[:-1], messages[-1]["content"]) if messages else Conversation([])


def _message(turn: Mapping[str, str]) -> Message:
    for role, content in (("role", "content"), ("from", "value")):
        if role in turn and content in turn:
            return {"role": ROLES.get(turn[role], turn[role]), "content": turn[content]}
    raise InputError(f"expected turns with role and content, or from and value, got the keys {', '.join(turn)}")


def check_chat(chat: str) -> None:
    """Refuse an unknown way of writing conversations."""
    if chat not in CHATS:
        raise unknown_name("chat format", chat, CHATS)


def write_chat(messages: Sequence[Message], chat: str) -> str | tuple[Message, ...]:
    """Messages as text, or unchanged for chat="tokenizer".

    none       one turn after another, a line each; a single turn is itself
    llama2     [INST] ... [/INST] as Llama-2-chat was trained with; the tokenizer adds the first <s>
    tokenizer  left to the chat template of the model's own tokenizer
    """
    if chat == "tokenizer":
        return tuple(messages)
    return _llama2(messages) if chat == "llama2" else "\n".join(message["content"] for message in messages)


def _llama2(messages: Sequence[Message]) -> str:
    text, system = "", ""
    for message in messages:
        content = message["content"].strip()
        if message["role"] == "system":
            system = f"<<SYS>>\n{content}\n<</SYS>>\n\n"
        elif message["role"] == "assistant":
            text += f" {content} </s><s>"
        else:
            text, system = f"{text}[INST] {system}{content} [/INST]", ""
    return text

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

from toolkit.config.values import shown
from toolkit.errors import InputError, unknown_name
from toolkit.models.prompts import Message

CHATS = ("none", "llama2", "tokenizer")
ROLES = {"human": "user", "gpt": "assistant"}  # names of roles in ShareGPT-like files; others are kept
Row = Mapping[str, Any]


class NullValueError(jinja2.UndefinedError):
    """A row is null where it is needed."""


class _Null(jinja2.StrictUndefined):
    """A null of a row: false and none to a template, and an error where it would be written or looked into."""

    def __bool__(self) -> bool:  # type: ignore[override]
        return False

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return other is None or isinstance(other, _Null)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True
)
_ENVIRONMENT.tests["none"] = lambda value: value is None or isinstance(value, _Null)
_compiled = cache(_ENVIRONMENT.from_string)
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"sort_keys": True, "default": lambda null: None}


def render(template: str, row: Row) -> str:
    """The template filled in. Raises NullValueError where it would write a null, InputError for bad ones and missing fields."""
    try:
        filled = _with_nulls(row)
        return _compiled(template).render({**filled, "row": filled})
    except NullValueError:
        raise
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise InputError(f"the template failed: {error}; the row's fields are {', '.join(row)}") from None


def _with_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_nulls(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(inner) for inner in value]
    return _Null(exc=NullValueError) if value is None else value


@dataclass(frozen=True)
class Conversation:
    """What to ask (`messages`), the reference `reply` if one is known, and a user's `later_turns`, not asked yet."""

    messages: list[Message]
    reply: str | None = None
    later_turns: tuple[str, ...] = ()


def conversation(turns: Any) -> Conversation:
    """What a field of turns asks: a user's first text, or everything before the assistant's last reply; nothing if it is null.

    Raises NullValueError for a null in it, InputError for what is no list of turns.
    """
    if not isinstance(turns, list | tuple | None):
        raise InputError(f"expected a list of turns, got {shown(turns)}")
    if not turns or turns[0] is None:
        return Conversation([])
    if all(isinstance(turn, str | None) for turn in turns):
        texts = [turn for turn in turns if turn is not None]
        return Conversation([{"role": "user", "content": texts[0]}], None, tuple(texts[1:]))
    messages = [_message(turn) for turn in turns]
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    return Conversation(messages[:-1], messages[-1]["content"]) if messages else Conversation([])


def _message(turn: Any) -> Message:
    if turn is None:
        raise NullValueError("a turn is null")
    for role, content in (("role", "content"), ("from", "value")):
        if isinstance(turn, Mapping) and isinstance(turn.get(role), str) and content in turn:
            return {"role": ROLES.get(turn[role], str(turn[role])), "content": _text(turn[content])}
    raise InputError(f"expected turns with role and content, or from and value, got {shown(turn)}")


def _text(content: Any) -> str:
    """The text of a turn: itself, or its parts [{"type": "text", "text": ...}] put together."""
    if content is None:
        raise NullValueError("the content of a turn is null")
    if isinstance(content, str):
        return content
    try:
        parts = [part["text"] for part in content if part["type"] == "text"]
        return "".join(parts if len(parts) == len(content) else [content])
    except (TypeError, KeyError):
        raise InputError(f"expected the content of a turn as text, or as parts of text, got {shown(content)}") from None


def check_chat(chat: str) -> None:
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

"""Prompts: what is asked. Plain data, no torch.

A prompts file is JSONL, one prompt per line:

    {"id": 1, "prompt": "Q: ...", "answer": "42"}                          the answer is optional
    {"id": "b", "messages": [{"role": "user", "content": "Hello"}]}         for the tokenizer's chat template

Beside messages, "tools", "documents" and "chat_template_kwargs" are for the template, too, as in a request to a server. Ids
are numbers or strings, unique in the file; "grammar" is what the response may be
(`toolkit.grammar`); any other key is kept in `Prompt.extra`, and named if no command READS it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.config.values import check_ranges, checked, shown
from toolkit.errors import InputError, warn
from toolkit.files.text import or_of_file
from toolkit.models.chat import read_request

NO_VOCABULARY = 2**31  # above the tokens of any
Message = dict[str, Any]  # {"role": ..., "content": ...}, maybe tool_calls, tool_call_id
READS = ("question_id", "category", "answers", "db_id", "entry_point", "test", "test_list", "test_imports",
         "test_setup_code")  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """One thing to respond to: either text (`prompt`) or a conversation (`messages`).

    id        unique among the prompts of a run; results are joined on it
    messages  role and content of each turn so far, for the tokenizer's chat template
    answer    what a response is checked against, if anything is known
    extra     whatever else the source says about the prompt; metrics and exports read the keys READS
    grammar   what a response may be, in the place of what the sampling says: text (read_jsonl: of a file its content), a JSON
              schema; None: as that says
    options   what a request has for the template beside its messages: tools, documents, chat_template_kwargs
    Raises InputError unless there is an id and exactly one of a prompt and messages, neither of them empty.
    """

    id: str
    prompt: str | None = None
    answer: str | None = None
    messages: tuple[Message, ...] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    grammar: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.id:
            raise InputError("expected an id, got none")
        if (self.prompt is None) == (self.messages is None):
            got = "neither" if self.prompt is None else "both"
            raise InputError(f"expected either a prompt or messages, got {got}")
        if self.prompt is not None and not self.prompt.strip():
            raise InputError("expected a prompt, got an empty one")
        if self.messages is not None and not self.messages:
            raise InputError("expected messages, got an empty list")
        if self.messages is not None:
            object.__setattr__(self, "messages", tuple(read_request(self.messages, **self.options)[0]))
        elif self.options:
            raise InputError(f"expected messages beside {', '.join(self.options)}, got a prompt")

    @property
    def content(self) -> str | list[Message] | dict[str, Any]:
        """What `decode` takes: the text, the messages, or with options or a grammar the request."""
        messages = {"messages": list(self.messages or ()), **self.options}
        request: dict[str, Any] = {"prompt": self.prompt} if self.prompt else messages
        if self.grammar is not None:
            return {**request, "grammar": self.grammar}
        return self.prompt or (request if self.options else request["messages"])


def without_grammar(content: Any) -> tuple[Any, str | dict[str, Any] | None]:
    """What `ModelPair.encode` takes of a prompt's content, and the grammar that it has of its own."""
    if not isinstance(content, Mapping) or content.get("grammar") is None:
        return content, None
    request = {key: value for key, value in content.items() if key != "grammar"}
    return (request["prompt"] if request.keys() == {"prompt"} else request), content["grammar"]


def first_ids(prompts: Sequence[Prompt]) -> list[str]:
    """Of each prompt the id under which its content comes first: parts by these ids hold no prompt twice."""
    ids = dict[str, str]()
    return [ids.setdefault(str(prompt.content), str(prompt.id)) for prompt in prompts]


class PromptSource(ABC):
    """Where prompts come from. One small subclass per kind of source, one config per data set in `conf/prompts/`.

    path   a prompts file that is read instead of the source itself, so that any command runs on any local prompts
    limit  at most this many prompts, of the file too; None: all
    """

    def __init__(self, path: str | Path | None = None, limit: int | None = None):
        if limit is not None and limit < 1:
            raise InputError(f"prompts.limit: expected a positive number or null, got {limit}")
        self.path, self.limit = path, limit

    def load(self) -> list[Prompt]:
        """The prompts, always the same ones in the same order. Raises InputError if there are none."""
        prompts = (self._load() if self.path is None else read_jsonl(self.path))[: self.limit]
        if not prompts:
            raise InputError(f"expected prompts, found none in {self.path or self.describe()}")
        return prompts

    @abstractmethod
    def _load(self) -> list[Prompt]:
        """The prompts of the source itself; more than `limit` are cut."""

    def describe(self) -> str:
        return type(self).__name__


def without_grammars(prompts: list[Prompt]) -> list[Prompt]:
    """The prompts, of which none has a grammar of its own. Raises InputError if one has."""
    for prompt in prompts:
        if getattr(prompt, "grammar", None) is not None:
            raise InputError(f"prompt {prompt.id}: expected no grammar; decode, responses and sweep obey those of rows")
    return prompts


@checked
def read_jsonl(path: str | Path) -> list[Prompt]:
    """All prompts of a file, in order; blank lines are skipped.

    Raises InputError for a missing file. Raises it, with the line's number, for a line that is not JSON, lacks an id or
    repeats one. A line has to hold exactly one of "prompt" and "messages". Warns of keys that nothing reads, with counts.
    """
    from tqdm.auto import tqdm

    prompts: dict[str, Prompt] = {}
    for number, line in tqdm(numbered_lines(Path(path)), "reading prompts", unit=" prompts", delay=1, leave=False):
        try:
            prompt = _parse(line)
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from None
        if prompt.id in prompts:
            raise InputError(f"{path}, line {number}: the id {prompt.id!r} was used before; ids must differ")
        prompts[prompt.id] = prompt
    if unread := Counter(key for prompt in prompts.values() for key in prompt.extra if key not in READS):
        counts = ", ".join(f"{key} ({count:,})" for key, count in unread.most_common())
        warn(f"{path}: no command reads these keys (and in how many of {len(prompts):,} rows they are): {counts}")
    return list(prompts.values())


def numbered_lines(path: Path, what: str = "a prompts file") -> Iterator[tuple[int, str]]:
    """Number, from 1, and text of every line that is not blank. Raises InputError if the file cannot be read as text."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"expected {what} at {path}, found none") from None
    except IsADirectoryError:
        raise InputError(f"expected {what} at {path}, found a folder") from None
    except UnicodeDecodeError as error:
        raise InputError(f"expected UTF-8 text in {path}: {error}") from None
    except (OSError, ValueError) as error:  # no right to read it; no name of a file
        raise InputError(f"expected {what} at {str(path)!a}: {error.args[-1]}") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def check_token_ids(ids: Any, size: int = NO_VOCABULARY, where: str = "") -> None:
    """Raises InputError unless `ids` is a list of whole numbers in [0, size).

    size   of the vocabulary, if it is known
    where  the message begins with it
    """
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        wrong = next(token for token in ids if type(token) is not int) if isinstance(ids, list) else ids
        raise InputError(f"{where}expected a list of token ids, whole numbers, got {shown(wrong)}")
    if ids and not 0 <= min(ids) <= max(ids) < size:
        wrong = shown(min(ids) if min(ids) < 0 else max(ids))
        expected = "" if size == NO_VOCABULARY else f" in [0, {size}), those of this pair's tokenizer"
        raise InputError(f"{where}expected token ids{expected}, got {wrong}")


def _parse(line: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"expected JSON, got {error.msg} at column {error.colno}") from None
    except (RecursionError, ValueError):  # too deep; an integer of more than 4,300 digits
        raise InputError("expected JSON, got lists in lists too deep to read, or too long a number") from None
    if not isinstance(row, dict):
        raise InputError(f'expected an object like {{"id": 1, "prompt": "..."}}, got {type(row).__name__}')
    prompt, answer, messages = row.pop("prompt", None), row.pop("answer", None), row.pop("messages", None)
    if prompt is not None and not isinstance(prompt, str):
        raise InputError(f"expected text as prompt, got {type(prompt).__name__}")
    id_ = row.pop("id", None)
    if isinstance(id_, bool) or not isinstance(id_, int | str | None):
        raise InputError(f"expected a number or a string as id, got {id_!r}")
    read = {name: row.pop(name, None) for name in ("tools", "documents", "chat_template_kwargs")}
    options = {name: value for name, value in read.items() if value is not None}
    answer, grammar = None if answer is None else str(answer), row.pop("grammar", None)
    if not isinstance(grammar, str | dict | None):
        raise InputError(f"expected a grammar as text or as a JSON schema, got {type(grammar).__name__}")
    if isinstance(grammar, str):
        grammar = or_of_file(grammar, "grammar")
    return Prompt("" if id_ is None else str(id_), prompt, answer, messages, row, options, grammar)

"""What an endpoint is asked: OpenAI's /v1/completions, with every field of our sampling in the words of its engine.

Neutral values are sent, too, for engines put a checkpoint's own generation config in the place of what is missing. An
engine that has no word for a field takes only its neutral value. Names and neutral values are those of vLLM 0.33
(entrypoints/openai/completion/protocol.py), SGLang of July 2026 (serving_completions.py, pull request 30917) and transformers
5.23 (cli/serving/completion.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.models.pair import ModelPair
from toolkit.sampling import Sampling

NEUTRAL = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop": (), "end_ids": (),
}  # fmt: skip
BASIC = ("temperature", "top_p", "stop")  # what every engine has
OURS = ("model", "prompt", "n", "stream", "echo", "seed", "max_tokens", "generation_config", *NEUTRAL)
SEEDS = 2**31  # engines take 32 bits
TOKENIZER = threading.Lock()  # the threads of a pool share one
RETURNED, ENCODED = "returned", "encoded again"


@dataclass(frozen=True)
class ServingEngine:
    """How one kind of server is asked.

    sends_ids    prompts go as token ids; else as text, which the server encodes
    shows_stops  a text holds the stop string that ended it
    fields       of our sampling that it has a word for
    every        top-k that keeps all tokens
    further      keys of every request
    """

    name: str
    sends_ids: bool = True
    shows_stops: bool = False
    fields: tuple[str, ...] = tuple(NEUTRAL)
    every: int = 0
    further: Mapping[str, Any] | None = None


EXACT = {
    "return_token_ids": True, "skip_special_tokens": True, "ignore_eos": False, "min_tokens": 0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
ENGINES = {
    "vllm": ServingEngine("vllm", further=EXACT),
    "sglang": ServingEngine("sglang", every=-1, further=EXACT),
    "transformers": ServingEngine("transformers", sends_ids=False, shows_stops=True),
    "openai": ServingEngine("openai", fields=BASIC),
}


@dataclass(frozen=True)
class Asked:
    """One request: the row, its prompt [P] and how many tokens may follow it."""

    row: int
    prompt_ids: list[int]
    max_tokens: int


class Requests:
    """Bodies of requests; `further` has more keys, null takes one out. Raises InputError for sampling without words for it."""

    def __init__(self, engine: str, model: str, pair: ModelPair, sampling: Sampling, further: Mapping[str, Any]):
        self.engine, self.model, self.pair, self.sampling = ENGINES[engine], model, pair, sampling
        self.further = dict(further)
        for name in self.changed():
            if name not in self.engine.fields:
                raise InputError(
                    f"sampling.{name}: engine={engine} knows no {name}; expected {name}={NEUTRAL[name]}, or another engine"
                )
        for name, value in self.further.items():
            if name in OURS and (value is not None or name in self.changed() or name not in NEUTRAL):
                raise InputError(f"served.request.{name}: said by model, prompts and sampling; leave it out")

    def changed(self) -> list[str]:
        return [name for name, neutral in NEUTRAL.items() if getattr(self.sampling, name) != neutral]

    def body(self, request: Asked) -> dict[str, Any]:
        """The request of one row. Raises InputError if its prompt has no text that is encoded to it again."""
        basis = {
            "model": self.model,
            "prompt": request.prompt_ids if self.engine.sends_ids else self._text(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "seed": int(content_hash([self.sampling.seed, request.row], 16), 16) % SEEDS,
        }
        if self.engine.name == "transformers":
            body = {**basis, **self._generation(request.max_tokens)}
        else:
            body = {**basis, **self._fields(), **(self.engine.further or {}), "n": 1, "stream": False}
        body |= self.further
        return {name: value for name, value in body.items() if value is not None}

    def needless(self, name: str) -> bool:
        """Whether a key may be left out where a server does not know it: nothing is changed by that."""
        further = self.engine.further or {}
        return name in further or (name in NEUTRAL and name not in self.changed()) or name == "stop_token_ids"

    def _fields(self) -> dict[str, Any]:
        fields = {name: getattr(self.sampling, name) for name in self.engine.fields if name != "end_ids"}
        fields["stop"] = list(self.sampling.stop) or None
        if "top_k" in fields:
            fields["top_k"] = fields["top_k"] or self.engine.every
            fields["stop_token_ids"] = list(self.pair.ends(self.sampling)) or None
        return fields

    def _generation(self, max_tokens: int) -> dict[str, Any]:
        sampling = self.sampling
        generation: dict[str, Any] = {"do_sample": sampling.temperature > 0, "max_new_tokens": max_tokens}
        if sampling.temperature > 0:
            generation |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
            generation |= {"min_p": sampling.min_p} if sampling.min_p else {}
        ends = list(self.pair.ends(self.sampling))
        generation |= {"repetition_penalty": sampling.repetition_penalty}
        generation |= {"eos_token_id": ends, "pad_token_id": ends[0]} if ends else {}
        return {"generation_config": json.dumps(generation), "stop": list(sampling.stop) or None}

    def _text(self, ids: list[int]) -> str:
        tokenizer: Any = self.pair.tokenizer
        with TOKENIZER:
            for special in (False, True):  # with and without the tokens that the server itself puts in front
                text = str(tokenizer.decode(ids, skip_special_tokens=special))
                if list(tokenizer(text).input_ids) == ids:
                    return text
        raise InputError("the prompt's text is encoded to other tokens, and this engine takes texts only")


class Unbelievable(Exception):
    """The answer is not one to what was asked; the reason is one line."""


class NotRoundTrip(Exception):
    """The answer may be right, but its tokens cannot be known."""


@dataclass(frozen=True)
class Answer:
    """One response.

    token_ids      [T] the end of text included, as far as there is one
    finish_reason  "end", "stop" or "length"
    ids            where the tokens come from: RETURNED or ENCODED
    by             what the server calls itself
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    ids: str
    by: str = ""


@dataclass
class Reader:
    """Reads answers for one pair and sampling. model: what is asked for; shows_stops: texts hold the string that ended them."""

    pair: ModelPair
    sampling: Sampling
    model: str
    shows_stops: bool = False
    ends: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = frozenset(self.pair.ends(self.sampling))

    def read(self, completion: Any, request: Asked) -> Answer:
        """The response in a completion. Raises Unbelievable or NotRoundTrip."""
        choices = completion.get("choices") if isinstance(completion, Mapping) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
            raise Unbelievable("its answer holds no completion: expected one choice")
        choice, usage = choices[0], completion.get("usage")
        usage = usage if isinstance(usage, Mapping) else {}
        by = str(completion.get("model") or "")
        if by and not by.startswith(self.model):
            raise Unbelievable(f"it answers as {by}, asked for was {self.model}")
        prompt, size = choice.get("prompt_token_ids"), usage.get("prompt_tokens")
        if prompt is not None and prompt != request.prompt_ids:
            raise Unbelievable("it has read another prompt: its prompt_token_ids are not those that were sent")
        if isinstance(size, int) and size != len(request.prompt_ids):
            raise Unbelievable(f"it has read {size} tokens of a prompt, sent were {len(request.prompt_ids)}")
        ended = choice.get("finish_reason")
        if ended not in ("stop", "length"):
            raise Unbelievable(f"its finish_reason is {ended!r}: expected stop or length")
        count = usage.get("completion_tokens")
        ids = _returned_ids(choice)
        how = RETURNED if ids is not None else ENCODED
        if ids is None:
            ids = self._encoded(choice, request, ended, count)
        else:
            size = self.pair.vocab_size
            if wrong := [token for token in ids if type(token) is not int or not 0 <= token < size]:
                raise Unbelievable(f"it returns the token {wrong[0]!r}: expected ids in [0, {size})")
            if not ids or len(ids) > request.max_tokens:
                raise Unbelievable(f"it returns {len(ids)} tokens, asked for were 1 to {request.max_tokens}")
            if isinstance(count, int) and count != len(ids):
                raise Unbelievable(f"it returns {len(ids)} tokens and says that there are {count}")
            ids = self._with_end(ids, choice, request, ended)
        reason = self._reason(ids, request, ended)
        text = self.pair.text(ids, request.prompt_ids)
        if reason == "stop":
            text = text[: self.pair.stop_position(self.sampling.stop, ids, request.prompt_ids)]
        named = [by, str(completion.get("system_fingerprint") or "")]
        return Answer(ids, text, reason, how, " ".join(filter(None, named)))

    def _with_end(self, ids: list[int], choice: Mapping[str, Any], request: Asked, ended: str) -> list[int]:
        """The ids with the end of text, where the engine has cut it off and says which one it was."""
        if ended != "stop" or ids[-1] in self.ends or self._stops_at(ids, request) is not None:
            return ids
        matched = [choice.get(name) for name in ("stop_reason", "matched_stop")]
        token = next((value for value in matched if isinstance(value, int) and not isinstance(value, bool)), None)
        if token not in self.ends or len(ids) == request.max_tokens:
            raise Unbelievable(f"it stops at the token {ids[-1]}, which ends no text of this pair")
        return [*ids, int(token)]  # type: ignore[arg-type]

    def _encoded(self, choice: Mapping[str, Any], request: Asked, ended: str, count: Any) -> list[int]:
        """The text encoded again. Raises NotRoundTrip unless it decodes to itself and has `count` tokens."""
        text = choice.get("text")
        if not isinstance(text, str):
            raise Unbelievable("it returns neither token ids nor text")
        tokenizer: Any = self.pair.tokenizer
        stopped = ended == "stop" and any(stop in text for stop in self.sampling.stop)
        cut = ended == "stop" and not stopped
        if cut and (len(self.ends) != 1 or (self.sampling.stop and not self.shows_stops)):
            raise NotRoundTrip("which token has ended the text is not said")
        end = list(self.ends) if cut else []
        alone = list(tokenizer(text, add_special_tokens=False).input_ids) if text else []
        start = str(tokenizer.decode(request.prompt_ids, skip_special_tokens=False))
        whole = list(tokenizer(start + text, add_special_tokens=False).input_ids)[len(request.prompt_ids) :]
        for ids in (alone, whole):
            same = self.pair.text(ids, request.prompt_ids) == text
            right = not isinstance(count, int) or count == len(ids) + len(end)
            if same and right and 0 < len(ids) + len(end) <= request.max_tokens:
                return [*ids, *end]
        raise NotRoundTrip("the text is encoded to other tokens than it was made of")

    def _reason(self, ids: list[int], request: Asked, ended: str) -> str:
        """How the text ended. Raises Unbelievable if it goes on after its end, or ends before it."""
        early = next((position for position, token in enumerate(ids[:-1]) if token in self.ends), None)
        if early is not None:
            raise Unbelievable(f"it goes on after an end of text, token {early + 1} of {len(ids)}")
        stop = self._stops_at(ids, request)
        if stop is not None and stop < len(ids):
            raise Unbelievable(f"it goes on after a stop string, token {stop} of {len(ids)}")
        if ids[-1] in self.ends:
            return "end"
        if stop is not None:
            return "stop"
        if ended == "stop":
            raise Unbelievable("it stops where no text of this pair ends")
        if len(ids) < request.max_tokens:
            raise Unbelievable(f"it ends for its length after {len(ids)} tokens, asked for were {request.max_tokens}")
        return "length"

    def _stops_at(self, ids: list[int], request: Asked) -> int | None:
        stops = self.sampling.stop
        if self.pair.stop_position(stops, ids, request.prompt_ids) is None:
            return None
        shortest = len(ids)
        while shortest > 1 and self.pair.stop_position(stops, ids[: shortest - 1], request.prompt_ids) is not None:
            shortest -= 1
        return shortest


def _returned_ids(choice: Mapping[str, Any]) -> list[int] | None:
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        return ids
    tokens = (choice.get("logprobs") or {}).get("tokens") if isinstance(choice.get("logprobs"), Mapping) else None
    if not isinstance(tokens, list) or not all(
        isinstance(token, str) and token.startswith("token_id:") for token in tokens
    ):
        return None
    numbers = [number.removeprefix("token_id:") for number in tokens]
    return [int(number) for number in numbers] if tokens and all(map(str.isdecimal, numbers)) else None

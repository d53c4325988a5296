"""OpenAI's /v1/completions, asked with every field of our sampling in the words of its engine, and answers that are checked.

Neutral values are sent, too, for engines put a checkpoint's own generation config in the place of what is missing. An
engine that has no word for a field takes only its neutral value. Names and neutral values are those of vLLM 0.33
(entrypoints/openai/completion/protocol.py), SGLang of July 2026 (serving_completions.py, pull request 30917) and transformers
5.23 (cli/serving/completion.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

from toolkit.config.commands import EndpointKeys
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.models.pair import ModelPair
from toolkit.runs.endpoint import GIVE_UP, Endpoint, NoAnswer
from toolkit.sampling import Sampling

NEUTRAL = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop": (), "end_ids": (),
}  # fmt: skip
EXACT = {
    "return_token_ids": True, "skip_special_tokens": True, "ignore_eos": False, "min_tokens": 0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
OURS = ("model", "prompt", "n", "stream", "echo", "seed", "max_tokens", "generation_config", *NEUTRAL)
FIELDS = {"openai": ("temperature", "top_p", "stop")}  # that an engine has a word for; others have one for all
ALL_TOKENS = {"vllm": 0, "sglang": -1}  # a top-k that keeps all tokens
AWAY = (401, 403, 408, 429, 502, 503, 504)  # after any other answer to a plain request, a server is there
SEEDS = 2**31  # engines take 32 bits
RETURNED, ENCODED, NO_ROUND_TRIP = "returned", "encoded again", "does not round-trip"


@dataclass(frozen=True)
class CompletionRequest:
    """A row, its prompt [P] and how many tokens may follow it."""

    row: int
    prompt_ids: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Completion:
    """One response.

    token_ids      [T] the end of text included, as far as there is one
    finish_reason  "end", "stop" or "length"
    ids            where the tokens come from: RETURNED, ENCODED or, if they cannot be known, NO_ROUND_TRIP
    error          why they cannot be known
    by             what the server calls itself
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    ids: str
    by: str
    error: str = ""


class Completions:
    """Requests for completions by one pair and sampling, and their answers.

    engine  one of vllm, sglang (prompts go as token ids, and tokens come back), openai (ids, and texts come back) and
            transformers (texts both ways, which hold the stop string that ended them)
    model   what the endpoints call the target
    extra   further keys of every request, null takes one out
    Raises InputError for sampling that the engine has no words for.
    """

    def __init__(self, engine: str, model: str, pair: ModelPair, sampling: Sampling, extra: dict[str, Any]):
        self.engine, self.model, self.pair, self.sampling = engine, model, pair, sampling
        self.ends = tuple(pair.ends(sampling))
        self.changed = [name for name, neutral in NEUTRAL.items() if getattr(sampling, name) != neutral]
        self._tokenizer = threading.Lock()  # the threads of a pool share one
        ends = list(self.ends)
        self.generation: dict[str, Any] = {"do_sample": sampling.temperature > 0}  # in the words of transformers
        if sampling.temperature > 0:
            self.generation |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
            self.generation |= {"min_p": sampling.min_p} if sampling.min_p else {}
        self.generation |= {"repetition_penalty": sampling.repetition_penalty}
        self.generation |= {"eos_token_id": ends, "pad_token_id": ends[0]} if ends else {}
        fields: dict[str, Any] = {"model": model, "stop": list(sampling.stop) or None}
        if engine != "transformers":
            fields |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "n": 1, "stream": False}
        if engine in ALL_TOKENS:
            fields |= {"top_k": sampling.top_k or ALL_TOKENS[engine], "min_p": sampling.min_p, **EXACT}
            fields |= {"repetition_penalty": sampling.repetition_penalty, "stop_token_ids": ends or None}
        self.fields = {name: value for name, value in (fields | extra).items() if value is not None}
        for name in self.changed:
            if name not in FIELDS.get(engine, NEUTRAL):
                expected = f"expected {name}={NEUTRAL[name]}, or another engine"
                raise InputError(f"sampling.{name}: engine={engine} knows no {name}; {expected}")
        for name, value in extra.items():
            if name in OURS and (value is not None or name in self.changed or name not in NEUTRAL):
                raise InputError(f"served.request.{name}: said by model, prompts and sampling; leave it out")

    def body(self, request: CompletionRequest) -> dict[str, Any]:
        """The request of one row. Raises InputError if its prompt has no text that is encoded to it again."""
        seed = int(content_hash([self.sampling.seed, request.row], 16), 16) % SEEDS
        body = {"prompt": request.prompt_ids, "max_tokens": request.max_tokens, "seed": seed, **self.fields}
        if self.engine == "transformers":
            body["prompt"] = self._text(request.prompt_ids)
            body["generation_config"] = json.dumps({"max_new_tokens": request.max_tokens, **self.generation})
        return body

    def is_needless(self, key: str) -> bool:
        """Whether a key may be left out where a server does not know it: nothing is changed by that."""
        return key in EXACT or key == "stop_token_ids" or (key in NEUTRAL and key not in self.changed)

    def _text(self, ids: list[int]) -> str:
        tokenizer: Any = self.pair.tokenizer
        with self._tokenizer:
            for skip in (False, True):  # with and without the tokens that the server itself puts in front
                text = str(tokenizer.decode(ids, skip_special_tokens=skip))
                if list(tokenizer(text).input_ids) == ids:
                    return text
        raise InputError("the prompt's text is encoded to other tokens, and this engine takes texts only")

    def read(self, answer: Any, request: CompletionRequest) -> Completion:
        """The response in an answer. Raises NoAnswer if it is not one to this request."""
        choices = answer.get("choices") if isinstance(answer, Mapping) else None
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        if not isinstance(choice, Mapping):
            raise NoAnswer("its answer holds no completion: expected one choice")
        usage = answer["usage"] if isinstance(answer.get("usage"), Mapping) else {}
        by, prompt, size = str(answer.get("model") or ""), choice.get("prompt_token_ids"), usage.get("prompt_tokens")
        sent, ended, count = request.prompt_ids, choice.get("finish_reason"), usage.get("completion_tokens")
        expect(by.startswith(self.model) or not by, f"it answers as {by}, asked for was {self.model}")
        expect(prompt in (None, sent), "it has read another prompt: its prompt_token_ids are not those that were sent")
        counted = f"it has read {size} tokens of a prompt, sent were {len(sent)}"
        expect(not isinstance(size, int) or size == len(sent), counted)
        expect(ended in ("stop", "length"), f"its finish_reason is {ended!r}: expected stop or length")
        by = " ".join(filter(None, [by, str(answer.get("system_fingerprint") or "")]))
        with self._tokenizer:
            returned = _returned_ids(choice)
            read = self._encoded if returned is None else partial(self._checked, returned)
            ids = read(choice, request, ended == "stop", count)
            if isinstance(ids, str):
                return Completion([], "", "", NO_ROUND_TRIP, by, ids)
            reason = self._finish_reason(ids, request, ended == "stop")
            text = self.pair.text(ids, sent)
            if reason == "stop":
                text = text[: self.pair.stop_position(self.sampling.stop, ids, sent)]
        return Completion(ids, text, reason, ENCODED if returned is None else RETURNED, by)

    def _checked(
        self, ids: list[int], choice: Mapping[str, Any], request: CompletionRequest, stopped: bool, count: Any
    ) -> list[int]:
        """Returned ids, with the end of text where the engine has cut it off and says which one it was."""
        size, num = self.pair.vocab_size, len(ids)
        for token in ids:
            right = type(token) is int and 0 <= token < size
            expect(right, f"it returns the token {token!r}: expected ids in [0, {size})")
        expect(0 < num <= request.max_tokens, f"it returns {num} tokens, asked for were 1 to {request.max_tokens}")
        counted = f"it returns {num} tokens and says that there are {count}"
        expect(not isinstance(count, int) or count == num, counted)
        if not stopped or ids[-1] in self.ends or self._stops_at(ids, request) is not None:
            return ids
        matched = [choice.get(name) for name in ("stop_reason", "matched_stop")]
        end = next((value for value in matched if type(value) is int), -1)
        whole = end in self.ends and num < request.max_tokens
        expect(whole, f"it stops at the token {ids[-1]}, which ends no text of this pair")
        return [*ids, end]

    def _encoded(
        self, choice: Mapping[str, Any], request: CompletionRequest, stopped: bool, count: Any
    ) -> list[int] | str:
        """The text encoded again, if it decodes to itself and has `count` tokens; else why its tokens cannot be known."""
        text, tokenizer = choice.get("text"), cast(Any, self.pair.tokenizer)
        if not isinstance(text, str):
            raise NoAnswer("it returns neither token ids nor text")
        ended = stopped and not any(stop in text for stop in self.sampling.stop)
        shown = self.engine == "transformers" or not self.sampling.stop  # no stop string may have ended it unseen
        if ended and (len(self.ends) != 1 or not shown):
            return "which token has ended the text is not said"
        end = list(self.ends) if ended else []
        alone = list(tokenizer(text, add_special_tokens=False).input_ids) if text else []
        start = str(tokenizer.decode(request.prompt_ids, skip_special_tokens=False))
        whole = list(tokenizer(start + text, add_special_tokens=False).input_ids)[len(request.prompt_ids) :]
        for ids in (alone, whole):
            same = self.pair.text(ids, request.prompt_ids) == text
            right = not isinstance(count, int) or count == len(ids) + len(end)
            if same and right and 0 < len(ids) + len(end) <= request.max_tokens:
                return [*ids, *end]
        return "the text is encoded to other tokens than it was made of"

    def _finish_reason(self, ids: list[int], request: CompletionRequest, stopped: bool) -> str:
        """How the text ended. Raises NoAnswer if it goes on after its end, or ends before it."""
        num, stop = len(ids), self._stops_at(ids, request)
        early = next((position for position, token in enumerate(ids[:-1], 1) if token in self.ends), None)
        expect(early is None, f"it goes on after an end of text, token {early} of {num}")
        expect(stop in (None, num), f"it goes on after a stop string, token {stop} of {num}")
        if ids[-1] in self.ends or stop is not None:
            return "end" if ids[-1] in self.ends else "stop"
        expect(not stopped, "it stops where no text of this pair ends")
        short = f"it ends for its length after {num} tokens, asked for were {request.max_tokens}"
        expect(num == request.max_tokens, short)
        return "length"

    def _stops_at(self, ids: list[int], request: CompletionRequest) -> int | None:
        """How many of the tokens hold the first stop string; None if all of them hold none."""
        holds = lambda count: self.pair.stop_position(self.sampling.stop, ids[:count], request.prompt_ids) is not None
        shortest = len(ids) + 1
        while shortest > 1 and holds(shortest - 1):
            shortest -= 1
        return shortest if shortest <= len(ids) else None


def expect(holds: bool, reason: str) -> None:
    """Raises NoAnswer, with the reason, if a response is not as expected."""
    if not holds:
        raise NoAnswer(reason)


def _returned_ids(choice: Mapping[str, Any]) -> list[int] | None:
    """The token ids of a choice, or those that its log-probabilities are named by ("token_id:7")."""
    ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
    if isinstance(ids, list):
        return ids
    tokens = logprobs.get("tokens") if isinstance(logprobs, Mapping) else None
    names = [str(token) for token in tokens] if isinstance(tokens, list) else []
    numbers = [name.removeprefix("token_id:") for name in names if name.startswith("token_id:")]
    whole = names and len(numbers) == len(names) and all(map(str.isdecimal, numbers))
    return [int(number) for number in numbers] if whole else None


class CompletionsEndpoint(Endpoint):
    """An endpoint of completions. unknown_keys: left out, for it does not know them; None: it does not list what it knows."""

    path, name = "/completions", "the endpoint"
    url_key, variable_key = "endpoints", "served.key_variable"
    silence = f"{GIVE_UP} rows in a row got no answer"
    hint = "expected endpoints and served.key_variable of a server with /v1/completions"
    unknown_keys: list[str] | None = None

    def __init__(self, url: str, keys: EndpointKeys, completions: Completions):
        super().__init__(url, keys)
        self.completions = completions

    def open(self) -> None:
        """Leave it out if it is away, lacks the model or does not know a key that matters."""
        try:
            models, keys = self._models(), self._known_keys()
        except NoAnswer as error:
            self.left_out = str(error)
            return
        completions = self.completions
        if models and completions.model not in models and completions.engine in ALL_TOKENS:
            self.left_out = f"it serves {', '.join(models)}: expected served.model={completions.model}"
        if keys:
            self.unknown_keys = sorted({"prompt", "max_tokens", "seed", *completions.fields} - keys)
            if needed := [key for key in self.unknown_keys if not completions.is_needless(key)]:
                self.left_out = f"it does not know {', '.join(needed)} (its openapi.json): another served.engine?"

    def complete(self, request: CompletionRequest) -> Completion:
        """The answer to one try. Raises as `Endpoint.post`, `Completions.body` and `read` do."""
        body = self.completions.body(request)
        answer = self.post({key: body[key] for key in body if key not in (self.unknown_keys or ())})
        return self.completions.read(answer, request)

    def is_there(self) -> bool:
        try:
            self._models()
        except NoAnswer:
            return False
        return True

    @property
    def about_keys(self) -> str:
        """What is known of the keys that it knows, for the manifest."""
        if self.unknown_keys is None:
            return "not listed by the server: one that it does not know may have been ignored"
        neutral = f", {', '.join(self.unknown_keys)} left out (neutral)" if self.unknown_keys else ""
        return f"as its openapi.json lists them{neutral}"

    def _models(self) -> list[str]:
        """The models that it lists, if it does. Raises NoAnswer if it is away."""
        try:
            answer = self.get(self.address.removesuffix("/completions") + "/models")
            return [str(model["id"]) for model in answer["data"]]
        except NoAnswer as error:
            if error.status is None or error.status in AWAY:
                raise
        except (LookupError, TypeError):
            pass  # a server of another kind: it lists none
        return []

    def _known_keys(self) -> set[str]:
        """The keys of a request that the server's openapi.json lists; none if it lists none."""
        parts = urlsplit(self.address)
        for root in ("", parts.path.removesuffix("/completions").removesuffix("/v1")):
            try:
                schemas = self.get(urlunsplit((*parts[:2], f"{root}/openapi.json", "", "")))
                content = schemas["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
                name = str(content["application/json"]["schema"].get("$ref", "")).rpartition("/")[2]
                return set(schemas["components"]["schemas"][name]["properties"])
            except (NoAnswer, LookupError, TypeError, AttributeError):
                continue
        return set()

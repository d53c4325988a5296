"""Endpoints that speak OpenAI's completions: the requests, the pool that they go through, and answers that are checked.

Every endpoint has `concurrency` threads that take questions from one queue. A question is tried `attempts` times in succession;
each wait is twice the one before, or as long as the server's Retry-After says; all threads of the endpoint wait then. An
endpoint is left out if its key or address is wrong, if it answers no plain request either, or after GIVE_UP questions in a row
without an answer. Its questions go to the others. A redirect is an error, too: the key goes to no other address.

A target is asked with every field of our sampling in the words of its engine. Neutral values are sent, too, for engines put a
checkpoint's own generation config in the place of what is missing. An engine that has no word for a field takes only its
neutral value. Names and neutral values are those of vLLM 0.32.0 (entrypoints/openai/completion/protocol.py), SGLang of July
2026 (serving_completions.py, pull request 30917) and transformers 5.23 (cli/serving/completion.py).
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

import httpx

from data_gen.keys import EndpointKeys
from toolkit.errors import LONGEST, InputError
from toolkit.files.atomic import content_hash
from toolkit.files.text import first_line
from toolkit.models.pair import ModelPair
from toolkit.sampling import Sampling

NEUTRAL = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop": (), "end_ids": (),
}  # fmt: skip
EXACT = {
    "return_token_ids": True, "skip_special_tokens": True, "ignore_eos": False, "min_tokens": 0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
OURS = ("model", "prompt", "n", "stream", "echo", "max_tokens", "generation_config", *NEUTRAL)
FIELDS = {"openai": ("temperature", "top_p", "stop")}  # that an engine has a word for; others have one for all
ALL_TOKENS = {"vllm": 0, "sglang": -1}  # a top-k that keeps all tokens
SEEDS = 2**31  # engines take 32 bits
RETURNED, ENCODED, NO_ROUND_TRIP = "returned", "encoded again", "does not round-trip"

AGAIN = (408, 409, 425, 429)  # and 5xx: another try may bring an answer
WRONG = (301, 302, 303, 307, 308, 401, 403, 404, 405)
AWAY = (401, 403, 408, 429, 502, 503, 504)  # after any other answer to a plain request, a server is there
LOCAL = re.compile(r"localhost|127\.[\d.]+|0\.0\.0\.0|::1")  # hosts that no proxy stands in front of
GIVE_UP = 5  # questions without an answer, in a row, until an endpoint is left out
LONGEST_WAIT, PROBE_SECONDS = 60.0, 10.0  # before a try; for a plain request
LONGEST_REPLY = 2**22  # bytes
AnyEndpoint = TypeVar("AnyEndpoint", bound="Endpoint")
Question = TypeVar("Question")


class NoAnswer(Exception):
    """Why a question has no answer, in one line. status: HTTP's, if any; explanation: the server's own words."""

    def __init__(self, reason: str, status: int | None = None, explanation: str = ""):
        super().__init__(reason)
        self.status, self.explanation = status, explanation


class Retryable(NoAnswer):
    """Another try may bring an answer, after the seconds (`wait`) that the server asks for."""

    wait: float | None = None


class Endpoint:
    """One endpoint, for any number of threads. Raises InputError for an address, key or proxy that cannot be used.

    base_url   requests go to it and `path`, unless it ends so; `address` is the same without a query
    keys       the environment variable with the bearer token, limits and retries; seconds count to a response's last byte
    left_out   why it gets no more questions; "" while it gets them
    Classes say how messages call an endpoint and the keys of the config.
    """

    path, name, url_key, variable_key = "/completions", "the endpoint", "endpoints", "served.key_variable"

    def __init__(self, base_url: str, keys: EndpointKeys):
        self.keys, self.left_out, self._answered, self._num_unanswered = keys, "", False, 0
        self._free_at, self._lock = 0.0, threading.Lock()  # when the next try may begin
        variable = keys.key_variable
        token = "" if variable is None else os.environ.get(variable, "").strip()
        if variable is not None and not (token and token.isascii() and token.isprintable()):
            content = "holds something that is not a key" if token else "is not set"
            expected = f"expected the endpoint's key in the environment variable {variable}"
            raise InputError(f"{self.variable_key}: {expected}, it {content}")
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{self.url_key}: expected an address like https://api.openai.com/v1, got {base_url!r}")
        if parts.username or parts.password:
            hint = f"name the key's variable: {self.variable_key}=NAME"
            raise InputError(f"{self.url_key}: expected an address without a password; {hint}")
        whole = parts.path.rstrip("/").removesuffix(self.path) + self.path
        self.url, self.address = (urlunsplit((*parts[:2], whole, query, "")) for query in (parts.query, ""))
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        headers |= {"Authorization": f"Bearer {token}"} if token else {}
        proxies = parts.scheme != "http" or LOCAL.fullmatch(parts.hostname) is None
        logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line per request, across the progress bar
        try:
            self._http = httpx.Client(headers=headers, limits=httpx.Limits(max_connections=None), trust_env=proxies)
        except (ImportError, ValueError) as error:  # a proxy that httpx cannot use, with its own words
            names = "HTTP_PROXY, HTTPS_PROXY or ALL_PROXY"
            raise InputError(f"{self.name} at {self.address}: {names}: {first_line(error)}") from None

    def send(self, url: str, body: Any = None) -> Any:
        """The parsed answer to one try of a request; without a body to a plain one, in at most PROBE_SECONDS.

        Raises Retryable; or NoAnswer if the endpoint refuses this one request, or its address or key is WRONG.
        """
        seconds = self.keys.seconds if body is not None else min(PROBE_SECONDS, self.keys.seconds)
        deadline, content, method = time.monotonic() + seconds, b"", "GET" if body is None else "POST"
        try:
            sent = None if body is None else json.dumps(body)
            with self._http.stream(method, url, content=sent, timeout=seconds) as response:
                for piece in response.iter_bytes():  # in bounded time and size, also if they come one by one
                    content += piece
                    if time.monotonic() > deadline:
                        raise Retryable(f"{self.name} did not answer in time")
                    if len(content) > LONGEST_REPLY:
                        raise Retryable(f"{self.name}'s answer has no end")
        except httpx.TimeoutException:
            raise Retryable(f"{self.name} did not answer in time") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Retryable(f"{self.name} is out of reach: {short(first_line(error))}") from None
        code, status = response.status_code, f"HTTP {response.status_code} {response.reason_phrase}"
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
            if response.is_success:
                raise self.nonsense(content.decode(errors="replace")) from None
        if response.is_success:
            return answer
        if code in WRONG:
            expected = f"expected {self.url_key} and {self.variable_key} of a server with /v1{self.path}"
            raise NoAnswer(f"it answers {status}: {expected}", code)
        if code in AGAIN or code >= 500:
            busy = Retryable(f"{self.name} answers {status}", code)
            busy.wait = _wait_of(response.headers.get("Retry-After", ""))
            raise busy
        words: Any = answer if isinstance(answer, dict) else {}
        words = words.get("message") or words.get("detail") or words.get("error") or ""
        words = words.get("message", words) if isinstance(words, dict) else words
        raise NoAnswer(f"{self.name} refuses it: {status}", code, explanation=short(str(words)))

    def nonsense(self, answer: str) -> Retryable:
        """The error for an answer of another kind than the one requested."""
        return Retryable(f"{self.name}'s answer is not a completion: {short(answer)}", status=200)

    def answer(self, reply: Callable[[Any, Question], Any], question: Question) -> Any:
        """What `reply(self, question)` returns, called again after Retryable. Raises what its last call raises."""
        rate, pause = self.keys.requests_per_minute, self.keys.backoff
        for attempt in range(1, self.keys.attempts + 1):
            with self._lock:
                start = max(time.monotonic(), self._free_at)
                self._free_at = start if rate is None else start + 60 / rate
            time.sleep(max(0.0, start - time.monotonic()))
            try:
                return reply(self, question)
            except Retryable as error:
                with self._lock:
                    self._free_at = max(self._free_at, time.monotonic() + (error.wait or 0.0))
                if attempt == self.keys.attempts or self.left_out:
                    raise
                if error.wait is None:  # else all threads wait, above
                    time.sleep(min(pause, LONGEST_WAIT))
                pause *= 2

    def note(self, error: Exception | None) -> None:
        """Count how a question ended, and leave the endpoint out if need be."""
        status, again = getattr(error, "status", None), isinstance(error, Retryable)
        with self._lock:
            if error is None:
                self._answered, self._num_unanswered = True, 0
            elif again or status is None or not self._answered:  # else this one question was refused
                self._num_unanswered += 1
            if self.left_out or error is None:
                return
            if status in WRONG:
                self.left_out = str(error)
            elif self._num_unanswered >= GIVE_UP:
                self.left_out = f"{GIVE_UP} questions in a row got no answer, the last one: {reason_of(error)}"
        if again and not self.left_out and not self.is_there():
            self.left_out = str(error)

    def is_there(self) -> bool:
        """Whether it answers a plain request; true where none is known."""
        return True


def _wait_of(header: str) -> float | None:
    """Seconds that a Retry-After asks for, as a number or as a date (RFC 9110, 10.2.3), at most LONGEST_WAIT; None: none."""
    if re.fullmatch(r"\d+(\.\d+)?", header):
        return min(float(header), LONGEST_WAIT)
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return None
    seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - time.time()
    return min(max(seconds, 0.0), LONGEST_WAIT)


def answers(
    endpoints: Sequence[AnyEndpoint], questions: Sequence[Question], reply: Callable[[AnyEndpoint, Question], Any],
    turns: int, say: Callable[[str], None], hint: str,
) -> Iterator[tuple[Question, Any, AnyEndpoint]]:  # fmt: skip
    """Every question with what `reply` returns for it, or the error that it ended with, and the endpoint; as they come.

    A failed question is asked again after all others, `turns` times in all; not after InputError, for no endpoint would do.
    Raises InputError, which ends with the hint, once no endpoint is left and all that came was taken.
    """
    waiting: SimpleQueue[tuple[Question, int]] = SimpleQueue()
    outcomes: SimpleQueue[Any] = SimpleQueue()  # triples; an endpoint for each thread that has ended
    over = threading.Event()

    def work(endpoint: AnyEndpoint) -> None:
        while not endpoint.left_out and not over.is_set():
            try:
                question, turn = waiting.get(timeout=0.2)
            except Empty:
                continue
            answer, error = None, None
            try:
                answer = endpoint.answer(reply, question)
            except Exception as fault:  # whatever it is, it is this question's
                error = fault
            if not isinstance(error, InputError):
                endpoint.note(error)
                if error is not None and (endpoint.left_out or turn < turns):
                    waiting.put((question, turn + (not endpoint.left_out)))
                    continue
            outcomes.put((question, error or answer, endpoint))
        outcomes.put(endpoint)

    for question in questions:
        waiting.put((question, 1))
    threads = [endpoint for endpoint in endpoints for _ in range(min(endpoint.keys.concurrency, len(questions)))]
    for endpoint in threads:
        threading.Thread(target=work, args=(endpoint,), daemon=True).start()
    num_missing, num_running, reported = len(questions), len(threads), set[Endpoint]()
    try:
        while num_missing and num_running:
            outcome = outcomes.get()
            if not isinstance(outcome, Endpoint):
                num_missing -= 1
                yield outcome
                continue
            num_running -= 1
            if outcome not in reported:
                reported.add(outcome)
                say(f"{outcome.address} is left out: {outcome.left_out}")
    finally:
        over.set()
    if num_missing:
        reasons = "; ".join(f"{endpoint.address}: {endpoint.left_out}" for endpoint in endpoints)
        raise InputError(f"no endpoint is left ({reasons}); {hint}")


def reason_of(error: Exception) -> str:
    """Why a question has no answer, in one line."""
    if isinstance(error, NoAnswer) and error.explanation:
        return f"{error} ({error.explanation})"
    return str(error) if isinstance(error, NoAnswer | InputError) else f"{type(error).__name__}: {error}"


def short(text: str) -> str:
    """The beginning of a text, on one line."""
    return " ".join(text.split())[:LONGEST]


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


class Completions(Endpoint):
    """A target behind /v1/completions. Raises InputError for sampling that its engine has no words for, too.

    keys.engine   one of vllm, sglang (prompts go as token ids, and tokens come back), openai (ids, and texts come back) and
                  transformers (texts both ways, which hold the stop string that ended them)
    keys.request  further keys of every request, null takes one out: one of neutral value, or the seed of every row
    unknown_keys  left out, for it does not know them; None: it does not list what it knows
    """

    tokenizing = threading.Lock()  # all threads of all endpoints share one tokenizer
    unknown_keys: list[str] | None = None

    def __init__(self, url: str, keys: EndpointKeys, pair: ModelPair, sampling: Sampling):
        super().__init__(url, keys)
        self.engine, self.model, self.pair, self.sampling = keys.engine, str(keys.model), pair, sampling
        self.ends = tuple(pair.ends(sampling))
        changed = {name for name, neutral in NEUTRAL.items() if getattr(sampling, name) != neutral}
        self._needless = {*EXACT, "stop_token_ids", *NEUTRAL} - changed  # nothing changes without these keys
        for name in NEUTRAL:
            if name in changed and name not in FIELDS.get(self.engine, NEUTRAL):
                expected = f"expected {name}={NEUTRAL[name]}, or another engine"
                raise InputError(f"sampling.{name}: engine={self.engine} knows no {name}; {expected}")
        for name, value in keys.request.items():
            if name in OURS and (value is not None or name in changed or name not in NEUTRAL):
                raise InputError(f"served.request.{name}: said by model, prompts and sampling; leave it out")
        if keys.request.get("seed") is not None:
            raise InputError(
                "served.request.seed: every row has one, of sampling.seed: expected null, which sends none"
            )
        self.seeded = "seed" not in keys.request
        ends = list(self.ends)
        self._generation: dict[str, Any] = {"do_sample": sampling.temperature > 0}  # in the words of transformers
        if sampling.temperature > 0:
            self._generation |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
            self._generation |= {"min_p": sampling.min_p} if sampling.min_p else {}
        self._generation |= {"repetition_penalty": sampling.repetition_penalty}
        self._generation |= {"eos_token_id": ends, "pad_token_id": ends[0]} if ends else {}
        fields: dict[str, Any] = {"model": self.model, "stop": list(sampling.stop) or None}
        if self.engine != "transformers":
            fields |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "n": 1, "stream": False}
        if self.engine in ALL_TOKENS:
            fields |= {"top_k": sampling.top_k or ALL_TOKENS[self.engine], "min_p": sampling.min_p, **EXACT}
            fields |= {"repetition_penalty": sampling.repetition_penalty, "stop_token_ids": ends or None}
        self.fields = {name: value for name, value in (fields | dict(keys.request)).items() if value is not None}

    def open(self) -> None:
        """Leave it out if it is away, lacks the model or does not know a key that matters."""
        try:
            models, keys = self._models(), self._known_keys()
        except NoAnswer as error:
            self.left_out = str(error)
            return
        if models and self.model not in models and self.engine in ALL_TOKENS:
            self.left_out = f"it serves {', '.join(models)}: expected served.model={self.model}"
        if keys:
            self.unknown_keys = sorted({"prompt", "max_tokens", *(["seed"] * self.seeded), *self.fields} - keys)
            if needed := [key for key in self.unknown_keys if key not in self._needless]:
                self.left_out = f"it does not know {', '.join(needed)} (its openapi.json): another served.engine?"

    def is_there(self) -> bool:
        try:
            self._models()
        except NoAnswer:
            return False
        return True

    def _models(self) -> list[str]:
        """The models that it lists, if it does. Raises NoAnswer if it is away."""
        try:
            answer = self.send(self.address.removesuffix("/completions") + "/models")
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
                schemas = self.send(urlunsplit((*parts[:2], f"{root}/openapi.json", "", "")))
                content = schemas["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
                name = str(content["application/json"]["schema"].get("$ref", "")).rpartition("/")[2]
                return set(schemas["components"]["schemas"][name]["properties"])
            except (NoAnswer, LookupError, TypeError, AttributeError):
                continue
        return set()

    @property
    def about_keys(self) -> str:
        """What is known of the keys that it knows, for the manifest."""
        if self.unknown_keys is None:
            return "not listed by the server: one that it does not know may have been ignored"
        neutral = f", {', '.join(self.unknown_keys)} left out (neutral)" if self.unknown_keys else ""
        return f"as its openapi.json lists them{neutral}"

    def complete(self, request: CompletionRequest) -> Completion:
        """The answer to one try. Raises as `send` and `read` do, and InputError if no text is encoded to the prompt."""
        body = {"prompt": request.prompt_ids, "max_tokens": request.max_tokens, **self.fields}
        if self.seeded:
            body["seed"] = int(content_hash([self.sampling.seed, request.row], 16), 16) % SEEDS
        if self.engine == "transformers":
            body["prompt"] = self._text(request.prompt_ids)
            body["generation_config"] = json.dumps({"max_new_tokens": request.max_tokens, **self._generation})
        return self.read(
            self.send(self.url, {k: v for k, v in body.items() if k not in (self.unknown_keys or ())}), request
        )

    def _text(self, ids: list[int]) -> str:
        tokenizer: Any = self.pair.tokenizer
        with self.tokenizing:
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
        sent, reason, count = request.prompt_ids, choice.get("finish_reason"), usage.get("completion_tokens")
        expect(by.startswith(self.model) or not by, f"it answers as {by}, asked for was {self.model}")
        expect(prompt in (None, sent), "it has read another prompt: its prompt_token_ids are not those that were sent")
        counted = f"it has read {size} tokens of a prompt, sent were {len(sent)}"
        expect(not isinstance(size, int) or size == len(sent), counted)
        expect(reason in ("stop", "length"), f"its finish_reason is {reason!r}: expected stop or length")
        by = " ".join(filter(None, [by, str(answer.get("system_fingerprint") or "")]))
        ids, stopped, source = choice.get("token_ids"), reason == "stop", RETURNED
        logprobs = choice.get("logprobs")
        tokens = logprobs.get("tokens") if isinstance(logprobs, Mapping) else None
        if not isinstance(ids, list) and isinstance(tokens, list):  # log-probabilities named by tokens: "token_id:7"
            matches = [re.fullmatch(r"token_id:(\d+)", str(name)) for name in tokens]
            ids = [int(match[1]) for match in matches if match] if matches and all(matches) else None
        with self.tokenizing:
            if isinstance(ids, list):
                ids = self._whole(ids, choice, request, stopped, count)
            else:
                ids, source = self._encoded(choice, request, stopped, count), ENCODED
            if isinstance(ids, str):
                return Completion([], "", "", NO_ROUND_TRIP, by, ids)
            reason, text = self._finish_reason(ids, request, stopped), self.pair.text(ids, sent)
            if reason == "stop":
                text = text[: self.pair.stop_position(self.sampling.stop, ids, sent)]
        return Completion(ids, text, reason, source, by)

    def _whole(
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
        length = f"it ends for its length after {num} tokens, asked for were {request.max_tokens}"
        expect(num == request.max_tokens, length)
        return "length"

    def _stops_at(self, ids: list[int], request: CompletionRequest) -> int | None:
        """How many of the tokens hold the first stop string; None if all of them hold none."""
        holds = lambda count: self.pair.stop_position(self.sampling.stop, ids[:count], request.prompt_ids) is not None
        without = len(ids)
        while without and holds(without):
            without -= 1
        return without + 1 if without < len(ids) else None


def expect(holds: bool, reason: str) -> None:
    """Raises NoAnswer, with the reason, if a response is not as expected."""
    if not holds:
        raise NoAnswer(reason)

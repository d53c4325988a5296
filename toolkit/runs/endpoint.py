"""HTTP endpoints that take and give JSON, and the one pool that questions go through: judges and remote targets use it.

Every endpoint has `concurrency` threads that take questions from one queue. A question is tried `attempts` times in succession;
each wait is twice the one before, or as long as the server's Retry-After says; all threads of the endpoint wait then. An
endpoint is left out if its key or address is wrong, if it answers no plain request either, or after GIVE_UP questions in a row
without an answer. Its questions go to the others. A redirect is an error, too: the key goes to no other address.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from toolkit.config.commands import EndpointKeys
from toolkit.errors import LONGEST, InputError
from toolkit.files.text import first_line

AGAIN = (408, 409, 425, 429)  # and 5xx: another try may bring an answer
WRONG = (301, 302, 303, 307, 308, 401, 403, 404, 405)
LOCAL = re.compile(r"localhost|127\.[\d.]+|0\.0\.0\.0|::1")  # hosts that no proxy stands in front of
GIVE_UP = 5  # questions without an answer, in a row, until an endpoint is left out
LONGEST_WAIT, PROBE_SECONDS = 60.0, 10.0  # before a try; for a plain request
LONGEST_REPLY = 2**22  # bytes
AnyEndpoint = TypeVar("AnyEndpoint", bound="Endpoint")
Question = TypeVar("Question")


class NoAnswer(Exception):
    """Why a question has no answer, in one line. status: HTTP's, if any; explanation: the server's own words."""

    def __init__(self, reason: str, status: int | None = None, wait: float | None = None, explanation: str = ""):
        super().__init__(reason)
        self.status, self.explanation = status, explanation
        self.wait = None if wait is None else min(wait, LONGEST_WAIT)


class Retryable(NoAnswer):
    """Another try may bring an answer, after the seconds (`wait`) that the server asks for."""


class Rejected(NoAnswer):
    """The endpoint refuses this one request."""


class WrongEndpoint(NoAnswer):
    """The address or the key is wrong."""


class Endpoint:
    """One endpoint, for any number of threads. Raises InputError for an address, key or proxy that cannot be used.

    url        where requests go: the base address, and `path` unless it ends so; `address` is the same without a query
    keys       the environment variable with the bearer token, limits and retries; seconds count to a response's last byte
    left_out   why it gets no more questions; "" while it gets them
    Classes say how messages call an endpoint, the keys of the config, and GIVE_UP questions without an answer, and what to do
    if the address or the key is wrong.
    """

    path = name = url_key = variable_key = silence = hint = ""

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
        try:
            self._http = httpx.Client(headers=headers, limits=httpx.Limits(max_connections=None), trust_env=proxies)
        except (ImportError, ValueError) as error:  # a proxy that httpx cannot use, with its own words
            names = "HTTP_PROXY, HTTPS_PROXY or ALL_PROXY"
            raise InputError(f"{self.name} at {self.address}: {names}: {first_line(error)}") from None

    def post(self, body: Any) -> Any:
        """The parsed answer to one try of a request. Raises Retryable, Rejected or WrongEndpoint."""
        return self._send("POST", self.url, self.keys.seconds, json.dumps(body))

    def get(self, url: str) -> Any:
        """The parsed answer to a plain request. Raises as `post` does."""
        return self._send("GET", url, min(PROBE_SECONDS, self.keys.seconds))

    def nonsense(self, answer: Any) -> Retryable:
        """The error for an answer of another kind than the one requested."""
        text = answer.decode(errors="replace") if isinstance(answer, bytes) else json.dumps(answer)
        return Retryable(f"{self.name}'s answer is not a completion: {short(text[:LONGEST])}", status=200)

    def _send(self, method: str, url: str, seconds: float, content: str | None = None) -> Any:
        deadline, body = time.monotonic() + seconds, b""
        try:
            with self._http.stream(method, url, content=content, timeout=seconds) as response:
                for piece in response.iter_bytes():  # in bounded time and size, also if they come one by one
                    body += piece
                    if time.monotonic() > deadline:
                        raise Retryable(f"{self.name} did not answer in time")
                    if len(body) > LONGEST_REPLY:
                        raise Retryable(f"{self.name}'s answer has no end")
        except httpx.TimeoutException:
            raise Retryable(f"{self.name} did not answer in time") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Retryable(f"{self.name} is out of reach: {short(first_line(error))}") from None
        answer: Any = None
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            if response.is_success:
                raise self.nonsense(body) from None
        code, status = response.status_code, f"HTTP {response.status_code} {response.reason_phrase}"
        if response.is_success:
            return answer
        if code in WRONG:
            raise WrongEndpoint(f"it answers {status}: {self.hint}", code)
        if code in AGAIN or code >= 500:
            wait = response.headers.get("Retry-After", "")
            raise Retryable(
                f"{self.name} answers {status}", code, float(wait) if re.fullmatch(r"\d+(\.\d+)?", wait) else None
            )
        words: Any = answer if isinstance(answer, dict) else {}
        words = words.get("message") or words.get("detail") or words.get("error") or ""
        words = words.get("message", words) if isinstance(words, dict) else words
        raise Rejected(f"{self.name} refuses it: {status}", code, explanation=short(str(words)))

    def answer(self, reply: Callable[[], Any]) -> Any:
        """What `reply` returns, called again after Retryable. Raises what its last call raises."""

        def attempt() -> Any:
            with self._lock:
                start, rate = max(time.monotonic(), self._free_at), self.keys.requests_per_minute
                self._free_at = start if rate is None else start + 60 / rate
            time.sleep(max(0.0, start - time.monotonic()))
            try:
                return reply()
            except Retryable as error:
                with self._lock:
                    self._free_at = max(self._free_at, time.monotonic() + (error.wait or 0.0))
                raise

        def wait(state: Any) -> float:
            return doubled(state) if state.outcome.exception().wait is None else 0.0  # else all threads wait, above

        doubled, enough = wait_exponential(self.keys.backoff, max=LONGEST_WAIT), stop_after_attempt(self.keys.attempts)
        stop = lambda state: enough(state) or bool(self.left_out)
        return Retrying(stop=stop, wait=wait, retry=retry_if_exception_type(Retryable), reraise=True)(attempt)

    def note(self, error: Exception | None) -> None:
        """Count how a question ended, and leave the endpoint out if need be."""
        with self._lock:
            if error is None:
                self._answered, self._num_unanswered = True, 0
                return
            self._num_unanswered += not (isinstance(error, Rejected) and self._answered)
            if self.left_out:
                return
            if isinstance(error, WrongEndpoint):
                self.left_out = str(error)
            elif self._num_unanswered >= GIVE_UP:
                self.left_out = f"{self.silence}, the last one: {reason_of(error)}"
        if isinstance(error, Retryable) and not self.left_out and not self.is_there():
            self.left_out = str(error)

    def is_there(self) -> bool:
        """Whether it answers a plain request; true where none is known."""
        return True


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
                answer = endpoint.answer(partial(reply, endpoint, question))
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

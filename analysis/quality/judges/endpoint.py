"""A judge behind an endpoint that speaks OpenAI's chat completions: GPT-4, or whatever vLLM and its like serve.

Silence, dropped connections, "too many requests", faults of the server and answers that are no completion are tried again, each
time after twice as long a wait (or as long as the server asks for). A redirect is an error: the key goes to no other place.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from analysis.quality.judge_templates import SYSTEM
from analysis.quality.judges.base import Reply
from toolkit.errors import LONGEST, InputError
from toolkit.lines import first_line

AGAIN = (408, 409, 425, 429)  # and 5xx
WRONG = (301, 302, 303, 307, 308, 401, 403, 404, 405)  # the address or the key: no question will fare better
LONGEST_WAIT = 60.0  # seconds
LONGEST_REPLY = 2**22  # bytes
GIVE_UP = 5  # questions without a reply, in a row


class _Silent(Exception):
    """No completion came, and another try may bring one; `wait` is how long the server asks for, in seconds."""

    def __init__(self, reason: str, wait: float | None = None):
        super().__init__(reason)
        self.wait = wait


class _Refused(Exception):
    """The endpoint refuses this one question."""


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


class Endpoint:
    """A chat completions endpoint.

    body     keys of every request, beside model, messages and temperature 0; None takes a key out
    seconds  one try may take; retries, backoff, workers as of the metric
    """

    def __init__(
        self, base_url: str, model: str, key_variable: str | None, body: Mapping[str, Any],
        seconds: float, retries: int, backoff: float, workers: int,
    ):  # fmt: skip
        self.url, self.place = _address(base_url)
        self.model, self.key = model, _key(key_variable)
        given = {"model": model, "temperature": 0, **body}
        self.body = {name: value for name, value in given.items() if value is not None}
        self.seconds, self.retries, self.backoff, self.workers = seconds, retries, backoff, workers
        self._opener = build_opener(_NoRedirects)
        self._lock = threading.Lock()
        self._num_answered = self._num_silent = 0

    @property
    def identity(self) -> dict[str, Any]:
        """Address and the keys of a request."""
        return {"endpoint": self.place, "request": self.body}

    @property
    def about(self) -> str:
        """Model, address, and what is not promised."""
        how = ", ".join(f"{name} {value}" for name, value in self.body.items() if name != "model")
        return f"{self.model} at {self.place} ({how}; an endpoint need not answer twice alike)"

    def open(self, pair: Any) -> None:
        """Nothing is to be loaded."""

    def ask(self, questions: Sequence[str]) -> Iterator[Reply]:
        """Several at once. Raises InputError for a wrong address or key, or after GIVE_UP questions without a reply."""
        pool = ThreadPoolExecutor(self.workers)
        try:
            yield from pool.map(self._reply, questions)
        finally:
            pool.shutdown(cancel_futures=True)

    def _reply(self, question: str) -> Reply:
        """One question, tried until something comes."""
        reason = ""
        for attempt in range(self.retries + 1):
            try:
                reply = self._try(question)
            except _Refused as refusal:
                return self._without(str(refusal), counts=not self._num_answered)
            except _Silent as silence:
                reason = str(silence)
                if attempt < self.retries:
                    wait = self.backoff * 2**attempt if silence.wait is None else silence.wait
                    time.sleep(min(wait, LONGEST_WAIT))
            else:
                with self._lock:
                    self._num_answered, self._num_silent = self._num_answered + 1, 0
                return reply
        return self._without(reason, counts=True)

    def _without(self, reason: str, counts: bool) -> Reply:
        """No reply to one question. Raises InputError once there were too many of them in a row."""
        with self._lock:
            self._num_silent += counts
            if self._num_silent >= GIVE_UP:
                raise InputError(
                    f"judge: {self.place} answered none of {GIVE_UP} questions in a row ({reason}); run again when it does, "
                    "with kept=FOLDER what it has answered is not asked again"
                )
        return Reply(None, reason)

    def _try(self, question: str) -> Reply:
        """One request. Raises InputError, _Refused or _Silent."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        data = json.dumps({**self.body, "messages": messages}).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        deadline = time.monotonic() + self.seconds
        try:
            with self._opener.open(Request(self.url, data, headers), timeout=self.seconds) as response:
                return _completion(_read(response, deadline))
        except HTTPError as error:
            raise self._fault(error) from None
        except TimeoutError:
            raise _Silent("the judge did not answer in time") from None
        except (URLError, OSError, HTTPException) as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise _Silent("the judge did not answer in time") from None
            raise _Silent(f"the judge is out of reach: {_short(first_line(error))}") from None

    def _fault(self, error: HTTPError) -> Exception:
        """What a status other than "fine" means."""
        said = f"HTTP {error.code} {error.reason}"
        with error:
            if error.code in WRONG:
                return InputError(
                    f"judge: {self.place} answers {said}: expected base_url, model and key_variable of an endpoint"
                )
            if error.code in AGAIN or error.code >= 500:
                return _Silent(f"the judge answers {said}", _seconds(error.headers.get("Retry-After")))
            return _Refused(f"the judge refuses it: {said}")


def _address(base_url: str) -> tuple[str, str]:
    """Where completions are asked for, and the same for people: without a query. Raises InputError for what is no address."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"judge.base_url: expected an address like https://api.openai.com/v1, got {base_url!r}")
    if parts.username or parts.password:
        raise InputError(
            "judge.base_url: expected an address without a password; name the key's variable: key_variable=NAME"
        )
    path = parts.path.rstrip("/")
    path = path if path.endswith("/chat/completions") else f"{path}/chat/completions"
    return urlunsplit((*parts[:2], path, parts.query, "")), urlunsplit((*parts[:2], path, "", ""))


def _key(variable: str | None) -> str | None:
    """The key in an environment variable. Raises InputError if there is none, or none that a header can hold."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        found = "holds what is no key" if key else "is not set"
        raise InputError(
            f"judge.key_variable: expected the endpoint's key in the environment variable {variable}, it {found}"
        )
    return key


def _read(response: Any, deadline: float) -> bytes:
    """A body of bounded size, in bounded time: also from a server that sends it byte by byte."""
    found = b""
    while piece := response.read1(2**16):
        found += piece
        if time.monotonic() > deadline:
            raise _Silent("the judge did not answer in time")
        if len(found) > LONGEST_REPLY:
            raise _Silent("the judge's answer has no end")
    return found


def _completion(body: bytes) -> Reply:
    """What a completion says, and who says it. Raises _Silent for what is none."""
    try:
        found = json.loads(body)
        text = found["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _Silent(
            f"the judge's answer is no completion: {_short(body[:LONGEST].decode(errors='replace'))}"
        ) from None
    if not isinstance(text, str):
        raise _Silent("the judge's answer holds no text")
    by = [str(found[name]) for name in ("model", "system_fingerprint") if found.get(name)]
    return Reply(text, by=" ".join(by))


def _seconds(value: str | None) -> float | None:
    """Seconds of a Retry-After header, if it holds a number."""
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:
        return None


def _short(text: str) -> str:
    return " ".join(text.split())[:LONGEST]

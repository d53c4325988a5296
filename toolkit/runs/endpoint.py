"""A client of one HTTP endpoint that takes and gives JSON: judges and remote targets answer through it.

A try ends in an answer or in one of three errors. `Silent`: another try may bring an answer. `Refused`: this one request is
refused. `Wrong`: the address or the key is wrong. A redirect is an error, too: the key goes to no other address.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from toolkit.errors import LONGEST, InputError
from toolkit.files.text import first_line

AGAIN = (408, 409, 425, 429)  # and 5xx
WRONG = (301, 302, 303, 307, 308, 401, 403, 404, 405)
LOCAL = re.compile(r"localhost|127\.[\d.]+|0\.0\.0\.0|::1")  # hosts that no proxy stands in front of
LONGEST_WAIT = 60.0  # seconds
LONGEST_REPLY = 2**22  # bytes


class Silent(Exception):
    """No answer came, and another try may bring one, after the seconds that the server asks for."""

    def __init__(self, reason: str, wait: float | None = None, status: int | None = None):
        super().__init__(reason)
        self.wait, self.status = None if wait is None else min(wait, LONGEST_WAIT), status


class Refused(Exception):
    """The endpoint refuses this one request; `explanation` holds the server's words."""

    def __init__(self, reason: str, explanation: str = ""):
        super().__init__(reason)
        self.explanation = explanation


class Wrong(InputError):
    """The address or the key is wrong; `status` says which."""

    def __init__(self, reason: str, status: int = 404):
        super().__init__(reason)
        self.status = status


class Client:
    """A client of one endpoint.

    url      where requests go; `address` is the same without a query
    key      sent as a bearer token
    seconds  one try may take, the answer's last byte included
    who      how messages call it: "the judge"; mend: what `Wrong` says after the status
    """

    def __init__(self, url: str, key: str | None, seconds: float, who: str, mend: str):
        self.url, self.address = url, urlunsplit((*urlsplit(url)[:3], "", ""))
        self.seconds, self.who, self.mend = seconds, who, mend
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        here = urlsplit(url).scheme == "http" and LOCAL.fullmatch(urlsplit(url).hostname or "") is not None
        try:
            self._http = httpx.Client(headers=headers, limits=httpx.Limits(max_connections=None), trust_env=not here)
        except (ImportError, ValueError) as error:  # a proxy that httpx cannot use, with its own words
            proxies = "HTTP_PROXY, HTTPS_PROXY or ALL_PROXY"
            raise InputError(f"{who} at {self.address}: {proxies}: {first_line(error)}") from None

    def post(self, body: Any) -> Any:
        """The answer to a request, parsed. Raises Silent, Refused or Wrong."""
        return self._send("POST", self.url, self.seconds, json.dumps(body))

    def get(self, url: str, seconds: float) -> Any:
        """What another address of the same server answers, parsed. Raises as `post` does."""
        return self._send("GET", url, seconds)

    def nonsense(self, answer: Any) -> Silent:
        """The error for an answer that is not what was asked for."""
        text = answer.decode(errors="replace") if isinstance(answer, bytes) else json.dumps(answer)
        return Silent(f"{self.who}'s answer is not a completion: {short(text[:LONGEST])}", status=200)

    def _send(self, method: str, url: str, seconds: float, content: str | None = None) -> Any:
        deadline, body = time.monotonic() + seconds, b""
        try:
            with self._http.stream(method, url, content=content, timeout=seconds) as response:
                for piece in response.iter_bytes():  # in bounded time and size, also if they come one by one
                    body += piece
                    if time.monotonic() > deadline:
                        raise Silent(f"{self.who} did not answer in time")
                    if len(body) > LONGEST_REPLY:
                        raise Silent(f"{self.who}'s answer has no end")
        except httpx.TimeoutException:
            raise Silent(f"{self.who} did not answer in time") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Silent(f"{self.who} is out of reach: {short(first_line(error))}") from None
        if not response.is_success:
            raise self._fault(response, body)
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise self.nonsense(body) from None

    def _fault(self, response: httpx.Response, body: bytes) -> Exception:
        """The error for a status that is not a success."""
        code = response.status_code
        status = f"HTTP {code} {response.reason_phrase}"
        if code in WRONG:
            return Wrong(f"{self.address} answers {status}: {self.mend}", code)
        if code not in AGAIN and code < 500:
            try:
                content = json.loads(body)
                message = content.get("message") or content.get("detail") or content.get("error") or ""
                explanation = short(str(message.get("message", message) if isinstance(message, dict) else message))
            except (ValueError, AttributeError, RecursionError):
                explanation = ""
            return Refused(f"{self.who} refuses it: {status}", explanation)
        try:
            wait = max(0.0, float(response.headers["Retry-After"]))
        except (KeyError, ValueError):
            wait = None
        return Silent(f"{self.who} answers {status}", wait, code)


def retrying(attempts: int, backoff: float, given_up: Callable[[], bool] = lambda: False) -> Retrying:
    """A caller that tries again after `Silent`: waits double from `backoff` seconds on, or last as long as the server asks."""
    doubled = wait_exponential(backoff, max=LONGEST_WAIT)

    def wait(state: RetryCallState) -> float:
        silence: Any = state.outcome and state.outcome.exception()
        return doubled(state) if silence.wait is None else silence.wait

    enough = stop_after_attempt(attempts)
    return Retrying(
        stop=lambda state: enough(state) or given_up(), wait=wait, retry=retry_if_exception_type(Silent), reraise=True
    )


def address(base_url: str, path: str, name: str, mend: str = "") -> str:
    """`base_url` followed by `path`, unless it ends so. Raises InputError, which calls it `name`, if it is not an address."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"{name}: expected an address like https://api.openai.com/v1, got {base_url!r}")
    if parts.username or parts.password:
        raise InputError(f"{name}: expected an address without a password{mend}")
    start = parts.path.rstrip("/")
    return urlunsplit((*parts[:2], start if start.endswith(path) else f"{start}{path}", parts.query, ""))


def key_of(variable: str | None, name: str) -> str | None:
    """The key in an environment variable. Raises InputError if it is not set, or holds what a header cannot."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        content = "holds something that is not a key" if key else "is not set"
        raise InputError(f"{name}: expected the endpoint's key in the environment variable {variable}, it {content}")
    return key


def short(text: str) -> str:
    """The beginning of a text, on one line."""
    return " ".join(text.split())[:LONGEST]

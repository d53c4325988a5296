"""A client of one HTTP endpoint that takes and gives JSON: judges and served targets are asked through it.

A try ends in an answer or in one of three errors. `Silent`: another try may bring an answer (silence, dropped connections,
"too many requests", faults of the server, answers that are no JSON). `Refused`: this one request is refused. `Wrong`: the
address or the key is wrong, and no request will fare better. A redirect is an error: the key goes to no other address.
"""

from __future__ import annotations

import json
import os
import time
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from toolkit.errors import LONGEST, InputError
from toolkit.lines import first_line

AGAIN = (408, 409, 425, 429)  # and 5xx
WRONG = (301, 302, 303, 307, 308, 401, 403, 404, 405)
LONGEST_WAIT = 60.0  # seconds
LONGEST_REPLY = 2**22  # bytes


class Silent(Exception):
    """No answer came, and another try may bring one.

    wait    how long the server asks for, in seconds
    status  of HTTP, if there was one
    """

    def __init__(self, reason: str, wait: float | None = None, status: int | None = None):
        super().__init__(reason)
        self.wait, self.status = wait, status


class Refused(Exception):
    """The endpoint refuses this one request; `said` is what it gives as the reason."""

    def __init__(self, reason: str, said: str = ""):
        super().__init__(reason)
        self.said = said


class Wrong(InputError):
    """The address or the key is wrong; `status` says which."""

    def __init__(self, reason: str, status: int = 404):
        super().__init__(reason)
        self.status = status


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


class Client:
    """One endpoint that is asked.

    url      where requests go; `place` is the same for people: without a query
    key      sent as a bearer token; None: none is
    seconds  one try may take, the answer's last byte included
    who      how messages call it: "the judge"
    mend     what `Wrong` says behind the status
    """

    def __init__(self, url: str, key: str | None, seconds: float, who: str, mend: str):
        self.url, self.place = url, urlunsplit((*urlsplit(url)[:3], "", ""))
        self.seconds, self.who, self.mend = seconds, who, mend
        self.headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
        self._opener = build_opener(_NoRedirects)

    def post(self, body: Any) -> Any:
        """The answer to a request, parsed. Raises Silent, Refused or Wrong."""
        return self._send(Request(self.url, json.dumps(body).encode(), self.headers), self.seconds)

    def get(self, url: str, seconds: float) -> Any:
        """What lies at another address of the same server, parsed. Raises as `post` does."""
        return self._send(Request(url, None, self.headers), seconds)

    def _send(self, request: Request, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        try:
            with self._opener.open(request, timeout=seconds) as response:
                body = self._read(response, deadline)
        except HTTPError as error:
            raise self._fault(error) from None
        except TimeoutError:
            raise Silent(f"{self.who} did not answer in time") from None
        except (URLError, OSError, HTTPException) as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise Silent(f"{self.who} did not answer in time") from None
            raise Silent(f"{self.who} is out of reach: {short(first_line(error))}") from None
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise self.nonsense(body) from None

    def nonsense(self, answer: Any) -> Silent:
        """The error for an answer that is not what was asked for."""
        text = answer.decode(errors="replace") if isinstance(answer, bytes) else json.dumps(answer)
        return Silent(f"{self.who}'s answer is no completion: {short(text[:LONGEST])}", status=200)

    def _read(self, response: Any, deadline: float) -> bytes:
        """A body of bounded size, in bounded time: also from a server that sends it byte by byte."""
        found = b""
        while piece := response.read1(2**16):
            found += piece
            if time.monotonic() > deadline:
                raise Silent(f"{self.who} did not answer in time")
            if len(found) > LONGEST_REPLY:
                raise Silent(f"{self.who}'s answer has no end")
        return found

    def _fault(self, error: HTTPError) -> Exception:
        """What a status other than "fine" means."""
        said = f"HTTP {error.code} {error.reason}"
        with error:
            if error.code in WRONG:
                return Wrong(f"{self.place} answers {said}: {self.mend}", error.code)
            if error.code in AGAIN or error.code >= 500:
                return Silent(f"{self.who} answers {said}", _seconds(error.headers.get("Retry-After")), error.code)
            return Refused(f"{self.who} refuses it: {said}", _reason(error))


def pause(attempt: int, backoff: float, silence: Silent) -> float:
    """Seconds to wait after a failed try (the first is 0): twice as long each time, or as the server asks."""
    return min(backoff * 2**attempt if silence.wait is None else silence.wait, LONGEST_WAIT)


def address(base_url: str, path: str, name: str, mend: str = "") -> str:
    """`base_url` with `path` behind it, unless it ends so. Raises InputError, which calls it `name`, for what is no address."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"{name}: expected an address like https://api.openai.com/v1, got {base_url!r}")
    if parts.username or parts.password:
        raise InputError(f"{name}: expected an address without a password{mend}")
    start = parts.path.rstrip("/")
    return urlunsplit((*parts[:2], start if start.endswith(path) else f"{start}{path}", parts.query, ""))


def key_of(variable: str | None, name: str) -> str | None:
    """The key in an environment variable. Raises InputError if there is none, or none that a header can hold."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        found = "holds what is no key" if key else "is not set"
        raise InputError(f"{name}: expected the endpoint's key in the environment variable {variable}, it {found}")
    return key


def short(text: str) -> str:
    """The beginning of a text, on one line."""
    return " ".join(text.split())[:LONGEST]


def _reason(error: HTTPError) -> str:
    """What the body of an error says, as far as it can be read."""
    try:
        found = json.loads(error.read(2**16))
        told = found.get("message") or found.get("detail") or (found.get("error") or {})
        return short(str(told.get("message", told) if isinstance(told, dict) else told))
    except (OSError, HTTPException, ValueError, AttributeError, RecursionError):
        return ""


def _seconds(value: str | None) -> float | None:
    """Seconds of a Retry-After header, if it holds a number."""
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:
        return None

"""Many requests to several endpoints at once: what fails is tried again, and an endpoint that fails for good is left out.

Every endpoint has `concurrency` threads that take rows from one queue. A row is tried `attempts` times in succession. Each wait
is twice the one before it, or as long as the server asks for; then all threads of the endpoint wait. After a second such
turn a row has failed. An endpoint is left out if it does not answer a plain question either, or if its key or address is wrong.
The same holds after GIVE_UP successive rows without an answer. Its rows go to the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from data_gen.remote.answers import Unbelievable
from data_gen.remote.requests import Asked, Requests
from toolkit.errors import InputError
from toolkit.runs.endpoint import Client, Refused, Silent, Wrong, address, retrying

GIVE_UP = 5  # rows without an answer, in a row, until an endpoint is left out
TURNS = 2  # of a row
PROBE_SECONDS = 10.0  # for a plain question
AWAY = (401, 403, 408, 429, 502, 503, 504)  # after any other answer to a plain question, a server is there
MEND = "expected endpoints and served.key_variable of a server with /v1/completions"


@dataclass(frozen=True)
class EndpointLimits:
    """Limits of one endpoint. seconds: of one try; backoff: seconds before the second; requests_per_minute: None: any."""

    concurrency: int
    requests_per_minute: float | None
    seconds: float
    attempts: int
    backoff: float


@dataclass
class RowOutcome:
    """What came of one row: what `read` made of the answer, or a reason. `address`: the endpoint that had it last."""

    request: Asked
    address: str
    answer: Any = None
    reason: str = ""


@dataclass
class Server:
    """One endpoint at work. unknown: keys that it does not know, left out; checked: it says which ones it knows."""

    client: Client
    requests: Requests
    limits: EndpointLimits
    unknown: list[str] = field(default_factory=list)
    checked: bool = False
    left_out: str = ""
    answered: int = 0
    unanswered: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    free_at: float = 0.0  # when the next request may begin

    @classmethod
    def at(cls, base_url: str, key: str | None, requests: Requests, limits: EndpointLimits) -> Server:
        """The endpoint of a base address. Raises InputError if it is none."""
        url = address(base_url, "/completions", "endpoints", "; name the key's variable: served.key_variable=NAME")
        return cls(Client(url, key, limits.seconds, "the endpoint", MEND), requests, limits)

    def open(self) -> None:
        """Is it there, does it have the model, which keys does it know? A fault is noted in `left_out`."""
        try:
            models = self._ask("/models")
            fields = self._fields()
        except (Silent, Wrong) as error:
            self.left_out = str(error)
            return
        named = [str(model.get("id")) for model in models if isinstance(model, dict)]
        if named and self.requests.model not in named and self.requests.engine.name in ("vllm", "sglang"):
            self.left_out = f"it serves {', '.join(named)}: expected served.model={self.requests.model}"
        if fields:
            self.checked = True
            self.unknown = sorted(set(self.requests.body(Asked(0, [0], 1))) - fields)
            needed = [name for name in self.unknown if not self.requests.needless(name)]
            if needed:
                self.left_out = f"it does not know {', '.join(needed)} (its openapi.json): another served.engine?"

    def reply(self, request: Asked, read: Callable[[Any, Asked], Any]) -> Any:
        """What `read` makes of the answer to one row. Raises Silent, Refused, Wrong, Unbelievable or InputError."""
        body = {name: value for name, value in self.requests.body(request).items() if name not in self.unknown}
        tries = retrying(self.limits.attempts, self.limits.backoff, lambda: bool(self.left_out))
        return tries(self._try, body, request, read)

    def _try(self, body: Mapping[str, Any], request: Asked, read: Callable[[Any, Asked], Any]) -> Any:
        """One request, once the endpoint may be asked again."""
        with self.lock:
            start = max(time.monotonic(), self.free_at)
            rate = self.limits.requests_per_minute
            self.free_at = start if rate is None else start + 60 / rate
        time.sleep(max(0.0, start - time.monotonic()))
        try:
            return read(self.client.post(body), request)
        except Silent as silence:
            with self.lock:
                self.free_at = max(self.free_at, time.monotonic() + (silence.wait or 0))
            raise

    def judge(self, error: Exception | None) -> None:
        """Note how a row went; `left_out` says why nothing more is asked of it, if so."""
        with self.lock:
            if error is None:
                self.answered, self.unanswered = self.answered + 1, 0
                return
            self.unanswered += not (isinstance(error, Refused) and self.answered)
            if self.left_out:
                return
            if isinstance(error, Wrong):
                self.left_out = str(error)
            elif self.unanswered >= GIVE_UP:
                self.left_out = f"{GIVE_UP} rows in a row got no answer, the last one: {_reason(error)}"
        if isinstance(error, Silent) and not self.left_out:
            try:
                self._ask("/models")
            except (Silent, Wrong):  # it is not there
                self.left_out = str(error)

    def _ask(self, path: str) -> list[Any]:
        """A list that the server gives; empty if it has none of it. Raises Silent, or Wrong for a wrong key."""
        url = self.client.url.partition("?")[0].removesuffix("/completions") + path
        try:
            answer = self.client.get(url, min(PROBE_SECONDS, self.limits.seconds))
        except (Refused, Silent, Wrong) as error:
            status = getattr(error, "status", 400)
            if status is None or status in AWAY:
                raise
            return []
        data = answer.get("data") if isinstance(answer, dict) else None
        return data if isinstance(data, list) else []

    def _fields(self) -> set[str]:
        """The keys that the server's openapi.json lists for our request; empty if it does not say."""
        parts = urlsplit(self.client.url)
        for root in ("", parts.path.removesuffix("/completions").removesuffix("/v1")):
            try:
                url = urlunsplit((*parts[:2], f"{root}/openapi.json", "", ""))
                schemas = self.client.get(url, min(PROBE_SECONDS, self.limits.seconds))
                content = schemas["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
                name = str(content["application/json"]["schema"].get("$ref", "")).rpartition("/")[2]
                return set(schemas["components"]["schemas"][name]["properties"])
            except (Silent, Refused, Wrong, LookupError, TypeError, AttributeError):
                continue
        return set()


class Pool:
    """Servers that share rows. say: how a line reaches people."""

    def __init__(self, servers: Sequence[Server], say: Callable[[str], None]):
        self.servers, self.say = list(servers), say
        self._rows: SimpleQueue[tuple[Asked, int]] = SimpleQueue()  # with the turns that each has had
        self._outcomes: SimpleQueue[RowOutcome | Server] = SimpleQueue()
        self._over = threading.Event()

    def open(self) -> None:
        """Look at all servers. Raises InputError if none of them will do."""
        threads = [threading.Thread(target=server.open, daemon=True) for server in self.servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for server in self.servers:
            if server.left_out:
                self.say(f"{server.client.address} is left out: {server.left_out}")
        self._check_alive()

    def ask(self, rows: Sequence[Asked], read: Callable[[Any, Asked], Any]) -> Iterator[RowOutcome]:
        """An outcome per row, as they come. Raises InputError once no server is left; closing it ends the threads."""
        for row in rows:
            self._rows.put((row, 0))
        alive = [server for server in self.servers if not server.left_out]
        for server in alive:
            for _ in range(min(server.limits.concurrency, len(rows))):
                threading.Thread(target=self._work, args=(server, read), daemon=True).start()
        missing = len(rows)
        try:
            while missing:
                outcome = self._outcomes.get()
                if isinstance(outcome, RowOutcome):
                    missing -= 1
                    yield outcome
                    continue
                if outcome in alive:
                    alive.remove(outcome)
                    self.say(f"{outcome.client.address} is left out: {outcome.left_out}")
                self._check_alive()
        finally:
            self._over.set()

    def _check_alive(self) -> None:
        if all(server.left_out for server in self.servers):
            reasons = "; ".join(f"{server.client.address}: {server.left_out}" for server in self.servers)
            raise InputError(f"no endpoint is left ({reasons}); what has come is kept: run again when one answers")

    def _work(self, server: Server, read: Callable[[Any, Asked], Any]) -> None:
        """One thread of a server: rows until the pool closes, or the server is left out."""
        while not server.left_out and not self._over.is_set():
            try:
                request, turns = self._rows.get(timeout=0.2)
            except Empty:
                continue
            outcome = RowOutcome(request, server.client.address)
            error: Exception | None = None
            try:
                outcome.answer = server.reply(request, read)
            except Exception as fault:  # whatever it is, it is this row's
                error = fault
            if isinstance(error, InputError) and not isinstance(error, Wrong):  # no server will do
                outcome.reason = str(error)
                self._outcomes.put(outcome)
                continue
            server.judge(error)
            if error is not None and (server.left_out or turns + 1 < TURNS):
                self._rows.put((request, turns + (not server.left_out)))
                continue
            outcome.reason = _reason(error) if error else ""
            self._outcomes.put(outcome)
        if server.left_out:
            self._outcomes.put(server)


def _reason(error: Exception) -> str:
    """What is wrong, with the server's own words."""
    if isinstance(error, Refused) and error.explanation:
        return f"{error} ({error.explanation})"
    ours = isinstance(error, Silent | Refused | Unbelievable | InputError)
    return str(error) if ours else f"{type(error).__name__}: {error}"

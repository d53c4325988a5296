"""Shards of responses from endpoints: rows that are kept already, rows that need no question, and all others, asked at once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from data_gen.remote.requests import TOKENIZER, Answer, Asked, NotRoundTrip, Reader, Requests, Unbelievable
from data_gen.shards import KEPT_FOLDER, Kept, keep, read_kept, read_whole, row_of, shard_name, write_shard
from toolkit.config import plain
from toolkit.decoding.decode import prompt_ids
from toolkit.errors import InputError
from toolkit.models.pair import ModelPair
from toolkit.models.prompts import Prompt
from toolkit.runs.endpoint import Client, Refused, Silent, Wrong, address, key_of, retrying
from toolkit.runs.stage import Stage
from toolkit.runs.token_bar import TokenBar
from toolkit.sampling import Sampling

NO_ROUND_TRIP = "does not round-trip: "
SEEDS = "the engine's own random numbers, asked for with a seed per row: they are not those of decoding here"
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
    if isinstance(error, Refused) and error.explanation:
        return f"{error} ({error.explanation})"
    ours = isinstance(error, Silent | Refused | Unbelievable | InputError)
    return str(error) if ours else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Work:
    """What rows depend on, and the folder that they are written into."""

    pair: ModelPair
    prompts: Sequence[Prompt]
    sampling: Sampling
    folder: Path
    job: str
    max_prompt_tokens: int | None


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """What names the folder: of a run by endpoints the model asked for and its further keys, not where it is asked."""
    if not config["endpoints"]:
        return dict(config)
    if config["served"]["model"] is None:
        raise InputError("served.model: expected what the endpoints call the target, got null")
    return {**config, "served_as": {name: config["served"][name] for name in ("model", "request")}}


def ask_endpoints(
    work: Work, shards: Mapping[int, range], endpoints: Sequence[str], served: Any, progress: TokenBar
) -> None:
    """Write these shards. Raises InputError once no endpoint is left; the rows that have come are kept."""
    limits = EndpointLimits(
        served.concurrency, served.requests_per_minute, served.seconds, served.attempts, served.backoff
    )
    requests = Requests(served.engine, served.model, work.pair, work.sampling, plain(served.request))
    key = key_of(served.key_variable, "served.key_variable")
    pool = Pool([Server.at(url, key, requests, limits) for url in endpoints], progress.say)
    reader = Reader(work.pair, work.sampling, served.model, requests.engine.shows_stops)
    rows = {number: read_kept(work.folder, number, work.job) for number in shards}
    home = {row: number for number, numbers in shards.items() for row in numbers}
    questions = []
    for row, number in home.items():
        if row in rows[number]:
            continue
        ids = encoded(work, row)
        try:
            ids = ids if isinstance(ids, dict) else prompt_ids(work.pair, ids, row, work.sampling)
        except InputError as error:
            ids = row_of(work.prompts[row], row, "failed", finish_reason="error", error=str(error))
        if isinstance(ids, dict):
            rows[number][row] = {"row": ids, "how": {}}
        else:
            questions.append(Asked(row, ids, work.sampling.room(len(ids))))
    progress.skip(sum(map(len, rows.values())))
    if questions:
        pool.open()
    for number, numbers in shards.items():
        _write_if_whole(work, number, numbers, rows[number], pool)
    for outcome in pool.ask(questions, lambda completion, request: _read(reader, completion, request)):
        number = home[outcome.request.row]
        entry = _row(work, outcome)
        keep(work.folder, number, work.job, entry)
        rows[number][outcome.request.row] = entry
        progress.count(len(entry["row"]["token_ids"]))
        _write_if_whole(work, number, shards[number], rows[number], pool)


def facts_of(stage: Stage, job: str, num_shards: int) -> dict[str, Any]:
    """Facts for the manifest: how the endpoints answered, over all shards. Deletes what was kept on the way."""
    headers = [read_whole(stage.folder / shard_name(number), job)[0] for number in range(num_shards)]
    totals: dict[str, Counter[str]] = {}
    for header in headers:
        for name, counts in header.get("served", {}).items():
            totals.setdefault(name, Counter()).update(counts)
    stage.remove(KEPT_FOLDER)
    if not any("served" in header for header in headers):
        return {}
    fields = {address: remark for header in headers for address, remark in header.get("fields", {}).items()}
    return {"served": {"seeds": SEEDS, "fields": fields, **{name: dict(counts) for name, counts in totals.items()}}}


def encoded(work: Work, number: int) -> list[int] | dict[str, Any]:
    """The ids of a prompt; or its row, where there are none or too many."""
    prompt, longest = work.prompts[number], work.max_prompt_tokens
    try:
        ids: list[int] = work.pair.encode(prompt.content)
    except InputError as error:
        return row_of(prompt, number, "failed", finish_reason="error", error=str(error))
    if longest is not None and len(ids) > longest:
        reason = f"{len(ids)} tokens, more than max_prompt_tokens={longest}"
        return row_of(prompt, number, "skipped", prompt_ids=ids, error=reason)
    return ids


def _read(reader: Reader, completion: Any, request: Asked) -> Answer | NotRoundTrip:
    with TOKENIZER:
        try:
            return reader.read(completion, request)
        except NotRoundTrip as error:
            return error


def _row(work: Work, outcome: RowOutcome) -> dict[str, Any]:
    prompt, row, answer = work.prompts[outcome.request.row], outcome.request.row, outcome.answer
    ids = outcome.request.prompt_ids
    if isinstance(answer, Answer):
        facts = {"token_ids": answer.token_ids, "finish_reason": answer.finish_reason, "text": answer.text}
        how = {"ids": answer.ids, "by": answer.by or "no name given", "endpoint": outcome.address}
        return {"row": row_of(prompt, row, "done", prompt_ids=ids, **facts), "how": how}
    if isinstance(answer, NotRoundTrip):
        record = row_of(prompt, row, "skipped", prompt_ids=ids, error=f"{NO_ROUND_TRIP}{answer}")
        return {"row": record, "how": {"ids": "does not round-trip", "endpoint": outcome.address}}
    record = row_of(prompt, row, "failed", prompt_ids=ids, finish_reason="error", error=outcome.reason)
    return {"row": record, "how": {"ids": "failed", "endpoint": outcome.address}}


def _write_if_whole(work: Work, number: int, numbers: range, rows: Kept, pool: Pool) -> None:
    if len(rows) < len(numbers) or (work.folder / shard_name(number)).exists():
        return
    hows = [rows[row]["how"] for row in numbers]
    names = ("ids", "by", "endpoint")
    counts = {name: dict(Counter(how[name] for how in hows if name in how)) for name in names}
    fields = {server.client.address: _fields(server) for server in pool.servers if not server.left_out}
    write_shard(work.folder, number, work.job, [rows[row]["row"] for row in numbers], served=counts, fields=fields)


def _fields(server: Server) -> str:
    if not server.checked:
        return "not listed by the server: one that it does not know may have been ignored"
    neutral = f", {', '.join(server.unknown)} left out (neutral)" if server.unknown else ""
    return f"as its openapi.json lists them{neutral}"

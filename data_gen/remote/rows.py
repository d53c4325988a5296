"""Shards of responses from endpoints: rows that are kept already, rows that need no question, and all others, asked at once.

Every endpoint has `concurrency` threads that take rows from one queue. A row is tried `attempts` times in succession; each wait
is twice the one before, or as long as the server asks for; all threads of the endpoint wait then. After a second turn a row
has failed. An endpoint is left out if it does not answer a plain question either, if its key or address is wrong, or after
GIVE_UP successive rows without an answer. Its rows go to the others.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from data_gen.remote.requests import TOKENIZER, Answer, Asked, NotRoundTrip, Reader, Requests, Unbelievable
from data_gen.shards import KEPT_FOLDER, keep, read_kept, read_whole, row_of, shard_name, write_shard
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
class Work:
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
    requests = Requests(served.engine, served.model, work.pair, work.sampling, plain(served.request))
    key = key_of(served.key_variable, "served.key_variable")
    hint = "; name the key's variable: served.key_variable=NAME"
    urls = [address(url, "/completions", "endpoints", hint) for url in endpoints]
    servers = [Server(Client(url, key, served.seconds, "the endpoint", MEND), requests, served) for url in urls]
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

    def write_if_whole(number: int) -> None:
        if len(rows[number]) < len(shards[number]) or (work.folder / shard_name(number)).exists():
            return
        entries = [rows[number][row] for row in shards[number]]
        names = ("ids", "by", "endpoint")
        counts = {name: dict(Counter(e["how"][name] for e in entries if name in e["how"])) for name in names}
        fields = {server.client.address: server.fields() for server in servers if not server.left_out}
        write_shard(work.folder, number, work.job, [e["row"] for e in entries], served=counts, fields=fields)

    def read(completion: Any, request: Asked) -> Answer | NotRoundTrip:
        """An answer that is settled: its tokens are known, or cannot be."""
        with TOKENIZER:
            try:
                return reader.read(completion, request)
            except NotRoundTrip as error:
                return error

    if questions:
        with ThreadPoolExecutor(len(servers)) as threads:
            list(threads.map(Server.open, servers))
        for server in servers:
            if server.left_out:
                progress.say(f"{server.client.address} is left out: {server.left_out}")
        _check_alive(servers)
    for number in shards:
        write_if_whole(number)
    for request, answer, endpoint in _answers(servers, questions, read, progress.say):
        number, entry = home[request.row], _entry(work, request, answer, endpoint)
        keep(work.folder, number, work.job, entry)
        rows[number][request.row] = entry
        progress.count(len(entry["row"]["token_ids"]))
        write_if_whole(number)


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


def _entry(work: Work, request: Asked, answer: Answer | NotRoundTrip | str, endpoint: str) -> dict[str, Any]:
    """The row of an answer, or of the reason why there is none; and how it came."""
    status, how = "done", {"ids": "failed", "endpoint": endpoint}
    if isinstance(answer, Answer):
        facts = {"token_ids": answer.token_ids, "finish_reason": answer.finish_reason, "text": answer.text}
        how |= {"ids": answer.ids, "by": answer.by or "no name given"}
    elif isinstance(answer, NotRoundTrip):
        status, facts, how["ids"] = "skipped", {"error": f"{NO_ROUND_TRIP}{answer}"}, "does not round-trip"
    else:
        status, facts = "failed", {"finish_reason": "error", "error": answer}
    row = row_of(work.prompts[request.row], request.row, status, prompt_ids=request.prompt_ids, **facts)
    return {"row": row, "how": how}


@dataclass(eq=False)
class Server:
    """One endpoint at work. unknown: keys that it does not know, left out; checked: it says which ones it knows."""

    client: Client
    requests: Requests
    limits: Any  # `served` of the config: concurrency, requests_per_minute, seconds, attempts, backoff
    unknown: list[str] = field(default_factory=list)
    checked: bool = False
    left_out: str = ""
    answered: int = 0
    unanswered: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    free_at: float = 0.0  # when the next request may begin

    def open(self) -> None:
        """Is it there, does it have the model, which keys does it know? A fault is noted in `left_out`."""
        try:
            models, fields = self._models(), self._known_fields()
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

        def once() -> Any:
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

        return retrying(self.limits.attempts, self.limits.backoff, lambda: bool(self.left_out))(once)

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
                self._models()
            except (Silent, Wrong):  # it is not there
                self.left_out = str(error)

    def fields(self) -> str:
        if not self.checked:
            return "not listed by the server: one that it does not know may have been ignored"
        neutral = f", {', '.join(self.unknown)} left out (neutral)" if self.unknown else ""
        return f"as its openapi.json lists them{neutral}"

    def _get(self, url: str) -> Any:
        return self.client.get(url, min(PROBE_SECONDS, self.limits.seconds))

    def _models(self) -> list[Any]:
        """The models that it lists, if it does. Raises Silent, or Wrong for a wrong key."""
        try:
            answer = self._get(self.client.url.partition("?")[0].removesuffix("/completions") + "/models")
        except (Refused, Silent, Wrong) as error:
            status = getattr(error, "status", 400)
            if status is None or status in AWAY:
                raise
            return []
        data = answer.get("data") if isinstance(answer, dict) else None
        return data if isinstance(data, list) else []

    def _known_fields(self) -> set[str]:
        """The keys that the server's openapi.json lists for our request; empty if it does not say."""
        parts = urlsplit(self.client.url)
        for root in ("", parts.path.removesuffix("/completions").removesuffix("/v1")):
            try:
                schemas = self._get(urlunsplit((*parts[:2], f"{root}/openapi.json", "", "")))
                content = schemas["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
                name = str(content["application/json"]["schema"].get("$ref", "")).rpartition("/")[2]
                return set(schemas["components"]["schemas"][name]["properties"])
            except (Silent, Refused, Wrong, LookupError, TypeError, AttributeError):
                continue
        return set()


def _answers(
    servers: Sequence[Server], questions: Sequence[Asked], read: Callable[[Any, Asked], Any], say: Callable[[str], None]
) -> Iterator[tuple[Asked, Any, str]]:
    """Every question with what `read` makes of its answer, or a reason, and the endpoint's address; as they come.

    Raises InputError once no server is left; closing it ends the threads.
    """
    rows: SimpleQueue[tuple[Asked, int]] = SimpleQueue()  # with the turns that each has had
    outcomes: SimpleQueue[tuple[Asked, Any, str] | Server] = SimpleQueue()
    over = threading.Event()

    def serve(server: Server) -> None:
        """One thread of a server: rows until all is over, or the server is left out."""
        while not server.left_out and not over.is_set():
            try:
                request, turns = rows.get(timeout=0.2)
            except Empty:
                continue
            answer, error = None, None
            try:
                answer = server.reply(request, read)
            except Exception as fault:  # whatever it is, it is this row's
                error = fault
            if not isinstance(error, InputError) or isinstance(error, Wrong):  # else no server will do
                server.judge(error)
                if error is not None and (server.left_out or turns + 1 < TURNS):
                    rows.put((request, turns + (not server.left_out)))
                    continue
            outcomes.put((request, answer if error is None else _reason(error), server.client.address))
        if server.left_out:
            outcomes.put(server)

    for question in questions:
        rows.put((question, 0))
    alive = [server for server in servers if not server.left_out]
    for server in alive:
        for _ in range(min(server.limits.concurrency, len(questions))):
            threading.Thread(target=serve, args=(server,), daemon=True).start()
    missing = len(questions)
    try:
        while missing:
            outcome = outcomes.get()
            if not isinstance(outcome, Server):
                missing -= 1
                yield outcome
                continue
            if outcome in alive:
                alive.remove(outcome)
                say(f"{outcome.client.address} is left out: {outcome.left_out}")
            _check_alive(servers)
    finally:
        over.set()


def _check_alive(servers: Sequence[Server]) -> None:
    if all(server.left_out for server in servers):
        reasons = "; ".join(f"{server.client.address}: {server.left_out}" for server in servers)
        raise InputError(f"no endpoint is left ({reasons}); what has come is kept: run again when one answers")


def _reason(error: Exception) -> str:
    if isinstance(error, Refused) and error.explanation:
        return f"{error} ({error.explanation})"
    ours = isinstance(error, Silent | Refused | Unbelievable | InputError)
    return str(error) if ours else f"{type(error).__name__}: {error}"

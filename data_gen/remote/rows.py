"""Shards of responses from endpoints: rows that are kept already, rows that need no question, and all others, asked at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_gen.remote.answers import Answer, NotRoundTrip, Reader
from data_gen.remote.pool import EndpointLimits, Pool, RowOutcome, Server
from data_gen.remote.requests import TOKENIZER, Asked, Requests
from data_gen.shards import KEPT_FOLDER, Kept, keep, read_kept, read_whole, row_of, shard_name, write_shard
from toolkit.config import plain
from toolkit.decoding.decode import prompt_ids
from toolkit.errors import InputError
from toolkit.models.pair import ModelPair
from toolkit.models.prompts import Prompt
from toolkit.runs.endpoint import key_of
from toolkit.runs.stage import Stage
from toolkit.runs.token_bar import TokenBar
from toolkit.sampling import Sampling

NO_ROUND_TRIP = "does not round-trip: "
SEEDS = "the engine's own random numbers, asked for with a seed per row: they are not those of decoding here"


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
    """An answer that is settled: its tokens are known, or cannot be."""
    with TOKENIZER:
        try:
            return reader.read(completion, request)
        except NotRoundTrip as error:
            return error


def _row(work: Work, outcome: RowOutcome) -> dict[str, Any]:
    """The row of an outcome, and how it came."""
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
    """What is known of the keys that a server reads."""
    if not server.checked:
        return "not listed by the server: one that it does not know may have been ignored"
    neutral = f", {', '.join(server.unknown)} left out (neutral)" if server.unknown else ""
    return f"as its openapi.json lists them{neutral}"

"""python -m data_gen.responses: what the target answers to every prompt.

Output: shards of `shard_size` prompts (`data_gen.shards`), and the manifest. A response depends on (sampling.seed, row) alone.
Rows that have ended are kept as they come: run the command again, and it goes on with the rows that are missing.

With `endpoints=[URL,...]` vLLM, SGLang or their like are asked over HTTP (`data_gen.completions`). The seeds are the engine's
own then. The addresses do not name the folder, and may differ from run to run.

Accounting: done + failed + skipped = input. Failed rows hold an error, skipped ones were left out on purpose.
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("responses", "importing torch and transformers")

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from data_gen import keys
from data_gen.completions import CompletionRequest, Completions, answers, reason_of
from data_gen.shards import KEPT_FOLDER, keep, read_kept, read_shard, read_whole, row_of, shard_name, write_shard
from toolkit import config
from toolkit.config import instantiate, plain
from toolkit.decoding import decode
from toolkit.decoding.decode import prompt_ids
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.models.chat import hint_of_template
from toolkit.models.fingerprint import Weights
from toolkit.models.generation_config import resolved
from toolkit.models.pair import ModelPair, fingerprint
from toolkit.models.prompts import Prompt, without_grammar
from toolkit.models.remote import remote_pair
from toolkit.runs.sharding import RANKS, all_there, joining, part_of, share
from toolkit.runs.stage import MANIFEST, Stage, check_some_done, finished_stage, open_stage, prompt_files, read_manifest
from toolkit.runs.token_bar import TokenBar
from toolkit.sampling import Sampling
from toolkit.types import Generation

IGNORED = (*RANKS, "endpoints", "served")
SEEDS = {
    True: "the engine's own random numbers, asked for with a seed per row: they are not those of decoding here",
    False: "the engine's own random numbers, without a seed (served.request.seed=null): another run draws other ones",
}
TURNS = 2  # of a row, among the endpoints


def run(cfg: keys.Responses) -> Path:
    part, settings = part_of(cfg), plain(cfg)
    if cfg.endpoints:  # the model and further keys name the folder, not where it is asked
        if cfg.served.model is None:
            raise InputError("served.model: expected what the endpoints call the target, got null")
        if cfg.sampling.grammar is not None:
            raise InputError("sampling.grammar: expected null beside endpoints, which are asked for no grammar")
        settings["served_as"] = {name: settings["served"][name] for name in ("model", "request")}
    finished = finished_stage("responses", settings, inputs=prompt_files(cfg), ignore=IGNORED)
    if finished is not None:
        return _finished_before(finished)
    print("responses: reading the prompts", file=sys.stderr)
    prompts = instantiate(cfg.prompts).load()
    stage = open_stage("responses", settings, inputs=prompt_files(cfg), ignore=IGNORED, shared=part)
    if stage.finished:
        return _finished_before(stage)
    print(f"responses: {len(prompts):,} prompts; loading the pair", file=sys.stderr)
    pair = remote_pair(plain(cfg.pair)) if cfg.endpoints else instantiate(cfg.pair)
    if hint := hint_of_template(pair.tokenizer, [prompt.content for prompt in prompts]):
        print(hint, file=sys.stderr)
    sampling = resolved(instantiate(cfg.sampling), pair.target)
    weights = None if cfg.endpoints else fingerprint(pair.target)
    job = content_hash([stage.identity, weights, [(prompt.id, prompt.content) for prompt in prompts]])
    firsts = range(0, len(prompts), cfg.shard_size)
    shards = [range(first, min(first + cfg.shard_size, len(prompts))) for first in firsts]
    own_shards = share(range(len(shards)), cfg)
    paths = [stage.folder / shard_name(number) for number in range(len(shards))]
    missing = [number for number in own_shards if not (paths[number].exists() and read_shard(paths[number], job))]
    with TokenBar("responses", sum(len(shards[number]) for number in own_shards), sampling.max_new_tokens) as progress:
        progress.skip(sum(len(shards[number]) for number in own_shards if number not in missing))
        make = _ask if cfg.endpoints else _decode
        make(
            cfg,
            pair,
            sampling,
            Rows(prompts, stage.folder, job, {number: shards[number] for number in missing}, progress),
        )
    if all_there(stage, paths, cfg):
        with joining(stage) as last:
            if last:
                if cfg.endpoints:
                    about_target: dict[str, Any] = {"served": {"seeds": SEEDS["seed" not in cfg.served.request]}}
                else:
                    about_target = Weights.of(pair.target).facts("target")
                _finish(stage, prompts, job, len(shards), {"sampling": asdict(sampling), **about_target})
    return stage.folder


class Rows:
    """The rows of shards that are not whole: kept as they end, and written once their shard is whole."""

    def __init__(
        self, prompts: Sequence[Prompt], folder: Path, job: str, shards: Mapping[int, range], progress: TokenBar
    ):
        self.prompts, self.folder, self.job, self.shards, self.progress = prompts, folder, job, shards, progress
        self.kept = {number: read_kept(folder, number, job) for number in shards}
        self.facts: Callable[[list[dict[str, Any]]], dict[str, Any]] = lambda entries: {}  # for the header of a shard

    def missing(self, shard: int, pair: ModelPair, longest: int | None) -> dict[int, list[int]]:
        """Prompt ids of the rows that are to be made; those without ids, or with too many, end here."""
        ids: dict[int, list[int]] = {}
        for number in self.shards[shard]:
            if number in self.kept[shard]:
                continue
            try:
                ids[number] = pair.encode(without_grammar(self.prompts[number].content)[0])
            except InputError as error:
                self.end(shard, number, "failed", finish_reason="error", error=str(error))
                continue
            if longest is not None and len(ids[number]) > longest:
                reason = f"{len(ids[number])} tokens, more than max_prompt_tokens={longest}"
                self.end(shard, number, "skipped", prompt_ids=ids.pop(number), error=reason)
        self.progress.skip(len(self.shards[shard]) - len(ids))
        return ids

    def end(self, shard: int, number: int, status: str, how: Mapping[str, str] | None = None, **facts: Any) -> None:
        """A row has ended; with `how` it came, it is kept on disk."""
        entry = {"row": row_of(self.prompts[number], number, status, **facts), "how": dict(how or {})}
        if how is not None:
            keep(self.folder, shard, self.job, entry)
        self.kept[shard][number] = entry

    def write(self, shard: int) -> None:
        """Write a shard if it is whole now."""
        if len(self.kept[shard]) == len(self.shards[shard]):
            entries = [self.kept[shard][number] for number in self.shards[shard]]
            write_shard(self.folder, shard, self.job, [entry["row"] for entry in entries], **self.facts(entries))


def _finished_before(stage: Stage) -> Path:
    """Say what there is. Raises InputError if every row failed."""
    rows = stage.manifest["rows"]
    print(f"responses: {_sentence(rows)}, finished before")
    check_some_done(rows["failed"], rows["input"], stage.manifest.get("first_error"), stage.folder)
    return stage.folder


def read_rows(folder: Path | str, statuses: tuple[str, ...] = ("done",)) -> Iterator[dict[str, Any]]:
    """Rows of a finished responses folder, in the prompts' order (`data_gen.shards.row_of`). Raises InputError for others."""
    folder = Path(folder)
    if not (folder / MANIFEST).exists():
        raise InputError(f"expected a responses folder at {folder} (with a {MANIFEST}), found none")
    manifest = read_manifest(folder)
    if manifest.get("stage") != "responses":
        raise InputError(f"expected a responses folder at {folder}, got one of stage {manifest.get('stage')!r}")
    if manifest.get("status") != "finished":
        raise InputError(f"the responses in {folder} are not finished: run data_gen.responses again first")
    for number in tqdm(range(manifest["num_shards"]), "reading responses", unit="shard", delay=1, leave=False):
        for row in read_shard(folder / shard_name(number), manifest["job"]):
            if row["status"] in statuses:
                yield row


def _decode(cfg: keys.Responses, pair: ModelPair, sampling: Sampling, rows: Rows) -> None:
    """Make the rows here, those of a shard together."""
    for shard in rows.shards:
        missing = rows.missing(shard, pair, cfg.max_prompt_tokens)

        def ended(generation: Generation, shard: int = shard) -> None:
            names = ("prompt_ids", "token_ids", "finish_reason", "text", "error")
            facts = {name: getattr(generation, name) for name in names}
            rows.end(shard, generation.index, "failed" if generation.error else "done", {}, **facts)
            rows.progress.row()

        grammars = [rows.prompts[number].grammar for number in missing]
        prompts: list[Any] = [
            ids if grammar is None else {"prompt": ids, "grammar": grammar}
            for ids, grammar in zip(missing.values(), grammars, strict=True)
        ]
        decode(
            pair, prompts, config.method("autoregressive"), sampling, batch_size=cfg.batch_size,
            row_ids=[*missing], on_finish=ended, on_round=rows.progress.tokens,
        )  # fmt: skip
        rows.write(shard)


def _ask(cfg: keys.Responses, pair: ModelPair, sampling: Sampling, rows: Rows) -> None:
    """Let endpoints make the rows, those of all shards at once. Raises InputError once no endpoint is left."""
    endpoints = [Completions(url, cfg.served, pair, sampling) for url in cfg.endpoints]
    shard_of, requests = {}, []
    for shard in rows.shards:
        missing = rows.missing(shard, pair, cfg.max_prompt_tokens)
        for number, ids in missing.items():
            shard_of[number] = shard
            try:
                if rows.prompts[number].grammar is not None:
                    raise InputError("grammar: expected none beside endpoints, which are asked for no grammar")
                ids = prompt_ids(pair, ids, number, sampling)
                requests.append(CompletionRequest(number, ids, sampling.room(len(ids))))
            except InputError as error:
                rows.end(shard, number, "failed", finish_reason="error", error=str(error))
                rows.progress.skip(1)

    def facts(entries: list[dict[str, Any]]) -> dict[str, Any]:
        values = lambda name: (entry["how"][name] for entry in entries if name in entry["how"])
        counts = {name: dict(Counter(values(name))) for name in ("ids", "by", "endpoint")}
        about_keys = {endpoint.address: endpoint.about_keys for endpoint in endpoints if not endpoint.left_out}
        return {"served": counts, "fields": about_keys}

    rows.facts = facts
    if requests:
        with ThreadPoolExecutor(len(endpoints)) as threads:
            list(threads.map(Completions.open, endpoints))
    for shard in rows.shards:
        rows.write(shard)
    hint = "what has come is kept: run again when one answers"
    pool = answers(endpoints, requests, Completions.complete, TURNS, rows.progress.say, hint)
    for request, outcome, endpoint in pool:
        shard, status, how = shard_of[request.row], "done", {"ids": "failed", "endpoint": endpoint.address}
        if isinstance(outcome, Exception):
            status, outcome_facts = "failed", {"finish_reason": "error", "error": reason_of(outcome)}
        elif outcome.error:
            status, outcome_facts = "skipped", {"error": f"{outcome.ids}: {outcome.error}"}
            how["ids"] = outcome.ids
        else:
            outcome_facts = {name: getattr(outcome, name) for name in ("token_ids", "finish_reason", "text")}
            how |= {"ids": outcome.ids, "by": outcome.by or "no name given"}
        rows.end(shard, request.row, status, how, prompt_ids=request.prompt_ids, **outcome_facts)
        rows.progress.count(len(outcome_facts.get("token_ids", ())))
        rows.write(shard)


def _finish(stage: Stage, prompts: list[Prompt], job: str, num_shards: int, facts: dict[str, Any]) -> None:
    shards = [read_whole(stage.folder / shard_name(number), job) for number in range(num_shards)]
    rows = [row for _, part in shards for row in part]
    if [row["row"] for row in rows] != list(range(len(prompts))):
        raise InputError(f"{stage.folder}: expected rows 0 to {len(prompts) - 1} once each, got {len(rows)} rows")
    statuses = Counter(row["status"] for row in rows)
    counts = {"input": len(prompts), **{status: statuses[status] for status in ("done", "failed", "skipped")}}
    truncated = sum(row["finish_reason"] == "length" for row in rows)
    tokens = sum(len(row["token_ids"]) for row in rows)
    sums = {"num_shards": num_shards, "num_tokens": tokens, "num_truncated": truncated}
    failed = [row["error"] for row in rows if row["status"] == "failed"]
    first, fields, totals = failed[0] if failed else None, dict[str, str](), dict[str, Counter[str]]()
    for header, _ in shards:  # how endpoints answered
        fields |= header.get("fields", {})
        for name, numbers in header.get("served", {}).items():
            totals.setdefault(name, Counter()).update(numbers)
    if totals:
        facts["served"] |= {"fields": fields, **{name: dict(total) for name, total in totals.items()}}
    stage.remove(KEPT_FOLDER)
    stage.finish(first_error=first, rows=counts, job=job, **sums, **facts)
    print(f"responses: {_sentence(counts)}; {tokens} tokens, {truncated} cut at max_new_tokens")
    for reason in failed[:3]:
        print(f"  failed: {reason}")
    check_some_done(len(failed), len(prompts), first, stage.folder)


def _sentence(rows: dict[str, int]) -> str:
    return f"{rows['done']} done + {rows['failed']} failed + {rows['skipped']} skipped = {rows['input']} prompts"

"""python -m data_gen.responses: what the target answers to every prompt.

Output: shards of `shard_size` prompts (`data_gen.shards`), and the manifest. A response depends on (sampling.seed, row) alone.
Rows that have ended are kept as they come: run the command again, and it goes on with the rows that are missing.

With `endpoints=[URL,...]` the target is asked over HTTP, where vLLM, SGLang or their like serve it (`data_gen.remote`). The
seeds are the engine's own then. The addresses do not name the folder, and may differ from run to run.

Accounting: done + failed + skipped = input. Failed rows hold an error, skipped ones were left out on purpose.
"""

from __future__ import annotations

if __name__ == "__main__":  # help and faults, before anything heavy is imported
    import sys

    from toolkit.config.command_line import check_command_line

    check_command_line("responses")
    print("responses: importing torch and transformers", file=sys.stderr, flush=True)

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from data_gen.remote.rows import Work, ask_endpoints, encoded, facts_of, identity
from data_gen.shards import keep, read_kept, read_shard, row_of, shard_name, write_shard
from toolkit import config
from toolkit.config import commands, instantiate, plain
from toolkit.decoding import decode
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.models.fingerprint import Weights
from toolkit.models.generation_config import resolved
from toolkit.models.pair import fingerprint
from toolkit.models.prompts import Prompt
from toolkit.models.remote import served_pair
from toolkit.runs.sharding import RANKS, all_there, joining, part_of, share
from toolkit.runs.stage import (
    MANIFEST,
    Stage,
    check_some_done,
    command,
    finished_stage,
    open_stage,
    prompt_files,
    read_manifest,
)  # fmt: skip
from toolkit.runs.token_bar import TokenBar
from toolkit.types import Generation

IGNORED = (*RANKS, "endpoints", "served")


def run(cfg: commands.Responses) -> Path:
    part = part_of(cfg)
    settings = identity(plain(cfg))
    finished = finished_stage("responses", settings, inputs=prompt_files(cfg), ignore=IGNORED)
    if finished is not None:
        return _finished_before(finished)
    print("responses: reading the prompts", file=sys.stderr)
    prompts = instantiate(cfg.prompts).load()
    stage = open_stage("responses", settings, inputs=prompt_files(cfg), ignore=IGNORED, shared=part)
    if stage.finished:
        return _finished_before(stage)
    print(f"responses: {len(prompts):,} prompts; loading the pair", file=sys.stderr)
    pair = served_pair(plain(cfg.pair)) if cfg.endpoints else instantiate(cfg.pair)
    sampling = resolved(instantiate(cfg.sampling), pair.target)
    weights = None if cfg.endpoints else fingerprint(pair.target)
    job = content_hash([stage.identity, weights, [(prompt.id, prompt.content) for prompt in prompts]])
    firsts = range(0, len(prompts), cfg.shard_size)
    shards = [range(first, min(first + cfg.shard_size, len(prompts))) for first in firsts]
    mine = share(range(len(shards)), cfg)
    paths = [stage.folder / shard_name(number) for number in range(len(shards))]
    missing = [number for number in mine if not (paths[number].exists() and read_shard(paths[number], job))]
    with TokenBar("responses", sum(len(shards[number]) for number in mine), sampling.max_new_tokens) as progress:
        progress.skip(sum(len(shards[number]) for number in mine if number not in missing))
        if cfg.endpoints and missing:
            work = Work(pair, prompts, sampling, stage.folder, job, cfg.max_prompt_tokens)
            ask_endpoints(work, {number: shards[number] for number in missing}, cfg.endpoints, cfg.served, progress)
        for number in () if cfg.endpoints else missing:
            work = Work(pair, prompts, sampling, stage.folder, job, cfg.max_prompt_tokens)
            write_shard(stage.folder, number, job, _respond(work, number, shards[number], cfg.batch_size, progress))
    if all_there(stage, paths, cfg):
        with joining(stage) as last:
            if last:
                target_facts = {} if cfg.endpoints else Weights.of(pair.target).facts("target")
                _finish(stage, prompts, job, len(shards), {"sampling": asdict(sampling), **target_facts})
    return stage.folder


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


def _respond(work: Work, shard: int, numbers: range, batch_size: int, progress: TokenBar) -> list[dict[str, Any]]:
    """Rows of one shard, sampled together. Those that have ended are kept at once, and are not sampled again."""
    rows = {number: entry["row"] for number, entry in read_kept(work.folder, shard, work.job).items()}
    prompt_ids: dict[int, list[int]] = {}
    for number in numbers:
        if number not in rows:
            ids = encoded(work, number)
            if isinstance(ids, dict):
                rows[number] = ids
            else:
                prompt_ids[number] = ids
    progress.skip(len(rows))
    left = [number for number in numbers if number not in rows]

    def ended(generation: Generation) -> None:
        number = generation.index
        facts = {
            name: getattr(generation, name) for name in ("prompt_ids", "token_ids", "finish_reason", "text", "error")
        }
        rows[number] = row_of(work.prompts[number], number, "failed" if generation.error else "done", **facts)
        keep(work.folder, shard, work.job, {"row": rows[number], "how": {}})
        progress.row()

    options: dict[str, Any] = {
        "batch_size": batch_size,
        "row_ids": left,
        "on_finish": ended,
        "on_round": progress.tokens,
    }
    texts = [prompt_ids[number] for number in left]
    decode(work.pair, texts, config.method("autoregressive"), work.sampling, **options)
    return [rows[number] for number in numbers]


def _finish(stage: Stage, prompts: list[Prompt], job: str, num_shards: int, facts: dict[str, Any]) -> None:
    rows = [row for number in range(num_shards) for row in read_shard(stage.folder / shard_name(number), job)]
    if [row["row"] for row in rows] != list(range(len(prompts))):
        raise InputError(f"{stage.folder}: expected rows 0 to {len(prompts) - 1} once each, got {len(rows)} rows")
    statuses = Counter(row["status"] for row in rows)
    counts = {"input": len(prompts), **{status: statuses[status] for status in ("done", "failed", "skipped")}}
    truncated = sum(row["finish_reason"] == "length" for row in rows)
    tokens = sum(len(row["token_ids"]) for row in rows)
    sums = {"num_shards": num_shards, "num_tokens": tokens, "num_truncated": truncated}
    failed = [row["error"] for row in rows if row["status"] == "failed"]
    first, answered = failed[0] if failed else None, facts_of(stage, job, num_shards)
    stage.finish(first_error=first, rows=counts, job=job, **sums, **facts, **answered)
    print(f"responses: {_sentence(counts)}; {tokens} tokens, {truncated} cut at max_new_tokens")
    for reason in failed[:3]:
        print(f"  failed: {reason}")
    check_some_done(len(failed), len(prompts), first, stage.folder)


def _sentence(rows: dict[str, int]) -> str:
    return f"{rows['done']} done + {rows['failed']} failed + {rows['skipped']} skipped = {rows['input']} prompts"


if __name__ == "__main__":
    command("responses", run)

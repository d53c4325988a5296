"""python -m data_gen.responses: what the target answers to every prompt.

Output: shards `shard-00000.jsonl`, `shard-00001.jsonl`, ... of `shard_size` prompts each, and the manifest. A shard is
written whole. Its header line says which job it belongs to. Then come one line per prompt and a footer with the hash of
all lines before it. Rows have their own random numbers, seeded by (sampling.seed, row). So a response depends neither
on the batch nor on where an interruption fell. Run the command again, and it goes on with the first shard that is
missing.

With `endpoints=[URL,...]` the target is asked over HTTP, where vLLM, SGLang or their like serve it (`data_gen.remote`). The
output is the same, and no weights are loaded here. Rows are kept as they come. The seeds are the engine's own then, so
another run gives other responses. The addresses do not name the folder, and may differ from run to run.

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
from time import perf_counter
from typing import Any

from data_gen.remote.rows import Work, ask_endpoints, facts_of, identity
from data_gen.shards import read_shard, row_of, shard_name, write_shard
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
from toolkit.runs.stage import Stage, check_some_done, command, finished_stage, open_stage, prompt_files
from toolkit.sampling import Sampling
from toolkit.types import Generation

IGNORED = (*RANKS, "endpoints", "served")


def run(cfg: commands.Responses) -> Path:
    """Sample a response of the target to every prompt; returns the output folder."""
    part = part_of(cfg)
    if cfg.shard_size < 1:
        raise InputError(f"shard_size: expected at least 1, got {cfg.shard_size}")
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
    missing = [number for number in mine if not _exists(stage.folder, number, job)]
    with _Progress(sum(len(shards[number]) for number in mine)) as progress:
        progress.skip(sum(len(shards[number]) for number in mine if number not in missing))
        if cfg.endpoints and missing:
            work = Work(pair, prompts, sampling, stage.folder, job, cfg.max_prompt_tokens)
            ask_endpoints(work, {number: shards[number] for number in missing}, cfg.endpoints, cfg.served, progress)
        for number in () if cfg.endpoints else missing:
            rows = _respond(pair, prompts, shards[number], sampling, cfg, progress)
            write_shard(stage.folder, number, job, rows)
    if all_there(stage, [stage.folder / shard_name(number) for number in range(len(shards))], cfg):
        with joining(stage) as last:
            if last:
                about = {} if cfg.endpoints else Weights.of(pair.target).facts("target")
                _finish(stage, prompts, job, len(shards), {"sampling": asdict(sampling), **about})
    return stage.folder


def _finished_before(stage: Stage) -> Path:
    """Say what there is. Raises InputError if every row failed."""
    rows = stage.manifest["rows"]
    print(f"responses: {_sentence(rows)}, finished before")
    check_some_done(rows["failed"], rows["input"], stage.manifest.get("first_error"), stage.folder)
    return stage.folder


def read_rows(folder: Path | str, statuses: tuple[str, ...] = ("done",)) -> Iterator[dict[str, Any]]:
    """Rows of a finished responses folder, in the order of the prompts.

    Each: id, row, status, prompt_ids, token_ids (end of text included), finish_reason, text, answer, error. Raises
    InputError if the folder is not finished, or a shard is missing, cut short, altered or of another job.
    """
    from tqdm.auto import tqdm

    folder = Path(folder)
    stage = _finished_manifest(folder)
    for number in tqdm(range(stage["num_shards"]), "reading responses", unit="shard", delay=1, leave=False):
        for row in read_shard(folder / shard_name(number), stage["job"]):
            if row["status"] in statuses:
                yield row


# -- inside -----------------------------------------------------------------------------------------------------------


def _exists(folder: Path, number: int, job: str) -> bool:
    path = folder / shard_name(number)
    return path.exists() and bool(read_shard(path, job))


def _respond(
    pair: Any, prompts: list[Prompt], numbers: range, sampling: Sampling, cfg: commands.Responses, progress: _Progress
) -> list[dict[str, Any]]:
    """Rows of one shard, sampled together."""
    rows: dict[int, dict[str, Any]] = {}
    encoded: dict[int, list[int]] = {}
    for number in numbers:
        try:
            encoded[number] = pair.encode(prompts[number].content)
        except InputError as error:
            rows[number] = row_of(prompts[number], number, "failed", finish_reason="error", error=str(error))
    longest = cfg.max_prompt_tokens
    for number, ids in encoded.items():
        if longest is not None and len(ids) > longest:
            reason = f"{len(ids)} tokens, more than max_prompt_tokens={longest}"
            rows[number] = row_of(prompts[number], number, "skipped", prompt_ids=ids, error=reason)
    left = [number for number in numbers if number not in rows]
    progress.skip(len(rows))
    generations = decode(
        pair,
        [encoded[number] for number in left],
        config.method("autoregressive"),
        sampling,
        batch_size=cfg.batch_size,
        row_ids=left,
        on_finish=progress.finished,
    )
    for number, generation in zip(left, generations, strict=True):
        rows[number] = row_of(
            prompts[number],
            number,
            "failed" if generation.error else "done",
            prompt_ids=generation.prompt_ids,
            token_ids=generation.token_ids,
            finish_reason=generation.finish_reason,
            text=generation.text,
            error=generation.error,
        )
    return [rows[number] for number in numbers]


def _finish(stage: Stage, prompts: list[Prompt], job: str, num_shards: int, facts: dict[str, Any]) -> None:
    """Count every row of every shard and close the manifest."""
    rows = [row for number in range(num_shards) for row in read_shard(stage.folder / shard_name(number), job)]
    if [row["row"] for row in rows] != list(range(len(prompts))):
        raise InputError(f"{stage.folder}: expected rows 0 to {len(prompts) - 1} once each, got {len(rows)} rows")
    statuses = Counter(row["status"] for row in rows)
    counts = {"input": len(prompts), **{status: statuses[status] for status in ("done", "failed", "skipped")}}
    truncated = sum(row["finish_reason"] == "length" for row in rows)
    tokens = sum(len(row["token_ids"]) for row in rows)
    failed = [row["error"] for row in rows if row["status"] == "failed"]
    stage.finish(
        first_error=failed[0] if failed else None,
        rows=counts,
        job=job,
        num_shards=num_shards,
        num_tokens=tokens,
        num_truncated=truncated,
        **facts,
        **facts_of(stage, job, num_shards),
    )
    print(f"responses: {_sentence(counts)}; {tokens} tokens, {truncated} cut at max_new_tokens")
    for reason in failed[:3]:
        print(f"  failed: {reason}")
    check_some_done(len(failed), len(prompts), failed[0] if failed else None, stage.folder)


def _sentence(rows: dict[str, int]) -> str:
    return f"{rows['done']} done + {rows['failed']} failed + {rows['skipped']} skipped = {rows['input']} prompts"


def _finished_manifest(folder: Path) -> dict[str, Any]:
    from toolkit.runs.stage import MANIFEST, read_manifest

    if not (folder / MANIFEST).exists():
        raise InputError(f"expected a responses folder at {folder} (with a {MANIFEST}), found none")
    manifest = read_manifest(folder)
    if manifest.get("stage") != "responses":
        raise InputError(f"expected a responses folder at {folder}, got one of stage {manifest.get('stage')!r}")
    if manifest.get("status") != "finished":
        raise InputError(f"the responses in {folder} are not finished: run data_gen.responses again first")
    return manifest


class _Progress:
    """A bar over prompts, with tokens per second and time left."""

    def __init__(self, total: int):
        from tqdm.auto import tqdm

        self.bar = tqdm(total=total, desc="responses", unit="prompt")
        self.started, self.tokens = perf_counter(), 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.close()

    def skip(self, count: int) -> None:
        """Prompts that need no work: made before, or left out."""
        self.bar.initial += count  # keeps the estimate of the time left honest
        self.bar.update(count)

    def say(self, line: str) -> None:
        """A line above the bar."""
        self.bar.write(f"responses: {line}", file=sys.stderr)

    def finished(self, generation: Generation) -> None:
        """One more response."""
        self.count(len(generation.token_ids))

    def count(self, num_tokens: int) -> None:
        """One more response of `num_tokens` tokens."""
        self.tokens += num_tokens
        self.bar.set_postfix_str(f"{self.tokens / (perf_counter() - self.started):,.0f} tokens/s", refresh=False)
        self.bar.update()


if __name__ == "__main__":
    command("responses", run)

"""python -m data_gen.traces responses=FOLDER: record traces, from which every stopping policy can be replayed.

Output: `traces-00000-r0.safetensors`, ... (`shard_size` texts each; r0, r1, ...: the same texts with new acceptance draws). Run
the command again after an interruption and it goes on. If a finished recording beside it differs in its heads alone and holds
states (hidden=true), the heads are scored on those, and no model runs.
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("traces")

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

from data_gen import keys
from data_gen.texts import fingerprints, num_tokens, read_sequences, sampling_facts, within_context
from toolkit.acceptance.folder import head_hash
from toolkit.config import instantiate, plain
from toolkit.errors import NOT_NUMBERS, InputError
from toolkit.files.atomic import content_hash, write_json
from toolkit.grammar.text import TextWithGrammar
from toolkit.runs.sharding import RANKS, all_there, joining, part_of, share
from toolkit.runs.stage import MANIFEST, Stage, check_some_done, finished_stage, open_stage, read_manifest
from toolkit.sampling import Sampling
from toolkit.trace.record import Recorder
from toolkit.trace.record_by_start import depth_that_pays, recorder_of
from toolkit.trace.score import named_scorers
from toolkit.trace.store import SAME_PROMPT, SUMMARY, Shard, complete, file_name, read_file

IGNORED = ("dry_run", *RANKS)
PROBE = 4  # texts a dry run records
FREE = ("heads", "hidden")  # keys in which the two recordings may differ


def find_kept(stage: Stage, facts: Mapping[str, Any], states: str) -> tuple[Path, str] | None:
    """Folder and job of the finished recording beside a stage's folder whose states suffice; None if there is none.

    facts: the stage's; states: the draft's number format. If one lacks the states alone, a line says so.
    """
    config, stateless = {key: value for key, value in stage.identity.items() if key not in FREE}, False
    for path in sorted(stage.folder.parent.glob(f"*/{MANIFEST}")):
        try:
            manifest = read_manifest(path.parent)
        except InputError:  # another program's, or damaged: of no use here
            continue
        if path.parent == stage.folder or manifest.get("stage") != stage.name or manifest.get("status") != "finished":
            continue
        theirs = {key: value for key, value in manifest["config"].items() if key not in FREE}
        same_inputs = sorted(manifest.get("inputs", {}).values()) == sorted(stage.inputs.values())
        if not same_inputs or theirs != config or any(manifest.get(k) != v for k, v in facts.items() if k != "heads"):
            continue
        if manifest["config"].get("hidden") and manifest.get("states") == states:
            return path.parent, manifest["job"]
        stateless = True
    if stateless:
        print("traces: the same texts were recorded without states; with hidden=true, further heads need no recording")
    return None


def run(cfg: keys.Traces) -> Path:
    part = part_of(cfg)
    sampling = plain(cfg.sampling) if cfg.sampling is not None else None
    responses = read_sequences(plain(cfg.responses), None if sampling is None else Sampling(**sampling))
    responses = replace(responses, rows=responses.rows[: cfg.limit])
    settings = {**plain(cfg), "sampling": sampling_facts(responses.sampling)}
    finished = None if cfg.dry_run else finished_stage("traces", settings, inputs=responses.inputs, ignore=IGNORED)
    if finished is not None:
        print(f"traces: {finished.manifest['num_texts']} texts, finished before")
        return finished.folder
    pair = instantiate(cfg.pair)
    responses = within_context(pair, responses)
    rows = responses.rows
    facts: dict[str, Any] = {"sampling": sampling_facts(responses.sampling), **fingerprints(pair, responses)}
    folders = ({"own": pair.head} if pair.head else {}) if cfg.heads is None else plain(cfg.heads)
    heads = named_scorers(pair, folders)
    facts["heads"] = {name: head_hash(folder) for name, folder in folders.items()}
    most = cfg.max_drafted
    if most == "auto":
        sequences, _ = _columns(rows)
        most = facts["max_drafted"] = depth_that_pays(pair, sequences, responses.sampling, [cfg.draft_temperature])
        print(f"traces: roll-outs of up to {most} tokens (max_drafted=auto)")
    options = (most, heads, cfg.hidden, cfg.upper_bound, cfg.draft_temperature)
    recorders = [
        recorder_of(pair, responses.sampling, *options, replicate, sound=True) for replicate in range(cfg.replicates)
    ]
    if cfg.dry_run:
        _estimate(recorders[0], rows, cfg.replicates)
        return Path()
    stage = open_stage("traces", settings, inputs=responses.inputs, ignore=IGNORED, shared=part)
    if stage.finished:
        return stage.folder
    job = content_hash([stage.identity, sorted(stage.inputs.values()), facts])
    shards = [rows[first : first + cfg.shard_size] for first in range(0, len(rows), cfg.shard_size)]
    states = str(getattr(pair.draft, "dtype", None))
    kept = find_kept(stage, facts, states)
    if kept is not None:
        print(f"traces: only the heads are scored, on the states in {kept[0]}")
    names = [file_name(number, replicate) for replicate in range(cfg.replicates) for number in range(len(shards))]
    paths = [stage.folder / name for name in names]
    work = [
        Shard(stage.folder / name, job, recorder, *_columns(shard), kept and (kept[0] / name, kept[1]))
        for name, (recorder, shard) in zip(names, product(recorders, shards), strict=True)
    ]
    for _ in complete(share(work, cfg), cfg.batch_size):
        pass
    if all_there(stage, paths, cfg):
        with joining(stage) as last:
            if last:
                contents = {"replicates": cfg.replicates, "num_shards": len(shards)}
                _finish(stage, paths, job, facts, rows, {**contents, "states": states if cfg.hidden else None})
    return stage.folder


def _finish(
    stage: Stage, paths: Sequence[Path], job: str, facts: dict[str, Any], rows: Sequence[Any], contents: dict[str, Any]
) -> None:
    """Count what all files hold, and close the manifest. The files are read, and checked, one at a time.

    Rows that a file lacks have failed. Raises InputError if all of them have.
    """
    totals = {"num_positions": 0, "num_steps": 0}
    times, by_prompt = dict.fromkeys((row["row"] for row in rows), 0), dict[tuple[int, ...], list[int]]()
    for row in rows:
        by_prompt.setdefault(tuple(row["prompt_ids"]), []).append(row["row"])
    for path in paths:
        trace = read_file(path, job)
        totals = {name: count + getattr(trace, name) for name, count in totals.items()}
        for row in trace.rows.tolist():
            times[row] += 1
    failed = [row for row, count in times.items() if count < contents["replicates"]]
    reasons = [f"response {row}: {NOT_NUMBERS}" for row in failed]
    check_some_done(len(rows) * (not any(times.values())), len(rows), next(iter(reasons), None), stage.folder)
    size = sum(path.stat().st_size for path in paths)
    sequences, steps = f"{len(rows)} texts x {contents['replicates']}", totals["num_steps"]
    print(f"traces: {sequences}, {steps:,} steps, {size / 2**20:.1f} MiB")
    if failed:
        print(f"  {len(failed)} of the texts failed, first: {reasons[0]}")
    several = [numbers for numbers in by_prompt.values() if len(numbers) > 1]
    write_json(stage.folder / SUMMARY, {"job": job, **({SAME_PROMPT: several} if several else {}), **facts})
    outcome = {"num_texts": len(rows), "num_failed": len(failed), "first_error": next(iter(reasons), None)}
    stage.finish(job=job, **outcome, **contents, **totals, bytes=size, **facts)


def _columns(rows: Sequence[dict[str, Any]]) -> tuple[list[TextWithGrammar], list[int]]:
    texts = [TextWithGrammar(row["prompt_ids"], row["token_ids"], row.get("grammar")) for row in rows]
    return texts, [row["row"] for row in rows]


def _estimate(recorder: Recorder, rows: list[dict[str, Any]], replicates: int) -> None:
    probe = rows[:PROBE]
    started = perf_counter()
    trace = recorder.record_all(*_columns(probe))
    seconds = perf_counter() - started
    scale = replicates * num_tokens(rows) / num_tokens(probe)
    print(
        f"traces, dry run on {len(probe)} texts: {len(rows)} texts x {replicates} would take about "
        f"{trace.num_bytes * scale / 2**20:.1f} MiB and {seconds * scale / 60:.1f} minutes "
        f"({trace.num_steps / max(trace.num_positions, 1):.1f} steps per token)"
    )

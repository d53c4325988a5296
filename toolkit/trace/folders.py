"""Folders of traces, as data_gen.traces writes them: shards of texts, and replicates of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.runs.stage import MANIFEST, read_manifest
from toolkit.trace.trace import Trace, join

SUMMARY = "summary.json"  # what the traces depend on, the same whenever they are recorded


def file_name(shard: int, replicate: int) -> str:
    """File name of a shard's replicate."""
    return f"traces-{shard:05d}-r{replicate}.safetensors"


def read_traces(folder: Path | str, replicate: int | None = 0) -> Trace:
    """The traces of a finished folder as one: one replicate, or all of them (None), one after another.

    States stay in the files until they are read.
    Raises InputError if the folder is not finished, or a file is missing, cut short or of another job.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).exists() or read_manifest(folder).get("stage") != "traces":
        raise InputError(f"expected a folder of data_gen.traces at {folder}, found none")
    manifest = read_manifest(folder)
    if manifest.get("status") != "finished":
        raise InputError(f"the traces in {folder} are not finished: run data_gen.traces again first")
    chosen = range(manifest["replicates"]) if replicate is None else [replicate]
    paths = [folder / file_name(number, r) for r in chosen for number in range(manifest["num_shards"])]
    return join([read_file(path, manifest["job"]) for path in paths], mapped=True)


def read_file(path: Path, job: str) -> Trace:
    """One file of a folder. Raises InputError if it is not whole, or of another job."""
    trace = Trace.load(path)
    if trace.about.get("job") != job:
        raise InputError(
            f"{path} belongs to another job (other config, models or responses); delete it and record again"
        )
    return trace


def check_final_states(summary: Mapping[str, Any], where: Path | str) -> None:
    """Raises InputError for traces of an earlier revision whose states hold earlier layers of the draft, too."""
    if layers := summary.get("draft_layers"):
        raise InputError(f"the traces in {where} hold states of the layers {layers} too: record them again")

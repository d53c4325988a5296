"""Recordings in files: what is missing is recorded, or scored on states that are there; read, they are one trace.

    Store(folder).trace(pair, sampling, sequences, max_drafted, heads)      sequences of any origin
    read_traces(folder)                                                     an output folder of data_gen.traces

Both have one format: a safetensors file per shard of sequences holds a whole trace (`Trace.save`) with its heads' logits and,
if they are kept, the draft's states. A file of an older revision lacks nothing that is read here, or says to record it again.
A recording for some policies is cut, and its files go on when more is asked of them, without the target.
Whether a shard is done is decided in one place, `Shard.trace`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from toolkit.acceptance.folder import KINDS, recorded_name, scorers
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.grammar.text import grammar_key
from toolkit.models.fingerprint import computed_by
from toolkit.models.pair import ModelPair
from toolkit.models.teacher import Text
from toolkit.runs.stage import MANIFEST, read_manifest
from toolkit.sampling import Sampling
from toolkit.stopping import StoppingPolicy
from toolkit.trace.record import BATCH, Recorder, record_all_together
from toolkit.trace.record_by_start import recorder_of
from toolkit.trace.score import with_logits
from toolkit.trace.trace import Trace, join

SUMMARY = "summary.json"  # what the traces depend on, the same whenever they are recorded
SAME_PROMPT = "same_prompt"  # of the summary: lists of rows that answer one prompt, where there are several
SHARD = 16  # sequences in a file: an interruption loses at most the work on these
OLDER = "trace-*-000.safetensors"  # files of sweeps before this format


def file_name(shard: int, replicate: int) -> str:
    """File name of a shard's replicate."""
    return f"traces-{shard:05d}-r{replicate}.safetensors"


@dataclass(frozen=True)
class Shard:
    """A file that holds the trace of some sequences, with the logits of its recorder's heads.

    job        hash of all that the trace depends on
    sequences  prompt ids and produced ids of each; `rows` seed the draws
    kept       another shard of the same sequences whose states suffice to score the heads; None: there is none
    repairs    make a damaged file again, instead of an error
    beside     shards of the same sequences at other draft temperatures: those without a file are recorded with this one
    deeper     positions [n] whose roll-outs are recorded to their ends where the file holds them cut. A recorder without
               policies records all of them
    """

    path: Path
    job: str
    recorder: Recorder
    sequences: Sequence[Text]
    rows: Sequence[int]
    kept: tuple[Path, str] | None = None
    repairs: bool = False
    beside: Sequence[Shard] = ()
    deeper: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    @property
    def num_tokens(self) -> int:
        """Produced tokens of all sequences."""
        return sum(len(produced) for _, produced in self.sequences)

    def trace(self, batch_size: int, on_batch: Callable[[int], object], on_record: Callable[[bool], object]) -> Trace:
        """The trace, from the file as far as it goes: else heads are scored on states, roll-outs go on, or it is recorded.

        on_batch hears how many tokens were recorded; on_record that a recording begins, and whether it is made again for
        heads that it lacks. Raises InputError for a file that is damaged or of another job, and as `Recorder.record`.
        """
        recorder, stored = self.recorder, self._stored()
        missing = {
            name: head for name, head in recorder.heads.items() if stored is None or name not in stored.estimates
        }
        trace = stored
        if trace is None or missing:
            states = stored if self.kept is None else read_file(*self.kept)
            if states is not None and states.hidden is not None:
                trace = recorder.checked(with_logits(states, missing, recorder.pair.device))
            else:
                on_record(stored is not None)
                again = stored is not None and stored.roll_cut is None
                trace = self._recorded(replace(recorder, policies=None) if again else recorder, batch_size, on_batch)
            # Of the same steps the stored states stay, if there are any.
            if stored is not None and trace.roll_cut is stored.roll_cut:
                trace = replace(trace, estimates={**stored.estimates, **trace.estimates})
            elif not recorder.hidden:
                trace = replace(trace, hidden=None)
        if len(rest := self._rest(trace)):
            trace = recorder.deepened(trace, self.sequences, rest, batch_size)
        return trace if trace is stored else self._kept(trace)

    def _recorded(self, recorder: Recorder, batch_size: int, on_batch: Callable[[int], object]) -> Trace:
        """The trace, made by the models; those of shards beside it that lack their files are written."""
        beside = [shard for shard in self.beside if not shard.path.exists()]
        recorders = [recorder, *(shard.recorder for shard in beside)]
        trace, *others = record_all_together(recorders, self.sequences, self.rows, batch_size, on_batch)
        for shard, other in zip(beside, others, strict=True):
            shard._kept(other)
        return trace

    def _rest(self, trace: Trace) -> Tensor:
        """The positions [n] whose roll-outs are wanted further than the trace holds them."""
        if trace.roll_cut is None:
            return self.deeper[:0]
        cut = trace.roll_cut.nonzero().squeeze(1)
        return cut if self.recorder.policies is None else cut[torch.isin(cut, self.deeper)]

    def _kept(self, trace: Trace) -> Trace:
        """The trace, written to the file."""
        trace = replace(trace, about={"job": self.job})
        trace.save(self.path)
        return trace

    def _stored(self) -> Trace | None:
        if not self.path.exists():
            return None
        try:
            return read_file(self.path, self.job)
        except InputError:
            if self.repairs:
                return None
            raise


def complete(shards: Sequence[Shard], batch_size: int = BATCH) -> Iterator[Trace]:
    """The traces of all shards, one after another; what they lack is made and written. Shows the progress in tokens."""
    total, first = sum(shard.num_tokens for shard in shards), True
    with tqdm(total=total, desc="traces", unit="token", unit_scale=True) as bar:

        def announce(again: bool) -> None:
            if first:
                if again:
                    print(
                        "recording again for another head: its states were not kept; hidden=true keeps the draft's states, "
                        "which would suffice"
                    )
                ahead = [shard for shard in shards if not shard.path.exists()] or shards
                temperatures = 1 + sum(not shard.path.exists() for shard in ahead[0].beside)
                sizes = sum(len(shard.rows) for shard in ahead), sum(shard.num_tokens for shard in ahead)
                bar.write(shards[0].recorder.work(*sizes, batch_size, temperatures), file=sys.stderr)

        for shard in shards:
            before, started = bar.n, perf_counter()
            trace = shard.trace(batch_size, bar.update, announce)
            recorded = bar.n - before
            if recorded and first:
                size = trace.num_bytes * total / shard.num_tokens
                minutes = (perf_counter() - started) / recorded * (total - bar.n) / 60
                line = f"traces: {len(shards)} files, about {size / 2**20:.1f} MiB and {minutes:.0f} more minutes"
                bar.write(line, file=sys.stderr)
                first = False
            bar.initial += shard.num_tokens - recorded  # keeps tokens/s honest
            bar.update(shard.num_tokens - recorded)
            yield trace


class Store:
    """Recordings of sequences in a folder. Each lies under a hash of all that it depends on, heads apart.

    hidden  keep the draft's states: heads that are wanted later are scored on them, and nothing is recorded again
    """

    def __init__(self, folder: Path | str, hidden: bool = True):
        self.folder, self.hidden = Path(folder), hidden

    def trace(
        self,
        pair: ModelPair,
        sampling: Sampling,
        sequences: Sequence[Text],
        max_drafted: int,
        heads: Sequence[Path | str] = (),
        rows: Sequence[int] | None = None,
        draft_temperature: float | None = None,
        upper_bound: bool = False,
        states: bool = False,
        policies: Mapping[float | None, Sequence[StoppingPolicy] | None] | None = None,
        deeper: Tensor | None = None,
    ) -> Trace:
        """The trace of sequences (prompt ids, produced ids) with the logits of the heads in these folders.

        rows    seed the draws of each sequence; None: their numbers. The other arguments are those of `Recorder`.
        states  whether the draft's states come with it, for estimators that read them; such recordings lie apart
        policies  by draft temperature the bound policies that will be replayed. All these recordings are made in the same
                  passes of the models; roll-outs end where no policy goes on. None, or a temperature that is missing: whole
        deeper    positions [n] of the trace after which a policy goes on (`CutError`): these roll-outs to their ends
        Raises InputError as `Recorder.record`.
        """
        if not sequences:
            raise InputError("every response failed: there is nothing to replay")
        rows = range(len(sequences)) if rows is None else rows
        scored_by = {scorer.key: scorer for folder in heads for scorer in scorers(pair, folder).values()}
        read = [computed_by(pair.target), computed_by(pair.draft), _settings(sampling), sorted(pair.ends(sampling))]
        numbered = [
            [row, list(map(int, text[0])), list(map(int, text[1])), *grammar_key(sampling, text)]
            for row, text in zip(rows, sequences, strict=True)
        ]
        apart: list[Any] = ["states"] if states else []
        apart += [list(pair.unshared)] if pair.unshared else []  # the draft never proposes them
        parts = [slice(first, first + SHARD) for first in range(0, len(sequences), SHARD)]
        policies = policies or {}

        def shards_at(temperature: float | None) -> list[Shard]:
            key = content_hash([read, numbered, max_drafted, temperature, upper_bound, SHARD, *apart], length=16)
            options = max_drafted, scored_by, self.hidden or states, upper_bound, temperature
            recorder = recorder_of(pair, sampling, *options, policies=policies.get(temperature))
            names = [f"traces-{key}-{number:05d}.safetensors" for number in range(len(parts))]
            return [
                Shard(self.folder / name, key, recorder, sequences[at], rows[at], repairs=True)
                for name, at in zip(names, parts, strict=True)
            ]

        others = [shards_at(temperature) for temperature in policies if temperature != draft_temperature]
        own = shards_at(draft_temperature)
        shards = [replace(shard, beside=beside) for shard, *beside in zip(own, *others, strict=True)]
        if deeper is not None:
            ends = list(accumulate((shard.num_tokens for shard in shards), initial=0))
            of_shards = [deeper[(deeper >= first) & (deeper < last)] - first for first, last in pairwise(ends)]
            shards = [replace(shard, deeper=wanted) for shard, wanted in zip(shards, of_shards, strict=True)]
        self._announce(shards[0])
        return join(
            [
                replace(
                    t, hidden=t.hidden if states else None, estimates={name: t.estimates[name] for name in scored_by}
                )
                for t in complete(shards)
            ]
        )

    def _announce(self, shard: Shard) -> None:
        """Say why sequences that were recorded before are recorded again."""
        if not shard.path.exists() and next(self.folder.glob(OLDER), None) is not None:
            print(f"{self.folder} holds recordings of an older revision ({OLDER}): they are not read, but made again")


def read_traces(folder: Path | str, replicate: int | None = 0, grammars: bool = False) -> Trace:
    """The traces of a finished folder as one: one replicate, or all of them (None), one after another.

    States stay in the files until they are read.
    grammars  whether the caller knows certain tokens, as of texts with grammars
    Raises InputError for these if not, if the folder is not finished, or a file is missing, cut short or of another job.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).exists() or read_manifest(folder).get("stage") != "traces":
        raise InputError(f"expected a folder of data_gen.traces at {folder}, found none")
    manifest = read_manifest(folder)
    if manifest.get("status") != "finished":
        raise InputError(f"the traces in {folder} are not finished: run data_gen.traces again first")
    chosen = range(manifest["replicates"]) if replicate is None else [replicate]
    paths = [folder / file_name(number, r) for r in chosen for number in range(manifest["num_shards"])]
    trace = join([read_file(path, manifest["job"]) for path in paths], mapped=True)
    if trace.certain is not None and not grammars:
        raise InputError(f"{folder}: expected a recording without a grammar here; sweeps and statistics= know them")
    names = {
        recorded_name(digest, kind): recorded_name(name, kind)
        for name, digest in (manifest.get("heads") or {}).items()
        for kind in KINDS
    }
    return replace(trace, names=names)


def read_file(path: Path, job: str) -> Trace:
    """One file of a folder. Raises InputError if it is not whole, or of another job."""
    trace = Trace.load(path)
    if trace.about.get("job") != job:
        raise InputError(
            f"{path} belongs to another job (other config, models or responses); delete it and record again"
        )
    return trace


def without_states(path: Path, folder: Path | str) -> Path:
    """A copy of a file in another folder that lacks the draft's states, which are most of it."""
    return replace(Trace.load(path), hidden=None).save(Path(folder) / path.name)


def check_final_states(summary: Mapping[str, Any], where: Path | str) -> None:
    """Raises InputError for traces of an earlier revision whose states hold earlier layers of the draft, too."""
    if layers := summary.get("draft_layers"):
        raise InputError(f"the traces in {where} hold states of the layers {layers} too: record them again")


def _settings(sampling: Sampling) -> dict[str, Any]:
    """What a recording depends on but for grammars, which `grammar_key` names with the texts: older ones do not."""
    return {name: value for name, value in vars(sampling).items() if not name.startswith("grammar")}

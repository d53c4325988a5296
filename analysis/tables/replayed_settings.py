"""Settings of a sweep from one recording: every chain policy is replayed on a trace of autoregressive responses.

What cannot be replayed (draft trees, block verification) is decoded. One trace serves all settings of one draft
temperature. It is kept beside the settings, under a hash of the responses and its own settings. Further heads are
scored on its states (`recorded_shards`). If a sweep asks for the upper bound, its traces hold the target along the
roll-outs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from analysis.replay.policies import replay, replay_starts
from analysis.replay.prompt_lookup import Copies, Text, replay_prompt_lookup
from analysis.replay.recorded_heads import with_recorded_heads
from analysis.replay.tally import Replayed
from analysis.replay.token_view import piece, token_rounds
from analysis.replay.upper_bound import at_price
from analysis.tables.grid import UPPER_BOUND, Setting
from analysis.tables.workbench import Workbench, checked
from data_gen.recording import Recorder
from data_gen.recording_by_start import recorder_of
from toolkit.acceptance.folder import Scorer, head_hash, recorded_scorers
from toolkit.acceptance.from_states import recorded_logits
from toolkit.decoding.proposers import BestSourceProposer
from toolkit.decoding.proposers.copying import CopyProposer
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.files.tensors import load_tensors, save_tensors
from toolkit.stopping import StoppingPolicy
from toolkit.trace import Trace, join
from toolkit.types import Counts

SHARD = 16  # texts in a file: an interruption loses at most the work on these
Heads = Mapping[
    str, Mapping[str, Scorer]
]  # hash of a head's folder -> name of its logits in a trace -> what scores them


@dataclass(frozen=True)
class Shard:
    """Some texts of a recording. key: a hash of all that the trace depends on, heads apart."""

    folder: Path
    key: str
    number: int

    def trace(self, record: Callable[[], Trace], heads: Heads, device: torch.device, keep: bool) -> Trace:
        """The trace with these heads' logits, as far as possible from files. record: makes it again; keep: keep the states."""
        stored = self._held(heads, device)
        if isinstance(stored, Trace):
            return stored
        if stored is not None and self.number == 0:  # printed once
            print(
                f"recording again for another head: {stored}; hidden=true keeps the draft's states, which would suffice"
            )
        trace = record()
        for digest, scorers in heads.items():
            save_tensors(self._path("logits", digest), {name: trace.estimates[name] for name in scorers})
        if keep and trace.hidden is not None:
            states = trace.hidden if isinstance(trace.hidden, Tensor) else trace.hidden.whole()
            save_tensors(self._path("states"), {"hidden": states})
        replace(trace, estimates={}, hidden=None).save(self._path("trace"))
        return replace(Trace.load(self._path("trace")), estimates=trace.estimates)

    def _held(self, heads: Heads, device: torch.device) -> Trace | str | None:
        try:
            trace = Trace.load(self._path("trace"))
        except InputError:  # none yet, or a damaged one
            return None
        missing = {}
        logits: dict[str, Tensor] = {}
        for digest, scorers in heads.items():
            try:
                logits |= load_tensors(self._path("logits", digest), "head's logits")[0]
            except InputError:
                missing[digest] = scorers
        if missing:
            try:
                states = load_tensors(self._path("states"), "draft's states")[0]["hidden"]
            except InputError:
                return "its states were not kept"
            whole = replace(trace, hidden=states)
            for digest, scorers in missing.items():
                scored = {name: recorded_logits(whole, scorer, device) for name, scorer in scorers.items()}
                save_tensors(self._path("logits", digest), scored)
                logits |= scored
        return replace(trace, estimates=logits)

    def _path(self, kind: str, digest: str = "") -> Path:
        parts = [kind, self.key, *([digest[:16]] if digest else []), f"{self.number:03d}"]
        return self.folder / f"{'-'.join(parts)}.safetensors"


class Recording:
    """The traces of a sweep's responses, made when they are needed.

    responses    rows of autoregressive decoding
    path         their file, named by a hash of all they depend on; the traces lie beside it
    settings        that will be replayed: the heads that their methods read are recorded, and what the upper bound needs
    max_drafted  most tokens a replayed method may draft in a round
    hidden       keep the draft's states beside the traces, for heads that are asked for later
    """

    def __init__(
        self,
        bench: Workbench,
        responses: pd.DataFrame,
        path: Path,
        settings: Sequence[Setting],
        max_drafted: int,
        hidden: bool = True,
    ):
        if bench.sampling.max_length is not None:
            raise InputError("replays know one limit for all texts: expected sampling.max_length=null, or source=live")
        self.settings = settings
        responses = bench.within_context(responses)
        self.bench, self.responses, self.max_drafted, self.hidden = bench, responses, max_drafted, hidden
        self.folder = path.parent
        self.key = content_hash([path.stem, [list(map(int, ids)) for ids in responses.token_ids]])
        self.upper_bound = any(setting.method == UPPER_BOUND for setting in settings)
        used = [bench.methods[setting.name].bind(bench.pair) for setting in settings if setting.method != UPPER_BOUND]
        estimators = [getattr(getattr(method.policy, "policy", None), "estimator", None) for method in used]
        folders = {head for estimator in estimators if (head := getattr(estimator, "head", None)) is not None}
        self.heads = {folder: head_hash(folder) for folder in sorted(folders)}
        self.traces: dict[float | None, Trace] = {}
        fine = responses.error.isna() & responses.token_ids.map(len).gt(0)  # a table turns None into not-a-number
        self.usable = np.flatnonzero(fine).tolist()

    def rows(self, setting: Setting) -> pd.DataFrame:
        trace = self.trace_for(setting)  # recorded before the clock starts
        started = perf_counter()
        replayed = self._replay(trace, setting)
        seconds = perf_counter() - started
        index_of = {number: i for i, number in enumerate(self.usable)}
        rows = []
        for number, response in enumerate(self.responses.itertuples()):
            at = index_of.get(number)
            counts: dict[str, Any] = {
                **{name: 0 if at is None else int(replayed.counts[name][at]) for name in Counts.__dataclass_fields__},
                "accepted_lengths": _histogram(replayed.accepted, at),
                "drafted_lengths": _histogram(replayed.drafted, at),
                "reached_lengths": _histogram(replayed.judged, at),
                **{name: 0 if at is None else int(values[at]) for name, values in replayed.sources.items()},
            }
            rows.append(self.bench.row(number, True, counts, response, seconds))
        return checked(rows)

    def tokens(self, setting: Setting, count: int) -> dict[str, Any] | None:
        """What the setting's rounds did to every token of the first `count` texts; None where no recording says it."""
        trace = None if setting.method == UPPER_BOUND else self.trace_for(setting)
        if trace is None or self.bench.methods[setting.name].proposer.shows_matches:
            return None
        tokenizer = self.bench.pair.tokenizer
        policy = self.policy_for(setting)
        chosen = list(range(min(count, trace.num_texts)))
        texts = []
        for number, rounds in zip(chosen, token_rounds(trace, policy, chosen, tokenizer), strict=True):
            row = self.responses.iloc[self.usable[number]]
            for record in rounds:
                if record["extra"] is not None:
                    record["extra"]["text"] = piece(tokenizer, int(row.token_ids[record["extra"].pop("position")]))
            prompt = list(map(int, row.prompt_ids))
            text = prompt if tokenizer is None else tokenizer.decode(prompt, skip_special_tokens=True)
            texts.append({"id": str(self.bench.prompts[self.usable[number]].id), "prompt": str(text), "rounds": rounds})
        return {"method": setting.method, "setting": setting.label, "texts": texts}

    def trace_for(self, setting: Setting) -> Trace | None:
        """The trace that a setting is replayed on; None: it needs the texts alone."""
        if setting.method == UPPER_BOUND:
            return self._trace(setting.parameters.get("draft_temperature"))
        method = self.bench.methods[setting.name]
        if isinstance(method.proposer, CopyProposer):
            return None
        return self._trace(method.draft_temperature)

    def policy_for(self, setting: Setting) -> StoppingPolicy:
        """The setting's policy, bound, its heads replaced by what they said when the trace was recorded."""
        return with_recorded_heads(self.bench.methods[setting.name].bind(self.bench.pair).policy, self.heads)

    def texts(self, numbers: Sequence[int]) -> list[Text]:
        rows = [self.responses.iloc[number] for number in numbers]
        return [(list(row.prompt_ids), list(row.token_ids)) for row in rows]

    def _replay(self, trace: Trace | None, setting: Setting) -> Replayed:
        most, ends = self.bench.sampling.max_new_tokens, self.bench.pair.ends(self.bench.sampling)
        if trace is None:
            method = self.bench.methods[setting.name].bind(self.bench.pair)
            return replay_prompt_lookup(method, self.texts(self.usable), most, ends)
        if setting.method == UPPER_BOUND:
            price, min_drafted = setting.parameters["price"], setting.parameters.get("min_drafted")
            return at_price(trace, float(price), int(min_drafted or 0))
        policy, proposer = self.policy_for(setting), self.bench.methods[setting.name].proposer
        if isinstance(proposer, BestSourceProposer):
            limit = self.bench.methods[setting.name].bind(self.bench.pair).limit
            return replay(trace, policy, Copies(proposer.copies, self.texts(self.usable), limit, most, ends))
        return replay(trace, policy) if policy.uses_history else replay_starts(trace, policy)

    def _trace(self, draft_temperature: float | None) -> Trace:
        """One `Shard` per SHARD texts: those that an interrupted sweep has recorded are kept."""
        if draft_temperature not in self.traces:
            bound = [UPPER_BOUND] if self.upper_bound else []
            identity = [self.key, self.max_drafted, draft_temperature, *bound, {"shard": SHARD}]
            key = content_hash(identity, length=16)
            scorers = recorded_scorers(self.bench.pair, {name: folder for folder, name in self.heads.items()})
            options = self.max_drafted, scorers, self.hidden, self.upper_bound, draft_temperature
            recorder = recorder_of(self.bench.pair, self.bench.sampling, *options)
            heads = {digest: recorded_scorers(self.bench.pair, {digest: at}) for at, digest in self.heads.items()}
            shards = [self.usable[first : first + SHARD] for first in range(0, len(self.usable), SHARD)]
            parts, device = list[Trace](), self.bench.pair.device
            sizes = [sum(len(self.responses.token_ids.iloc[number]) for number in texts) for texts in shards]
            with tqdm(total=sum(sizes), desc="traces", unit="token", unit_scale=True, leave=False) as bar:
                for number, texts in enumerate(shards):
                    announced = recorder.work(len(self.usable), sum(sizes)) if not parts else None
                    record = partial(self._record, recorder, texts, announced, bar)
                    done = bar.n
                    parts.append(Shard(self.folder, key, number).trace(record, heads, device, self.hidden))
                    bar.update(done + sizes[number] - bar.n)  # nothing was recorded if the files were there
            if not parts:
                raise InputError("every response failed: there is nothing to replay")
            self.traces[draft_temperature] = join(parts)
        return self.traces[draft_temperature]

    def _record(self, recorder: Recorder, texts: Sequence[int], announced: str | None, bar: Any) -> Trace:
        if announced is not None:
            bar.write(announced, file=sys.stderr)
        return recorder.record_all(self.texts(texts), texts, on_batch=bar.update)


def _histogram(counts: NDArray[np.int64], at: int | None) -> list[int]:
    """A text's line of counts [T, M + 1], without the zeros after the last one."""
    return [] if at is None or not len(counts) else np.trim_zeros(counts[at], "b").tolist()

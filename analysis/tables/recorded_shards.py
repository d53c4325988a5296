"""The files of a sweep's recording, shard by shard: the trace without heads, the draft's states, and every head's logits.

A head that is asked for later is scored on the states, and neither model runs. Files are named by what they depend on:

    trace-KEY-000.safetensors        texts, acceptance draws, roll-outs
    states-KEY-000.safetensors       what the heads read (hidden=true)
    logits-KEY-HEAD-000.safetensors  raw logits of the heads in one folder
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from toolkit.acceptance.folder import Scorer
from toolkit.acceptance.from_states import recorded_logits
from toolkit.errors import InputError
from toolkit.files.tensors import load_tensors, save_tensors
from toolkit.trace import Trace

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
        """The trace with the logits of these heads, as far as possible from the files; what was missing is written.

        record  makes the trace again, with the logits of all heads; and with the states, if they are to be kept
        keep    keep the states
        """
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
        """The trace from its files; why they do not suffice; None if there are none."""
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

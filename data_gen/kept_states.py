"""A recording for further heads from one that differs in nothing but its heads: its states are read, no model runs.

Such a recording is a finished folder of data_gen.traces beside this one, made with hidden=true. It has the same responses,
pair, draws and lengths. So it holds all that a head looks at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from toolkit.acceptance.folder import Scorer
from toolkit.acceptance.from_states import recorded_logits
from toolkit.errors import InputError
from toolkit.runs.stage import MANIFEST, Stage, read_manifest
from toolkit.trace import Trace
from toolkit.trace.folders import read_file

FREE = ("heads", "hidden")  # keys in which the two recordings may differ


@dataclass(frozen=True)
class Kept:
    """A finished recording with states: its folder and job."""

    folder: Path
    job: str

    def with_heads(self, name: str, heads: Mapping[str, Scorer], device: torch.device, hidden: bool) -> Trace:
        """One of its files, with the logits of these heads and of no others. hidden: keep the states, too."""
        trace = read_file(self.folder / name, self.job)
        logits = {head: recorded_logits(trace, scorer, device) for head, scorer in heads.items()}
        return replace(trace, estimates=logits, hidden=trace.hidden if hidden else None)


def find_kept(stage: Stage, facts: Mapping[str, Any], states: str) -> Kept | None:
    """The finished recording beside a stage's folder whose states suffice for the stage; None if there is none.

    facts   of the stage: fingerprints of the models, and the sampling
    states  the draft's number format. A head would not have read states of another format (older versions: float16)

    If a recording is there that lacks the states alone, one line says how it would have sufficed.
    """
    mine, stateless = {key: value for key, value in stage.identity.items() if key not in FREE}, False
    for path in sorted(stage.folder.parent.glob(f"*/{MANIFEST}")):
        try:
            manifest = read_manifest(path.parent)
        except InputError:  # another program's, or damaged: of no use here
            continue
        if path.parent == stage.folder or manifest.get("stage") != stage.name or manifest.get("status") != "finished":
            continue
        theirs = {key: value for key, value in manifest["config"].items() if key not in FREE}
        same_inputs = sorted(manifest.get("inputs", {}).values()) == sorted(stage.inputs.values())
        if not same_inputs or theirs != mine or any(manifest.get(k) != v for k, v in facts.items() if k != "heads"):
            continue
        if manifest["config"].get("hidden") and manifest.get("states") == states:
            return Kept(path.parent, manifest["job"])
        stateless = True
    if stateless:
        print("traces: the same texts were recorded without states; with hidden=true, further heads need no recording")
    return None

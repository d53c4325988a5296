"""A head on a finished recording: its raw logits from the states that the recording holds. No model runs.

The states are those that the head would have read while recording, in the draft's own number format. The other columns that a
pre-read head reads are recorded, too. So the logits equal those of a recording made with the head, up to the rounding of
differently shaped products.

A head that reads the depth in the round scores a step again for every round that visits it. With P positions and at most M
tokens per round, the head runs on up to P (M + 1) inputs instead of S. Features are never held for more than CHUNK steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.acceptance.folder import Scorer, recorded_name, scorers
from toolkit.trace import Trace
from toolkit.trace.steps import Geometry, RecordedStep, recorded_at
from toolkit.types import Step

CHUNK = 16384  # steps scored at a time


def named_scorers(pair: Any, folders: Mapping[str, Path | str]) -> dict[str, Scorer]:
    """The scorers of named head folders, under the names that a trace keeps their logits by."""
    return {
        recorded_name(name, kind): scorer
        for name, folder in folders.items()
        for kind, scorer in scorers(pair, folder).items()
    }


def kept_logits(scorer: Scorer, step: Step) -> Tensor:
    """Raw logits of a step as recordings hold them: float32 on the CPU, or float64 if the head gives float64."""
    logits = scorer(step)
    return (logits if logits.dtype == torch.float64 else logits.float()).cpu()


@torch.inference_mode()
def recorded_logits(trace: Trace, scorer: Scorer, device: torch.device | str = "cpu") -> Tensor:
    """Raw logits of all steps of a trace, on the CPU: [S], or [S, 2] of a pre-read head.

    device  where the head lies
    A head that reads the depth gives logits of every start and depth 1..M + 1: [P, M + 1, 1] or [P, M + 1, 2]. They are 0
    where a round from that start never gets to that depth.
    Raises InputError if the trace holds no states.
    """
    device = torch.device(device)
    if not getattr(scorer, "reads_depth", False):
        steps = torch.arange(trace.num_steps).split(CHUNK)
        return torch.cat([kept_logits(scorer, RecordedStep(trace, 1, index, device=device)) for index in steps])
    geometry, starts = Geometry.of(trace), torch.arange(trace.num_positions)
    columns = []
    for depth in range(1, trace.max_drafted + 2):
        index, exists = recorded_at(trace, geometry, starts, depth)
        parts = [
            kept_logits(scorer, RecordedStep(trace, depth, part, device=device)) for part in index[exists].split(CHUNK)
        ]
        logits = torch.cat(parts)
        logits = logits if logits.dim() > 1 else logits.unsqueeze(-1)
        columns.append(logits.new_zeros(len(starts), logits.shape[1]))
        columns[-1][exists] = logits
    return torch.stack(columns, 1)


def with_logits(trace: Trace, heads: Mapping[str, Scorer], device: torch.device | str = "cpu") -> Trace:
    """The trace with the logits of these heads under their names, and of no others. Raises as `recorded_logits`."""
    return replace(trace, estimates={name: recorded_logits(trace, head, device) for name, head in heads.items()})

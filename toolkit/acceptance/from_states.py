"""A head on a finished recording: its raw logits from the states that the recording holds. No model runs.

The states are the very ones that the head would have read while recording, in the draft's own number format, and the other
columns that a pre-read head looks at are recorded too: the logits are those of a recording made with the head, up to the
rounding of differently shaped products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.acceptance.folder import Scorer
from toolkit.trace import Trace
from toolkit.trace.step import RecordedStep
from toolkit.types import Step

CHUNK = 16384  # steps scored at a time


def kept_logits(scorer: Scorer, step: Step) -> Tensor:
    """Raw logits of a step as recordings hold them: float32 on the CPU; float64 if that is what comes."""
    logits = scorer(step)
    return (logits if logits.dtype == torch.float64 else logits.float()).cpu()


@torch.inference_mode()
def recorded_logits(trace: Trace, scorer: Scorer, device: torch.device | str = "cpu") -> Tensor:
    """Raw logits of all steps of a trace, on the CPU: [S], or [S, 2] of a pre-read head.

    device  where the head lies. Raises InputError if the trace holds no states.
    """
    steps = torch.arange(trace.num_steps).split(CHUNK)
    place = torch.device(device)
    return torch.cat([kept_logits(scorer, RecordedStep(trace, 1, index, device=place)) for index in steps])

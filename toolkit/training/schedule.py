"""Learning rate over training: a cosine, as a pure function of the step (so it resumes exactly)."""

from __future__ import annotations

import math
from typing import Annotated

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from toolkit.config.notes import AtLeast


def cosine_factor(step: int, num_steps: int, warmup: int = 0) -> float:
    """Share of the full learning rate at a step: a linear rise over `warmup` steps, then half a cosine down to 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(num_steps - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def cosine(optimizer: Optimizer, num_steps: int, warmup: Annotated[int, AtLeast(0)] = 0) -> LambdaLR:
    """The schedule of an optimizer that makes `num_steps` steps.

    warmup  steps until the full rate
    """
    return LambdaLR(optimizer, lambda step: cosine_factor(step, num_steps, warmup))

"""Seconds of bare forward passes: a draft's over one token, the target's over one token and over a drafted run.

Unlike `analysis.loads.costs`, nothing is decoded, and the loop's own work is left out: many drafts are compared in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.engine import open_session
from toolkit.engine.facts import max_positions, vocab_size

CONTEXT = 128  # tokens before the ones that are timed
WIDTHS = (1, 2, 3, 5, 9, 13)  # tokens of a target's forward pass
REPEATS = 9


@dataclass(frozen=True)
class Costs:
    """Costs in units of the target's forward pass over one token.

    draft   of a draft's forward pass over one token
    target  [K + 1] of the target's over 1, ..., K + 1 tokens
    """

    draft: float
    target: NDArray[np.float64]


def measured_forwards(target: Any, drafts: Sequence[Any], most: int) -> list[Costs]:
    """The costs of each draft beside the target, up to `most` drafted tokens: medians of interleaved forward passes."""
    widths = [width for width in WIDTHS if width <= most + 1]
    widths += [most + 1] * (widths[-1] < most + 1)
    seconds = [[_seconds(target, widths), *(_seconds(draft, [1]) for draft in drafts)] for _ in range(REPEATS)]
    medians = [np.median([repeat[number] for repeat in seconds], axis=0) for number in range(len(drafts) + 1)]
    by_width = np.interp(np.arange(1, most + 2), widths, medians[0]) / medians[0][0]
    return [Costs(float(median[0] / medians[0][0]), by_width) for median in medians[1:]]


@torch.no_grad()
def _seconds(model: Any, widths: Sequence[int]) -> list[float]:
    """Seconds of a forward pass over each number of tokens, after a context."""
    context = min(CONTEXT, max_positions(model) - sum(widths) - 1)
    tokens = (torch.arange(context + max(widths), device=model.device) % vocab_size(model)).unsqueeze(0)
    session = open_session(model, 1, context + sum(widths) + 1)
    session.extend(tokens[:, :context], last=1)
    session.extend(tokens[:, :1], last=1)
    seconds = []
    for width in widths:
        _wait(model)
        started = perf_counter()
        session.extend(tokens[:, :width], last=width)
        _wait(model)
        seconds.append(perf_counter() - started)
    return seconds


def _wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)

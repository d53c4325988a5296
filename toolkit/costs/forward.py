"""What a forward pass costs: seconds as an affine function of the tokens it reads and the tokens before them.

Paper: SpecDec++ (arXiv:2405.19715), Table 2 regresses seconds on the numbers of draft and target forward passes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.types import Generation

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ForwardCost:
    """Seconds of one forward pass: base + per_token * tokens read + per_context * tokens before them. r2 of its fit."""

    base: float
    per_token: float = 0.0
    per_context: float = 0.0
    r2: float = float("nan")

    def __call__(self, width: float = 1.0, context: float = 0.0) -> float:
        """Seconds to read `width` tokens after `context` others."""
        return self.base + self.per_token * width + self.per_context * context


@dataclass(frozen=True)
class CostModel:
    draft: ForwardCost
    target: ForwardCost

    def ratio(self, width: float = 1.0, context: float = 0.0) -> float:
        """c: one draft forward pass of one token, over one target forward pass that checks `width` drafted tokens."""
        return self.draft(1.0, context) / self.target(width + 1.0, context)


def fit_forward(width: Array, context: Array, seconds: Array) -> ForwardCost:
    """Least squares of seconds [n] on (1, width, context) [n] each; columns that do not vary are left out."""
    varying = [values for values in (width, context) if np.ptp(values) > 0]
    beta, r2 = least_squares(np.stack([np.ones_like(seconds), *varying], 1), seconds)
    slopes = iter(beta[1:].tolist())
    per_token, per_context = (next(slopes) if np.ptp(values) > 0 else 0.0 for values in (width, context))
    return ForwardCost(float(beta[0]), per_token, per_context, r2)


def fit_rounds(generations: Sequence[Generation]) -> CostModel:
    """The cost model of rounds decoded one row at a time (seconds of a batch belong to no single row).

    A round's draft seconds are spread evenly over its draft forward passes. The target's hold the loop's own work. The first
    round of a prompt reads the prompt and is left out.
    Raises InputError if too few rounds remain.
    """
    draft, target = [], []
    for generation in generations:
        context = len(generation.prompt_ids)
        for number, round_ in enumerate(generation.rounds):
            if number:
                target.append((round_.num_drafted + 1.0, context, round_.target_seconds))
                if round_.num_draft_calls:
                    draft.append((1.0, context, round_.draft_seconds / round_.num_draft_calls))
            context += round_.num_produced
    if len(target) < 10 or len(draft) < 10:
        raise InputError(
            f"a cost model needs rounds beyond each prompt's first: expected 10 at least, got {len(draft)} that drafted; "
            "decode more or longer texts"
        )
    parts = (np.array(part, dtype=np.float64).T for part in (draft, target))
    return CostModel(*(fit_forward(*part) for part in parts))


def least_squares(columns: Array, values: Array) -> tuple[Array, float]:
    """Coefficients [k] of values [n] on columns [n, k], and R^2 (about the mean)."""
    beta: Array = np.linalg.lstsq(columns, values, rcond=None)[0].astype(np.float64)
    residual = values - columns @ beta
    spread = ((values - values.mean()) ** 2).sum()
    return beta, float(1 - (residual**2).sum() / spread) if spread > 0 else float("nan")

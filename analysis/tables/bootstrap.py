"""Bootstrap over prompts. Tokens of one response depend on each other, prompts do not: prompts are what is resampled.

Shapes: n prompts, k counted quantities, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError

Array = NDArray[np.float64]
CHUNK = 4_000_000  # resampling weights held at a time
FEWEST_GROUPS = 3  # fewer say nothing about spread


@dataclass(frozen=True)
class Bootstrap:
    """The way intervals are made: resamples of the prompts or groups, the share of them an interval holds, and the seed."""

    resamples: int = 10_000
    confidence: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.resamples < 1 or not 0 < self.confidence < 1:
            raise InputError(
                f"expected resamples of at least 1 and confidence in (0, 1), got {self.resamples} and {self.confidence}"
            )

    def totals(self, values: Array) -> Array:
        """`resampled_totals` [R, k] of values [n, k]."""
        return resampled_totals(values, self.resamples, self.seed)

    def interval(self, samples: Array) -> tuple[float, float]:
        """The central interval of resampled figures [R]."""
        return percentile_interval(samples, self.confidence)

    def group_interval(self, samples: Array, num_groups: int) -> tuple[float, float]:
        """The central interval of resampled groups; not a number where there are too few of them to show a spread."""
        return self.interval(samples) if num_groups >= FEWEST_GROUPS else (float("nan"), float("nan"))

    def figure(self, name: str, estimate: float, samples: Array) -> dict[str, float]:
        """A figure as tables have it: `name`, `name_low`, `name_high`."""
        low, high = self.interval(samples)
        return {name: float(estimate), f"{name}_low": low, f"{name}_high": high}


def resampled_totals(values: Array, resamples: int, seed: int) -> Array:
    """Column totals [R, k] of `resamples` bootstrap samples of the rows of values [n, k].

    All columns of a sample come from the same drawn prompts, so that ratios and differences of totals are paired.
    """
    return np.concatenate([weights @ values for weights in resampling_weights(len(values), resamples, seed)])


def resampling_weights(num_rows: int, resamples: int, seed: int) -> Iterator[Array]:
    """How often each row occurs in each resample, [R', n] at a time; drawing n rows with replacement is multinomial."""
    generator = np.random.default_rng(seed)
    step = max(CHUNK // num_rows, 1)
    for first in range(0, resamples, step):
        size = min(step, resamples - first)
        yield generator.multinomial(num_rows, np.full(num_rows, 1 / num_rows), size=size).astype(float)


def percentile_interval(samples: Array, confidence: float = 0.95) -> tuple[float, float]:
    """The central interval that holds `confidence` of the samples."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(samples, [tail, 1 - tail])
    return float(low), float(high)

"""Calibration by depth: logits of an estimator, scaled and shifted by the depth in the round, become probabilities.

    logit of P(accepted) = scale of depth k * logit + shift of depth k

Method: sequential temperature scaling, named in vllm#52053: a temperature per draft position, one after another.
theirs -> ours: temperature -> 1 / scale. No text of it was read.
Deviation: a shift by depth as well. Acceptance of one domain is another's with a shift, far more than with a scale.
Deviation: labels are probabilities given that the tokens before are accepted. So each depth is fitted to its own positions, and
survival, the product over depths, is calibrated with them. A depth is pulled to the one before it with the weight of PULL
positions, the first one to no change. A depth without positions is as the one before it.

`analysis.heads calibration=[TRACES]` fits it to recordings. A server counts one rate per depth: shifts alone follow from these.

Shapes: n tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.acceptance.calibration.platt import platt
from toolkit.errors import InputError
from toolkit.files.atomic import parse_json_file, write_json

FILE = "calibration.json"  # beside a head's weights; statistics hold it in their own file
OUTPUTS = ("read", "drawn", "position", "following")
PULL = 20.0  # positions
HINT = "python -m analysis.heads calibration=[TRACES] writes one"


@dataclass(frozen=True)
class ByDepth:
    """Scales and shifts of depth 1, 2, ...; deeper ones have the last; (): no change."""

    scales: tuple[float, ...] = ()
    shifts: tuple[float, ...] = ()

    def __call__(self, logits: Tensor, depth: int | Tensor) -> Tensor:
        """Calibrated logits [n], of tokens at one depth or at depths [n]."""
        last = len(self.scales) - 1
        if last < 0:
            return logits
        if isinstance(depth, int):
            at = min(max(depth - 1, 0), last)
            return logits * self.scales[at] + self.shifts[at]
        rows = (depth - 1).clamp(0, last)
        return logits * logits.new_tensor(self.scales)[rows] + logits.new_tensor(self.shifts)[rows]

    def after(self, first: ByDepth) -> ByDepth:
        """What this map makes of the logits that `first` gives, as one map."""
        depth = torch.arange(max(len(self.scales), len(first.scales))) + 1
        shifts, sums = (self(first(torch.full(depth.shape, at).double(), depth), depth) for at in (0.0, 1.0))
        return ByDepth(tuple((sums - shifts).tolist()), tuple(shifts.tolist()))

    @classmethod
    def fitted(cls, logits: Tensor, labels: Tensor, depth: Tensor) -> ByDepth:
        """The least log loss of labels [n] in [0, 1] at each of the depths [n] from 1, one after another."""
        logits, labels, before = logits.double(), labels.double(), (1.0, 0.0)
        fits = []
        for level in range(1, int(depth.max()) + 1):
            at_level = depth == level
            if bool(at_level.any()):
                before = platt(logits[at_level], labels[at_level], 1 - labels[at_level], PULL, before)
            fits.append(before)
        scales, shifts = zip(*fits, strict=True)
        return cls(scales, shifts)

    @classmethod
    def shifted(cls, logits: Tensor, depth: Tensor, rates: list[float]) -> ByDepth:
        """The shifts with which the mean estimate at depth 1, 2, ... is the rate.

        A depth without logits [n] is as the one before it.
        """
        shifts = [0.0]
        for level, rate in enumerate(rates, start=1):
            logits_at_level, low, high = logits[depth == level].double(), -30.0, 30.0
            for _ in range(60 if len(logits_at_level) else 0):
                middle = (low + high) / 2
                low, high = (
                    (middle, high) if float(torch.sigmoid(logits_at_level + middle).mean()) < rate else (low, middle)
                )
            shifts.append((low + high) / 2 if len(logits_at_level) else shifts[-1])
        return cls((1.0,) * len(rates), tuple(shifts[1:]))


@dataclass(frozen=True)
class Calibration:
    """What makes logits probabilities: a map by depth for each of `OUTPUTS`; one without a map is the sigmoid alone."""

    outputs: Mapping[str, ByDepth] = field(default_factory=dict)

    def prob(self, output: str, logits: Tensor, depth: int | Tensor) -> Tensor:
        """P(accepted) [n] from raw logits [n] of tokens at a depth, from 1: for `following` that of the token before it."""
        return torch.sigmoid(self.outputs[output](logits, depth) if output in self.outputs else logits)

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {name: {"scales": [*m.scales], "shifts": [*m.shifts]} for name, m in self.outputs.items()}

    @classmethod
    def of(cls, facts: Any, path: Path | str) -> Calibration:
        """Read `facts` from a file. Raises InputError for what they are not."""
        try:
            outputs = {
                str(name): ByDepth(tuple(map(float, entry["scales"])), tuple(map(float, entry["shifts"])))
                for name, entry in facts.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} holds no calibration by depth ({error}): {HINT}") from None
        numbers = [value for by_depth in outputs.values() for value in (*by_depth.scales, *by_depth.shifts)]
        even = all(len(by_depth.scales) == len(by_depth.shifts) for by_depth in outputs.values())
        if set(outputs) - set(OUTPUTS) or not even or not all(map(math.isfinite, numbers)):
            raise InputError(
                f"{path}: expected as many scales as shifts, numbers all, of {', '.join(OUTPUTS)}; got {facts}: {HINT}"
            )
        return cls(outputs)

    @classmethod
    def beside(cls, folder: Path | str) -> Calibration:
        """The calibration in a head's folder; none there: no change. Raises InputError for a file of another kind."""
        path = Path(folder) / FILE
        return cls.of(parse_json_file(path), path) if path.is_file() else cls()

    def save(self, folder: Path | str) -> Path:
        """Write it beside a head's weights."""
        return write_json(Path(folder) / FILE, self.facts())

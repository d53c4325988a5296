"""Maps from a head's corrected logit to a calibrated probability, and the temperature of the running product.

    platt        sigmoid(scale * logit + shift)                    Platt (1999)
    temperature  the same without a shift, scale = 1 / T           Guo et al. (arXiv:1706.04599)
    isotonic     a nondecreasing line through knots                Zadrozny and Elkan (2002)
    cumulative   (P_1 ... P_k)^(1/T), for policies that multiply probabilities. It is the product of P_i^(1/T), so it
                 is applied token by token, and a policy needs to know nothing of it

A corrected logit is one whose class weight's shift is undone (`AcceptanceHead.corrected`). All maps are nondecreasing. They
keep the order of one output's scores, but they change the products of different tokens' probabilities.

Shapes: N knots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import InputError

KINDS = ("isotonic", "platt", "temperature")
NEAREST = 1e-4  # of a calibrated probability to 0 and 1: no product is ever exactly 0


@dataclass(frozen=True)
class ProbabilityMap:
    """One output's map.

    kind          one of KINDS
    scale, shift  of platt and temperature
    knots [N]     of isotonic: corrected logits, ascending; levels [N]: the probability at each, nondecreasing
    """

    kind: str
    scale: float = 1.0
    shift: float = 0.0
    knots: tuple[float, ...] = ()
    levels: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"calibration: expected a kind among {', '.join(KINDS)}, got {self.kind!r}")
        if self.kind != "isotonic":
            if self.scale < 0:
                raise InputError(f"calibration: expected a scale of at least 0, got {self.scale}")
            return
        pairs = (self.knots, self.levels)
        if (
            not self.knots
            or len(self.knots) != len(self.levels)
            or any(list(values) != sorted(values) for values in pairs)
        ):
            raise InputError("calibration: expected one level per knot, both ascending")

    def __call__(self, logits: Tensor) -> Tensor:
        """Probabilities [...] of corrected logits [...], in [NEAREST, 1 - NEAREST]."""
        if self.kind != "isotonic":
            return torch.sigmoid(self.scale * logits + self.shift).clamp(NEAREST, 1 - NEAREST)
        knots, levels = (
            torch.tensor(values, dtype=logits.dtype, device=logits.device) for values in (self.knots, self.levels)
        )
        return interpolated(logits, knots, levels).clamp(NEAREST, 1 - NEAREST)


def interpolated(at: Tensor, knots: Tensor, levels: Tensor) -> Tensor:
    """The line through (knots [N], levels [N]) at [...]; constant beyond its ends."""
    if len(knots) == 1:
        return levels.expand(at.shape).clone()
    right = torch.searchsorted(knots, at.contiguous()).clamp(1, len(knots) - 1)
    low, high = knots[right - 1], knots[right]
    share = ((at - low) / (high - low).clamp(min=torch.finfo(knots.dtype).tiny)).clamp(0, 1)
    return torch.lerp(levels[right - 1], levels[right], share)


@dataclass(frozen=True)
class Calibration:
    """The maps that turn a head's outputs into probabilities.

    maps         one per output of the head
    temperature  T of the running product; 1: the maps alone
    """

    maps: tuple[ProbabilityMap, ...]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.maps or not 0 < self.temperature < float("inf"):
            raise InputError(f"calibration: expected maps and a temperature above 0, got {self.temperature}")

    def probs(self, logits: Tensor) -> Tensor:
        """Probabilities of corrected logits: [...] of a head with one output, [..., outputs] of one with several.

        They include the temperature of the product: a policy multiplies them.
        """
        return self.token_probs(logits) ** (1 / self.temperature)

    def token_probs(self, logits: Tensor) -> Tensor:
        """Each token's own probability: as `probs`, without the temperature of the product."""
        if len(self.maps) == 1:
            return self.maps[0](logits)
        return torch.stack([output_map(logits[..., output]) for output, output_map in enumerate(self.maps)], -1)

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {"maps": [_shown(output_map) for output_map in self.maps], "temperature": self.temperature}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Calibration:
        """Read strictly. Raises InputError for fields that are missing, unknown or of the wrong type."""
        if not isinstance(value, Mapping) or set(value) != {"maps", "temperature"}:
            raise InputError("calibration: expected maps and temperature, and nothing else")
        try:
            return cls(tuple(_read(entry) for entry in value["maps"]), float(value["temperature"]))
        except (TypeError, ValueError, KeyError) as error:
            raise InputError(f"calibration: expected numbers, got {error}") from error


def _shown(output_map: ProbabilityMap) -> dict[str, Any]:
    if output_map.kind == "isotonic":
        return {"kind": output_map.kind, "knots": list(output_map.knots), "levels": list(output_map.levels)}
    return {"kind": output_map.kind, "scale": output_map.scale, "shift": output_map.shift}


def _read(value: Mapping[str, Any]) -> ProbabilityMap:
    fields: Sequence[str] = ("knots", "levels") if value["kind"] == "isotonic" else ("scale", "shift")
    if set(value) != {"kind", *fields}:
        raise InputError(
            f"calibration: expected kind, {' and '.join(fields)} of {value['kind']}, got {', '.join(value)}"
        )
    if value["kind"] == "isotonic":
        return ProbabilityMap(
            "isotonic", knots=tuple(map(float, value["knots"])), levels=tuple(map(float, value["levels"]))
        )
    return ProbabilityMap(str(value["kind"]), scale=float(value["scale"]), shift=float(value["shift"]))

"""Acceptance from four numbers that every draft step has: logistic regressions, fitted in seconds. No state is read.

    python -m analysis.heads statistics=[TRACES]                  writes statistics.json
    python -m toolkit.decode method=rate statistics=FOLDER/statistics.json

All four are of q, the draft's *unwarped* distribution: at temperature 0 the warped one is 1 and 0, and says nothing.

    log odds    of its largest probability
    log ratio   of its two largest
    log q       of the drawn token
    entropy     nats

Three outputs, each with weights of its own: `drawn` is about the token just drawn, `position` about this position before its
token is drawn (it reads no log q), `following` about the next position, if the drawn token is accepted. A regression reads the
numbers, or also their products, and may have an intercept by depth in the round. There are no trees: hundreds of them cannot be
read, and would need scikit-learn at every token.

The numbers are taken in float32, as recordings hold them, and all else is in float64: a replay equals live decoding.

Shapes: B rows, n numbers, F inputs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from toolkit.acceptance.calibration.by_depth import Calibration
from toolkit.config.notes import File
from toolkit.engine.engine import engine_of
from toolkit.errors import InputError, warn
from toolkit.files.atomic import parse_json_file, write_json
from toolkit.models.fingerprint import Weights
from toolkit.types import SMALLEST, Step

NUMBERS = ("log odds", "log ratio", "entropy", "log q")  # the drawn token's comes last: `position` is without it
OUTPUTS = ("drawn", "position", "following")
SHIPPED = Path(__file__).parent.parent / "assets" / "statistics.json"
HINT = "python -m analysis.heads statistics=[TRACES] writes one"


def numbers_of(step: Step, drawn: bool = True) -> Tensor:
    """The four numbers of a step whose token has been drawn [B, 4] float64; else the first three [B, 3]."""
    largest, second = step.top_probs.float().double().unbind(-1)
    numbers = [log_odds(step), _log(largest) - _log(second), step.entropy.float().double()]
    return torch.stack([*numbers, _log(step.token_prob.float().double())] if drawn else numbers, -1)


def log_odds(step: Step) -> Tensor:
    """Log odds [B] float64 of the largest probability of the draft's unwarped distribution, within those of SMALLEST."""
    largest = step.top_probs[..., 0].float().double().clamp(SMALLEST, 1 - SMALLEST)
    return largest.log() - (1 - largest).log()


def _log(probs: Tensor) -> Tensor:
    return probs.clamp(min=SMALLEST).log()


def input_names(numbers: Sequence[str]) -> list[str]:
    """The names of the numbers, and of the products of every two of them, themselves included."""
    pairs = [(first, second) for i, first in enumerate(numbers) for second in numbers[i:]]
    return [*numbers, *(f"{first} * {second}" for first, second in pairs)]


def inputs_of(numbers: Tensor) -> Tensor:
    """The numbers [..., n] with their products [..., F], in the order of `input_names`."""
    first, second = torch.triu_indices(numbers.shape[-1], numbers.shape[-1], device=numbers.device)
    return torch.cat([numbers, numbers[..., first] * numbers[..., second]], -1)


@dataclass(frozen=True)
class Logistic:
    """logit = bias + sum over inputs of weight * (input - mean) / deviation + the intercept of the depth.

    weights     by the name of the input: weight per standard deviation, mean, standard deviation
    intercepts  of depth 1, 2, ...; deeper ones have the last; (): none
    """

    bias: float
    weights: Mapping[str, tuple[float, float, float]]
    intercepts: tuple[float, ...] = ()

    def column(self, names: Sequence[str]) -> tuple[float, list[float]]:
        """The bias and the weights of the inputs as they are; 0 for those that are not read."""
        scaled = {name: weight / deviation for name, (weight, _, deviation) in self.weights.items()}
        shift = sum(scaled[name] * mean for name, (_, mean, _) in self.weights.items())
        return self.bias - shift, [scaled.get(name, 0.0) for name in names]

    def intercept(self, depth: int) -> float:
        """What a token at this depth in the round adds."""
        return self.intercepts[min(depth, len(self.intercepts)) - 1] if self.intercepts else 0.0

    def logits(self, inputs: Tensor, names: Sequence[str], depth: Tensor) -> Tensor:
        """The logits [n] of inputs [n, F] at depths [n]."""
        bias, weights = self.column(names)
        logits = inputs @ inputs.new_tensor(weights) + bias
        if not self.intercepts:
            return logits
        return logits + inputs.new_tensor(self.intercepts)[depth.clamp(max=len(self.intercepts)) - 1]

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        names = ("weight", "mean", "deviation")
        weights = {name: dict(zip(names, values, strict=True)) for name, values in self.weights.items()}
        return {"bias": self.bias, "weights": weights, "intercepts": list(self.intercepts)}

    @classmethod
    def of(cls, facts: Mapping[str, Any], names: Sequence[str]) -> Logistic:
        """Read `facts`. Raises KeyError, TypeError or ValueError for what they are not."""
        weights = {
            str(name): (float(entry["weight"]), float(entry["mean"]), float(entry["deviation"]))
            for name, entry in facts["weights"].items()
        }
        logistic = cls(float(facts["bias"]), weights, tuple(map(float, facts["intercepts"])))
        if unknown := set(weights) - set(names):
            raise ValueError(f"unknown inputs {', '.join(sorted(unknown))}")
        values = [logistic.bias, *logistic.intercepts, *(value for entry in weights.values() for value in entry)]
        if not all(map(math.isfinite, values)) or not all(deviation > 0 for _, _, deviation in weights.values()):
            raise ValueError("weights that are not numbers, or deviations that are not above 0")
        return logistic


@dataclass(frozen=True)
class StatisticsEstimator:
    """P(accepted) from statistics of the draft's unwarped distribution.

    path     what `analysis.heads statistics=` wrote; null: the weights that ship, of the toy target with two drafts
    outputs  the regressions by name (`OUTPUTS`): set by `bind`
    calibration  by depth, of the same file: likewise
    """

    path: Annotated[str | None, File()] = None
    outputs: Mapping[str, Logistic] | None = None
    calibration: Calibration = field(default_factory=Calibration)
    _tensors: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def bind(self, pair: Any) -> StatisticsEstimator:
        """The estimator with its weights read. Raises InputError for a file of another kind.

        Warns if a file that was named was fitted to another draft.
        """
        path = self.path or SHIPPED
        outputs, record = read_statistics(path)
        fitted, sketches = record.get("drafts", []), record.get("draft_weights", {})
        if self.path is not None and pair is not None and fitted:
            checked, key = engine_of(pair).heads, ("statistics", *map(str, fitted))
            if key not in checked:  # all weights are read for it: once per pair
                weights = (Weights(str(hash_), sketches.get(str(hash_))) for hash_ in fitted)
                checked[key] = all(each.not_of(pair.draft) for each in weights)
            if checked[key]:
                warn(
                    f"{self.path} was fitted to another draft than this pair's: analysis.heads statistics= fits one to it"
                )
        return replace(self, outputs=outputs, calibration=Calibration.of(record.get("calibration", {}), path))

    def drawn_probs(self, step: Step) -> tuple[Tensor, Tensor]:
        """P(y_k accepted) and P(y_{k+1} accepted) [B] each, given that the ones before are."""
        probs = zip(("drawn", "following"), self.drawn_logits(step), strict=True)
        accepted, following = (self.calibration.prob(name, logits, step.depth) for name, logits in probs)
        return accepted.to(step.entropy.dtype), following.to(step.entropy.dtype)

    def drawn_logits(self, step: Step) -> tuple[Tensor, Tensor]:
        """The regressions' logits of the same [B] each, float64: not calibrated."""
        outputs = self._bound()
        inputs = inputs_of(numbers_of(step))
        if inputs.device not in self._tensors:
            columns = [outputs[name].column(input_names(NUMBERS)) for name in ("drawn", "following")]
            per_output = inputs.new_tensor([weights for _, weights in columns])
            self._tensors[inputs.device] = (
                per_output.T.contiguous(),
                inputs.new_tensor([bias for bias, _ in columns]),
            )
        weights, biases = self._tensors[inputs.device]
        accepted, following = (inputs @ weights + biases).unbind(-1)
        return (
            accepted + outputs["drawn"].intercept(step.depth),
            following + outputs["following"].intercept(step.depth),
        )

    def drawn_prob(self, step: Step) -> Tensor:
        """P(y_k accepted) [B], given that the ones before it are."""
        return self.drawn_probs(step)[0]

    def position_prob(self, step: Step) -> Tensor:
        """P(whatever token is drawn here is accepted) [B], given that the ones before are; sum min(p, q) at this position.

        It reads q alone: the step's token may be drawn or not. Drafts that make whole blocks decide with it.
        """
        position = self._bound()["position"]
        inputs = inputs_of(numbers_of(step, drawn=False))
        bias, weights = position.column(input_names(NUMBERS[:-1]))
        logits = inputs @ inputs.new_tensor(weights) + (bias + position.intercept(step.depth))
        return self.calibration.prob("position", logits, step.depth).to(step.entropy.dtype)

    def _bound(self) -> Mapping[str, Logistic]:
        assert self.outputs is not None, "bind the estimator to a pair first"
        return self.outputs


def read_statistics(path: Path | str) -> tuple[dict[str, Logistic], dict[str, Any]]:
    """The regressions in a file, and all that the file says. Raises InputError for a file of another kind."""
    content = parse_json_file(path)
    if not isinstance(content, dict) or set(content.get("outputs") or ()) != set(OUTPUTS):
        raise InputError(f"{path} holds no statistics of acceptance (outputs {', '.join(OUTPUTS)}): {HINT}")
    outputs = {}
    for name in OUTPUTS:
        numbers = NUMBERS[:-1] if name == "position" else NUMBERS
        try:
            outputs[name] = Logistic.of(content["outputs"][name], input_names(numbers))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: the regression `{name}` cannot be read ({error}): {HINT}") from None
    return outputs, content


def write_statistics(path: Path, outputs: Mapping[str, Logistic], record: Mapping[str, Any]) -> Path:
    """Write the regressions, and what else a reader should know of them."""
    return write_json(path, {"outputs": {name: outputs[name].facts() for name in OUTPUTS}, **record})


@cache
def announce(line: str) -> None:
    """Print a line to stderr, once per process."""
    print(line, file=sys.stderr)

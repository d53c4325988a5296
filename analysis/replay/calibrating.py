"""Samples of a trace that calibrations are fitted to and judged by: single tokens, and products of a round's tokens.

position    a token that the draft drew after accepted text, with its acceptance probability (`head_scores.drawn_samples`)
following   of a pre-read head: the token after an accepted one, with alpha = sum_x min(p, q)(x), its probability beforehand
product     the first k tokens of a round that starts anywhere, with the probability that all are accepted. That is the last
            token's probability if those before are accepted, else 0. A policy compares it with its threshold

Every probability is the exact one given the text before it, so that nothing but the text's own draw is random.

Shapes: P positions, S steps, O outputs of a head, n samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from analysis.replay.head_folders import Contender
from analysis.replay.head_scores import drawn_samples
from toolkit.acceptance import PrereadHead
from toolkit.acceptance.calibration import stored
from toolkit.acceptance.calibration.fit import fit_map, fit_temperature
from toolkit.acceptance.calibration.maps import Calibration
from toolkit.acceptance.calibration.scores import CalibrationScores
from toolkit.errors import InputError
from toolkit.files.atomic import copy_file
from toolkit.trace import Trace
from toolkit.trace.rounds import Geometry, logits_at, step_at

Probabilities = Callable[[Tensor], Tensor]  # of raw logits [..., O or none]
SMALLEST = 1e-9  # distance of a probability from 0 and 1 when it becomes a logit again


@dataclass(frozen=True)
class Scored:
    """A trace with one head's raw logits, per step or per start and depth (`toolkit.trace.rounds.logits_at`)."""

    trace: Trace
    logits: Tensor
    preread: bool

    @classmethod
    def of(cls, contender: Contender, trace: Trace, draft: object) -> Scored:
        scored = contender.scored(trace, draft)
        return cls(scored, scored.estimates[contender.estimate], isinstance(contender.head, PrereadHead))

    def positions(self) -> tuple[Tensor, Tensor]:
        """Raw logits [n] of drawn tokens, and their acceptance probabilities [n]."""
        logits, labels, _ = drawn_samples(self.trace, self.logits, self.preread)
        return logits, labels

    def following(self) -> tuple[Tensor, Tensor]:
        """Raw logits [n] of the second output of a pre-read head at accepted tokens, and the next positions' alphas [n]."""
        trace = self.trace
        ends = torch.zeros(trace.num_positions, dtype=torch.bool)
        ends[trace.text_first[1:] - 1] = True
        next_step, exists = step_at(trace, Geometry.of(trace), torch.arange(trace.num_positions), 2)
        accepted = (trace.accepted & exists & ~ends).nonzero().squeeze(1)
        return logits_at(trace, self.logits, accepted, 1)[:, 1], trace.alpha[next_step[accepted]]

    def products(self, probs: Probabilities, max_depth: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Per depth k: (k, product of the first k tokens' probabilities [n], probability that all are accepted [n])."""
        trace, geometry = self.trace, Geometry.of(self.trace)
        starts = torch.arange(trace.num_positions)
        product = torch.ones(len(starts), dtype=torch.float64)
        every = torch.ones(len(starts), dtype=torch.bool)
        for depth in range(1, max_depth + 1):
            step, drawn = step_at(trace, geometry, starts, depth)
            reading, recorded = (step, drawn) if self.preread else step_at(trace, geometry, starts, depth + 1)
            # A round that was not recorded this far says nothing of deeper tokens. Nor does a round whose tokens were all
            # accepted up to a stop string: the target's probabilities after the string are not known.
            judged = (geometry.run < geometry.left) | (geometry.left >= depth)
            every = every & drawn & recorded & judged
            probabilities = probs(logits_at(trace, self.logits, reading, depth if self.preread else depth + 1).double())
            product = torch.where(every, product * (probabilities[:, 0] if self.preread else probabilities), product)
            alive = geometry.run[starts] >= depth - 1
            accepted = torch.where(alive, trace.accept_prob[step].double(), 0.0)
            yield depth, product[every], accepted[every]


def fit(samples: Sequence[Scored], shift: float, kind: str, max_depth: int) -> Calibration:
    """The calibration of a head, from all samples together. shift: what undoes the class weight. Raises InputError."""
    parts = [[sample.positions() for sample in samples]]
    if samples[0].preread:
        parts.append([sample.following() for sample in samples])
    maps = tuple(
        fit_map(kind, _joined(logits for logits, _ in part) + shift, _joined(p for _, p in part)) for part in parts
    )
    alone = Calibration(maps)
    pooled = [
        (p, label)
        for sample in samples
        for _, p, label in sample.products(lambda z: alone.token_probs(z + shift), max_depth)
    ]
    return Calibration(maps, fit_temperature(_joined(p for p, _ in pooled), _joined(label for _, label in pooled)))


def fit_beside(
    contender: Contender,
    samples: Sequence[Scored],
    folder: Path,
    kind: str,
    max_depth: int,
    fitted_to: Mapping[str, str],
) -> Calibration:
    """`fit`, saved in a folder beside a copy of the head. fitted_to: jobs of the recordings, by name. Raises InputError."""
    calibration = fit(samples, float(contender.head.config["log_w_rej"]), kind, max_depth)
    for path in contender.files:
        if path.parent != folder:
            copy_file(path, folder / path.name)
    facts = {"kind": kind, "fitted_to": dict(fitted_to), "max_depth": max_depth}
    stored.save(folder, type(contender.head), calibration, facts)
    return calibration


def versions(calibration: Calibration, shift: float) -> dict[str, tuple[Probabilities, Probabilities]]:
    """Name -> (a token's own probability, what is multiplied), of raw logits: as trained, class weight undone, calibrated."""

    def raw(z: Tensor) -> Tensor:
        return torch.sigmoid(z)

    def corrected(z: Tensor) -> Tensor:
        return torch.sigmoid(z + shift)

    return {
        "raw": (raw, raw),
        "corrected": (corrected, corrected),
        "calibrated": (lambda z: calibration.token_probs(z + shift), lambda z: calibration.probs(z + shift)),
    }


def judge(
    sample: Scored, calibration: Calibration, shift: float, max_depth: int
) -> tuple[list[dict[str, float | str]], list[dict[str, float | str]]]:
    """Lines of scores and of reliability bins: per version of the probabilities and per scope.

    Scopes: position, following (of pre-read heads), product at each depth ("product 3"), and at all depths ("product").
    """
    lines: list[dict[str, float | str]] = []
    bins: list[dict[str, float | str]] = []
    for version, (own, multiplied) in versions(calibration, shift).items():
        logits, labels = sample.positions()
        if sample.preread:
            by_scope = {"position": _judged(own(torch.stack([logits, logits], -1).double())[:, 0], labels)}
            logits, labels = sample.following()
            by_scope["following"] = _judged(own(torch.stack([logits, logits], -1).double())[:, 1], labels)
        else:
            by_scope = {"position": _judged(own(logits.double()), labels)}
        pooled = CalibrationScores(sync_on_compute=False)
        for depth, product, label in sample.products(multiplied, max_depth):
            if len(product):
                by_scope[f"product {depth}"] = _judged(product, label, pooled)
        by_scope["product"] = pooled
        for scope, scores in by_scope.items():
            values = {name: float(value) for name, value in scores.compute().items()}
            lines.append({"version": version, "scope": scope, "samples": float(scores.counts.sum()), **values})
            bins += [{"version": version, "scope": scope, **row} for row in scores.reliability()]
    return lines, bins


def _judged(probs: Tensor, labels: Tensor, also: CalibrationScores | None = None) -> CalibrationScores:
    if not len(probs):
        raise InputError("no drafted token was read after its position: record traces with a larger max_drafted")
    scores = CalibrationScores(sync_on_compute=False)
    for metric in (scores, *([also] if also is not None else [])):
        metric.update(torch.logit(probs.double(), eps=SMALLEST), labels)
    return scores


def _joined(parts: Iterator[Tensor]) -> NDArray[np.float64]:
    return torch.cat(list(parts)).double().numpy()

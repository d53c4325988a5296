"""Positions of recordings that acceptance is fitted to, and how estimates of it are scored. No model runs.

Every position of a response is a sample, at a depth that is drawn from the rounds that could contain it
(`toolkit.training.recorded`). Its labels are probabilities: min(1, p/q) of the drawn token, sum min(p, q) of the position, and
that of the next position where the drawn token was accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toolkit.acceptance.calibration.scores import CalibrationScores
from toolkit.acceptance.inputs import Inputs
from toolkit.acceptance.statistics import OUTPUTS, numbers_of
from toolkit.errors import InputError
from toolkit.trace import Trace
from toolkit.trace.steps import RecordedStep
from toolkit.training.recorded import TracedStates


@dataclass(frozen=True)
class Samples:
    """Positions that a round may draft at.

    steps [n]        of the recording
    numbers [n, 4]   of the draft's unwarped q (`toolkit.acceptance.statistics`)
    depth [n]        in the round, from 1
    labels           by output [n] in [0, 1]; not a number where there is none
    sequence [n]     which text of the recording; the replicates of a text are one
    """

    steps: Tensor
    numbers: Tensor
    depth: Tensor
    labels: Mapping[str, Tensor]
    sequence: Tensor

    def where(self, chosen: Tensor) -> Samples:
        """Some of the samples [n] bool."""
        labels = {name: values[chosen] for name, values in self.labels.items()}
        return Samples(self.steps[chosen], self.numbers[chosen], self.depth[chosen], labels, self.sequence[chosen])

    def of(self, output: str) -> tuple[Tensor, Tensor, Tensor]:
        """What an output reads [n, numbers], the depth [n] and the label [n], where there is one."""
        labels = self.labels[output]
        labelled = ~labels.isnan()
        numbers = self.numbers[:, :-1] if output == "position" else self.numbers
        return numbers[labelled], self.depth[labelled], labels[labelled]

    @classmethod
    def join(cls, parts: Sequence[Samples]) -> Samples:
        """All samples of several recordings; their sequences are numbered on, and `steps` are each recording's own."""
        sizes = np.cumsum([0, *(int(part.sequence.max()) + 1 for part in parts)])
        sequence = torch.cat([part.sequence + int(first) for part, first in zip(parts, sizes, strict=False)])
        labels = {name: torch.cat([part.labels[name] for part in parts]) for name in OUTPUTS}
        steps, numbers, depth = (torch.cat([getattr(p, name) for p in parts]) for name in ("steps", "numbers", "depth"))
        return cls(steps, numbers, depth, labels, sequence)


def samples(trace: Trace, deepest: int, seed: int = 0) -> Samples:
    """The positions of a recording, with depths up to `deepest`. Raises InputError for statistics that are not numbers."""
    states = TracedStates(trace, range(trace.num_texts), torch.zeros(1, 1), Inputs(round_depth=deepest), seed=seed)
    assert states.depths is not None
    numbers = numbers_of(RecordedStep(trace, 1, states.steps))
    labels = {"drawn": states.labels[:, 0], "position": trace.alpha[states.steps], "following": states.labels[:, 1]}
    labels = {name: values.double().clamp(0, 1) for name, values in labels.items()}
    finite = numbers.isfinite().all(1) & labels["drawn"].isfinite() & labels["position"].isfinite()
    if broken := int((~finite).sum()):
        raise InputError(
            f"statistics: {broken} of {len(numbers)} recorded positions hold what is not a number: record them again"
        )
    sequences = trace.rows[trace.step_sequences[states.steps]]
    drawn = Samples(states.steps, numbers, states.depths, labels, sequences)
    return drawn if trace.certain is None else drawn.where(~trace.certain[states.steps])  # nobody asks there


def split(sequence: Tensor, share: float, seed: int) -> Tensor:
    """Which samples [n] belong to the share of sequences that is held out. Raises InputError where a part is empty."""
    different = sequence.unique()
    count = round(share * len(different))
    if not 0 < count < len(different):
        raise InputError(
            f"statistics: expected sequences to fit to and some to hold out ({share:g} of them), got {len(different)}"
        )
    order = np.random.default_rng(seed).permutation(len(different))
    return torch.isin(sequence, different[order[:count]])


def score(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Log loss, AUC and ECE of logits [n] against labels [n] in [0, 1], and both means."""
    scored = CalibrationScores(sync_on_compute=False)
    scored.update(logits, labels)
    computed = {key: float(value) for key, value in scored.compute().items()}
    return {
        "log_loss": computed["log_loss"], "AUC": computed["auroc"], "ECE": computed["ece"],
        "mean_estimate": float(torch.sigmoid(logits).mean()), "mean_label": float(labels.mean()),
    }  # fmt: skip

"""Simpler predictors to compare a head with, by AUROC and by calibrated log loss on the same validation positions.

probe       logistic regression from the states (or features), each scaled to unit variance, with a ridge penalty of
            RIDGE. It is fitted by L-BFGS to soft labels of at most PROBE_POSITIONS training positions
confidence  the draft's unwarped probability of the drafted token

If a head is no better than these, it was trained badly, or the states tell nothing more.

Shapes: P positions, F inputs, O outputs of the head (1, or 2 of a pre-read one).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from toolkit.acceptance.calibration.scores import CalibrationScores
from toolkit.training.examples import Positions

PROBE_POSITIONS, RIDGE, ITERATIONS = 20_000, 1e-4, 100
PROBE, CONFIDENCE = "probe", "confidence"
SMALLEST = 1e-6  # distance of a confidence from 0 and 1
COMPARED = ("auroc", "log_loss_calibrated")


class LinearProbe(nn.Module):
    """logits [P, O] of inputs [P, F]."""

    def __init__(self, mean: Tensor, deviation: Tensor, num_outputs: int):
        super().__init__()
        self.mean, self.deviation = mean, deviation
        self.linear = nn.Linear(len(mean), num_outputs)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.linear((inputs.float() - self.mean) / self.deviation)
        return logits


def fit_probe(batches: Iterable[Positions]) -> LinearProbe:
    """The probe, fitted to the first PROBE_POSITIONS positions."""
    parts, num_positions = list[Positions](), 0
    for batch in batches:
        parts.append(batch)
        num_positions += len(batch.labels)
        if num_positions >= PROBE_POSITIONS:
            break
    inputs = torch.cat([part.hidden.float() for part in parts])[:PROBE_POSITIONS]
    labels = torch.cat([part.labels.float().reshape(len(part.labels), -1) for part in parts])[:PROBE_POSITIONS]
    deviation = inputs.std(0, correction=0)
    probe = LinearProbe(inputs.mean(0), torch.where(deviation > 1e-6, deviation, 1.0), labels.shape[1])
    optimizer = torch.optim.LBFGS(probe.parameters(), max_iter=ITERATIONS, line_search_fn="strong_wolfe")
    has_label = ~labels.isnan()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(probe(inputs)[has_label], labels[has_label])
        loss = loss + RIDGE / 2 * probe.linear.weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return probe.requires_grad_(False)


def references(
    train: Iterable[Positions], validation: Iterable[Positions], suffixes: Sequence[str]
) -> dict[str, float]:
    """probe/auroc, probe/log_loss_calibrated, confidence/... on the validation positions.

    suffixes  of the head's outputs ("" of the only one); the confidence is compared with the first output
    """
    probe = fit_probe(train)
    probed = [CalibrationScores(sync_on_compute=False) for _ in suffixes]
    confident = CalibrationScores(sync_on_compute=False)
    for batch in validation:
        labels = batch.labels.reshape(len(batch.labels), -1)
        logits = probe(batch.hidden)
        for output, scores in enumerate(probed):
            has_label = ~labels[:, output].isnan()
            scores.update(logits[has_label, output], labels[has_label, output])
        confident.update(torch.logit(batch.confidence.double(), eps=SMALLEST), labels[:, 0])
    results: dict[str, float] = {}
    for suffix, scores in zip(suffixes, probed, strict=True):
        results |= {f"{PROBE}/{name}{suffix}": float(scores.compute()[name]) for name in COMPARED}
    return results | {f"{CONFIDENCE}/{name}{suffixes[0]}": float(confident.compute()[name]) for name in COMPARED}


def comparison(scores: Mapping[str, float], suffixes: Sequence[str]) -> list[tuple[str, float, float]]:
    """(name, AUROC, calibrated log loss) of the head, the probe and the confidence, per output, where they are known."""
    names = {"val": "head", PROBE: "linear probe", CONFIDENCE: "draft confidence"}
    lines = []
    for suffix in suffixes:
        output = f" ({suffix.lstrip('_')})" if suffix else ""
        for key, label in names.items():
            if f"{key}/auroc{suffix}" in scores:
                auroc, loss = (float(scores[f"{key}/{name}{suffix}"]) for name in COMPARED)
                lines.append((label + output, auroc, loss))
    return lines


def complaint(scores: Mapping[str, float], suffixes: Sequence[str]) -> str | None:
    """One line if a simpler predictor is at least as good as the head, by calibrated log loss; else None."""
    for suffix in suffixes:
        (head, _, own), *others = comparison(scores, [suffix])
        better = [(who, loss) for who, _, loss in others if loss <= own]
        if better:
            who, loss = min(better, key=lambda entry: entry[1])
            return (
                f"warning: the {head} is no better than the {who}: calibrated log loss {own:.4f} against {loss:.4f}; "
                "train on more, or decode without a head (method=confidence, method=tail)"
            )
    return None

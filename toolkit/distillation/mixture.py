"""Several losses at once, with weights that may change over the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from toolkit.config.notes import AtLeast
from toolkit.config.values import check_ranges
from toolkit.distillation.losses import Loss, Outlook
from toolkit.errors import InputError


@dataclass(frozen=True)
class Term:
    """A loss in a mixture. Its weight goes in a straight line over the training.

    loss    any loss
    weight  at the beginning
    final   at the end; None: as at the beginning
    """

    loss: Loss
    weight: Annotated[float, AtLeast(0)] = 1.0
    final: Annotated[float, AtLeast(0)] | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "loss.terms.")

    def at(self, progress: float) -> float:
        """The weight when this share of the training is done."""
        final = self.weight if self.final is None else self.final
        return self.weight + (final - self.weight) * progress


@dataclass(frozen=True)
class Mixture(Loss):
    """The weighted sum of losses.

    terms  {NAME: loss and weight}
    """

    terms: Mapping[str, Term]

    def __post_init__(self) -> None:
        terms = self.terms.values()
        if not any(term.weight for term in terms) or not any(term.at(1.0) for term in terms):
            raise InputError("loss.terms: expected a weight above 0 at the beginning and at the end, got none")

    def __call__(self, outlook: Outlook, progress: float = 0.0) -> Tensor:
        weighted = [
            term.at(progress) * term.loss(outlook, progress) for term in self.terms.values() if term.at(progress)
        ]
        total = weighted[0]
        for part in weighted[1:]:
            total = total + part
        return total

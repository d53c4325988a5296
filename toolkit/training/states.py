"""What heads are trained on: the draft's states at the positions that hold a drafted token, and their labels.

`data.features` chooses the source of the states: `OnlineStates`, `CachedStates` or `HybridStates`.

Shapes: P positions, D hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.training.batches import Examples


class Positions(NamedTuple):
    """A batch: the masked-in positions of some examples, one after another, without padding.

    hidden [P, D]   the draft's final state that has read the drafted token
    labels [P]      the token's probability of acceptance
    confidence [P]  the draft's own probability of the token, unwarped: what a head is compared with
    """

    hidden: Tensor
    labels: Tensor
    confidence: Tensor

    def emptied(self) -> Positions:
        """A batch of no positions: the share of a process for which too few examples are left."""
        return Positions(*(values[:0] for values in self))


class States(Examples):
    """Positions of one split, by example.

    Examples without positions are left out, so example numbers differ from the data set's.
    """

    num_positions: int

    @abstractmethod
    def batch(self, examples: Sequence[int]) -> Positions:
        """The positions of these examples."""


def joined(parts: Sequence[Positions]) -> Positions:
    """One batch of several."""
    return parts[0] if len(parts) == 1 else Positions(*(torch.cat(values) for values in zip(*parts, strict=True)))


def check_labels(labels: Tensor, where: str, mend: str) -> None:
    """Raises InputError, one line, unless all labels [P] are numbers in [0, 1]."""
    wrong = ~((labels >= 0) & (labels <= 1))
    if bool(wrong.any()):
        raise InputError(
            f"{where}: labels are probabilities of acceptance, expected numbers in [0, 1]; {int(wrong.sum())} of {len(labels)} "
            f"are not, the first is {float(labels[wrong][0]):g}; {mend}"
        )

"""Estimators: P(accepted) in [0, 1] of a drafted token, from what the draft shows. Policies turn them into stop or go.

Each says which token it is about: `drawn_prob` the one just drawn, `read_prob` the one the state has just read (one
earlier).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from toolkit.acceptance.head import AcceptanceHead, as_probs, load_for
from toolkit.errors import InputError
from toolkit.types import DraftStep


@dataclass
class HeadEstimator:
    """A trained head reading the state that has read the token.

    head       folder of a head; None: the one that ships with the pair
    corrected  undo the class weight's shift before the sigmoid (published: False)
    """

    head: str | None = None
    corrected: bool = False
    module: AcceptanceHead | None = None

    def bind(self, pair: Any) -> HeadEstimator:
        """Load the head and check that it belongs to the pair's draft. Raises InputError."""
        folder = self.head or pair.head
        if folder is None:
            raise InputError("this method needs an acceptance head: expected head=FOLDER, got none")
        return HeadEstimator(folder, self.corrected, load_for(pair, folder))

    def read_prob(self, step: DraftStep) -> Tensor:
        """P(y_{k-1} accepted) [B], given that the ones before it are."""
        assert self.module is not None, "bind the estimator to a pair first"
        return as_probs(self.module, step.hidden, self.corrected)


class Confidence:
    """The draft's own probability of the token it drew, unwarped."""

    def bind(self, pair: Any) -> Confidence:
        """Needs nothing."""
        return self

    def drawn_prob(self, step: DraftStep) -> Tensor:
        """q(y_k) [B]."""
        return step.token_prob

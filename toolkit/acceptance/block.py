"""Acceptance of a block's positions before their tokens are drawn: DSpark's own confidence head, or what stands for it.

The head is one linear layer on [state, Markov embedding of the token before], which is what a step's `hidden` is
(arXiv:2607.05147 and `speculators.models.dspark`). It was trained on sum min(p, q) at its position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from toolkit.acceptance.estimators import PrereadEstimator
from toolkit.acceptance.statistics import StatisticsEstimator
from toolkit.config.notes import File, Head
from toolkit.types import Step


@dataclass(frozen=True)
class ConfidenceHeadEstimator:
    """A block draft's confidence head at work; recorded steps must hold states (`reads_hidden`)."""

    reads_hidden: ClassVar[bool] = True
    layer: Any

    def bind(self, pair: Any) -> ConfidenceHeadEstimator:
        """Return the estimator itself."""
        return self

    @torch.inference_mode()
    def position_prob(self, step: Step) -> Tensor:
        """P(x_k accepted) [B] before x_k is drawn, given that the ones before it are."""
        weight = self.layer.proj.weight
        logits = self.layer(step.hidden.to(weight.device, weight.dtype))
        return torch.sigmoid(logits.float()).to(step.hidden.device)


@dataclass(frozen=True)
class BlockEstimator:
    """The confidence head that a draft brings; else a trained head of ours (`head`), else statistics of q.

    head        folder of a pre-read head, which takes the place of the draft's own; None: the draft's, or the pair's
    statistics  file of a `StatisticsEstimator`, likewise
    """

    head: Annotated[str | None, Head()] = None
    statistics: Annotated[str | None, File()] = None

    def bind(self, pair: Any) -> ConfidenceHeadEstimator | PrereadEstimator | StatisticsEstimator:
        """The estimator that stands for the pair's draft. Raises InputError for a head of another draft."""
        own = getattr(getattr(pair, "draft", None), "confidence_head", None)
        if own is not None and self.head is None and self.statistics is None:
            return ConfidenceHeadEstimator(own)
        if self.statistics is not None and self.head is None:
            return StatisticsEstimator(self.statistics).bind(pair)
        return PrereadEstimator(self.head, self.statistics).bind(pair)

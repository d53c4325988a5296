"""Acceptance of a block's positions before their tokens are drawn: DSpark's own confidence head, or what stands for it.

The head is one linear layer on [state, Markov embedding of the token before], which is what a step's `hidden` is
(arXiv:2607.05147 and `speculators.models.dspark`). It was trained on sum min(p, q) at its position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from toolkit.acceptance.calibration.by_depth import Calibration
from toolkit.acceptance.estimators import PrereadEstimator
from toolkit.acceptance.statistics import StatisticsEstimator
from toolkit.config.notes import File, Head
from toolkit.errors import InputError
from toolkit.files.atomic import parse_json_file
from toolkit.types import Step


@dataclass(frozen=True)
class ConfidenceHeadEstimator:
    """A block draft's confidence head at work, calibrated by depth; recorded steps must hold states (`reads_hidden`)."""

    reads_hidden: ClassVar[bool] = True
    layer: Any
    calibration: Calibration = field(default_factory=Calibration)

    def bind(self, pair: Any) -> ConfidenceHeadEstimator:
        """Return the estimator itself."""
        return self

    def position_prob(self, step: Step) -> Tensor:
        """P(x_k accepted) [B] before x_k is drawn, given that the ones before it are."""
        return self.calibration.prob("position", self.logits(step), step.depth)

    @torch.inference_mode()
    def logits(self, step: Step) -> Tensor:
        """The raw logits [B] of a step."""
        weight, hidden = self.layer.proj.weight, step.hidden
        logits: Tensor = self.layer(hidden.to(weight.device, weight.dtype))
        return logits.float().to(hidden.device)


@dataclass(frozen=True)
class BlockEstimator:
    """The confidence head that a draft brings; else a trained head of ours (`head`), else statistics of q.

    head        folder of a pre-read head, which takes the place of the draft's own; None: the draft's, or the pair's
    statistics  file of a `StatisticsEstimator`, likewise
    calibration  calibration.json of `analysis.heads calibration=[TRACES]` for the draft's own head; None: as it was trained
    """

    head: Annotated[str | None, Head()] = None
    statistics: Annotated[str | None, File()] = None
    calibration: Annotated[str | None, File()] = None

    def bind(self, pair: Any) -> ConfidenceHeadEstimator | PrereadEstimator | StatisticsEstimator:
        """The estimator that stands for the pair's draft.

        Raises InputError for a head of another draft, and for a calibration where the draft's own head is not what is read.
        """
        own = getattr(getattr(pair, "draft", None), "confidence_head", None)
        own = own if self.head is None and self.statistics is None else None
        if self.calibration is not None:
            path = Path(self.calibration)
            calibration = Calibration.of(parse_json_file(path), path)
            if own is None or "position" not in calibration.outputs:
                raise InputError(
                    f"calibration={path}: expected one of the draft's own confidence head (output `position`), and neither "
                    f"head nor statistics, got {', '.join(calibration.outputs)}"
                )
            return ConfidenceHeadEstimator(own, calibration)
        if own is not None:
            return ConfidenceHeadEstimator(own)
        if self.statistics is not None and self.head is None:
            return StatisticsEstimator(self.statistics).bind(pair)
        return PrereadEstimator(self.head, self.statistics).bind(pair)

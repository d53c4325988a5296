"""Estimators give P(accepted) in [0, 1] of a drafted token, from the draft's outputs. Policies turn them into stop or go.

The name of a method says which token it is about. `read_prob` is about the token that the state has just read (y_{k-1}),
and `drawn_prob` about the token just drawn (y_k). `drawn_probs` is about the token just drawn and the one after it, and
`position_prob` about this position, before its token is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from toolkit.acceptance.calibration.by_depth import Calibration
from toolkit.acceptance.folder import Scorer, inside, scorer
from toolkit.acceptance.preread import PrereadHead
from toolkit.acceptance.statistics import StatisticsEstimator, announce
from toolkit.config.notes import File, Head
from toolkit.errors import InputError
from toolkit.types import Step


@dataclass(frozen=True)
class HeadEstimator:
    """A trained acceptance head reading the state that has read the token.

    head       folder of a head; None: the one that ships with the pair
    corrected  undo the class weight's shift before the sigmoid (published: False); with a calibration it is undone always
    scorer     the head at work, set by `bind`; a step gives its logits (`Step.head_logits`): computed, or recorded
    calibration  what lies beside the head, set by `bind`
    """

    head: Annotated[str | None, Head()] = None
    corrected: bool = False
    scorer: Scorer | None = None
    log_w_rej: float = 0.0
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def num_history(self) -> int:
        """The number of positions before a step that its head reads."""
        return int(getattr(self.scorer, "num_history", 0))

    def bind(self, pair: Any) -> HeadEstimator:
        """Load the head and check that it belongs to the pair's draft. Raises InputError."""
        folder = _folder(self.head, pair)
        head_scorer = scorer(pair, folder, "survival")
        return replace(
            self, head=folder, scorer=head_scorer, log_w_rej=head_scorer.module.log_w_rej,
            calibration=Calibration.beside(folder),
        )  # fmt: skip

    def read_prob(self, step: Step) -> Tensor:
        """P(y_{k-1} accepted) [B], given that the ones before it are."""
        assert self.scorer is not None, "bind the estimator to a pair first"
        undone = self.corrected or "read" in self.calibration.outputs
        logits = step.head_logits(self.scorer) + (self.log_w_rej if undone else 0.0)
        return self.calibration.prob("read", logits, step.depth - 1)


@dataclass(frozen=True)
class PrereadEstimator:
    """A pre-read head: it scores y_k before it is read, and the token after it.

    head        folder of heads; None: the one that ships with the pair
    statistics  file of a `StatisticsEstimator`, which takes the place of a head where there is none; None: weights that ship
    calibration  what lies beside the head, set by `bind`
    The folder may also hold an acceptance head alone. Then y_{k-1} is scored instead of y_k, once it has been read.
    The probabilities of y_k and of the token after it count as 1. A policy that multiplies the estimates then is SpecDec++'s.
    """

    head: Annotated[str | None, Head()] = None
    statistics: Annotated[str | None, File()] = None
    scorer: Scorer | None = None
    log_w_rej: float = 0.0
    instead: HeadEstimator | None = None
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def num_history(self) -> int:
        """The number of positions before a step that its head reads."""
        return int(getattr(self.scorer, "num_history", 0)) if self.instead is None else self.instead.num_history

    def bind(self, pair: Any) -> PrereadEstimator | StatisticsEstimator:
        """Load the head and check that it belongs to the pair's draft; without one, the statistics. Raises InputError.

        A line says which it is, unless `head` names it.
        """
        if self.head is None and pair.head is None:
            source = (
                self.statistics or "the weights that ship, fitted to two drafts of the toy target (statistics=FILE)"
            )
            announce(f"acceptance: no head, statistics of q by {source}")
            return StatisticsEstimator(self.statistics).bind(pair)
        if self.statistics is not None:
            announce(
                f"acceptance: by {self.head or 'the head that the pair ships'}, not by statistics={self.statistics}"
            )
        folder = _folder(self.head, pair)
        if not PrereadHead.is_in(folder):
            return replace(self, head=folder, instead=HeadEstimator(folder, True).bind(pair))
        head_scorer = scorer(pair, folder, "preread")
        return replace(
            self, head=folder, scorer=head_scorer, log_w_rej=head_scorer.module.log_w_rej,
            calibration=Calibration.beside(folder),
        )  # fmt: skip

    def drawn_probs(self, step: Step) -> tuple[Tensor, Tensor]:
        """P(y_k accepted) and P(y_{k+1} accepted) [B] each, given that the ones before are."""
        if self.instead is not None:
            certain = torch.ones(step.entropy.shape, dtype=torch.float32, device=step.entropy.device)
            return (certain if step.depth == 1 else self.instead.read_prob(step)), certain
        assert self.scorer is not None, "bind the estimator to a pair first"
        accepted, following = (step.head_logits(self.scorer) + self.log_w_rej).unbind(-1)
        probs = self.calibration.prob("drawn", accepted, step.depth)
        return probs, self.calibration.prob("following", following, step.depth)


class ConfidenceEstimator:
    """The draft's own probability of the token it drew, unwarped."""

    def bind(self, pair: Any) -> ConfidenceEstimator:
        """Return the estimator itself: it needs no head."""
        return self

    def drawn_prob(self, step: Step) -> Tensor:
        """q(y_k) [B]."""
        return step.token_prob

    def drawn_probs(self, step: Step) -> tuple[Tensor, Tensor]:
        """q(y_k) [B], twice: a draft that is sure of this token is most often sure of the next one, too."""
        return step.token_prob, step.token_prob


def _folder(head: str | None, pair: Any) -> str:
    folder = head or pair.head
    if folder is None:
        raise InputError(
            "this method needs an acceptance head: expected head=FOLDER, got none; without one: rate, confidence, tail, "
            "dynamic_confidence, batch_rate_confidence, speculative"
        )
    return str(inside(folder))

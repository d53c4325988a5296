"""Policies whose heads are read from a trace instead of computed; and heads that read a trace's states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from toolkit.acceptance import HeadEstimator, PrereadEstimator, PrereadHead
from toolkit.acceptance.folder import Scorer, scorer_with
from toolkit.acceptance.from_states import recorded_logits
from toolkit.errors import InputError
from toolkit.stopping import Bounded, Rate, StoppingPolicy, Survival
from toolkit.trace import Trace, recorded_name
from toolkit.trace.step import RecordedStep
from toolkit.types import Step


@dataclass(frozen=True)
class RecordedScorer:
    """Stands for a head whose raw logits are in the trace, under this name."""

    name: str

    def __call__(self, step: Step) -> Tensor:
        if not isinstance(step, RecordedStep):
            raise InputError(
                f"recorded logits ({self.name}) belong to the steps of a trace, got a {type(step).__name__}"
            )
        return step.estimate(self.name)


def with_recorded_heads(policy: StoppingPolicy, names: Mapping[str, str]) -> StoppingPolicy:
    """A bound policy that reads its head's logits from the trace; `names`: head folder -> name in the trace."""
    if isinstance(policy, Bounded):
        return Bounded(with_recorded_heads(policy.policy, names), policy.min_drafted, policy.max_drafted)
    estimator: Any = getattr(policy, "estimator", None)
    if estimator is None or not hasattr(estimator, "rescored"):
        return policy

    def find(folder: str, kind: str) -> RecordedScorer:
        if folder not in names:
            held = ", ".join(names) or "none"
            raise InputError(f"the trace holds no estimates of the head in {folder} (held: {held})")
        return RecordedScorer(recorded_name(names[folder], kind))

    return replace(policy, estimator=estimator.rescored(find))  # type: ignore[type-var]


def scorer_of(head: Any, draft: Any) -> Scorer:
    """A head at work on a trace's states; some read the draft's embeddings, too."""
    return scorer_with(head, draft, "cpu")


def with_logits(trace: Trace, name: str, scorer: Scorer) -> Trace:
    """The trace with a head's raw logits of all its steps, under `name`, and no others. Needs recorded states."""
    return replace(trace, estimates={name: recorded_logits(trace, scorer)})


def threshold_policy(head: Any, name: str, corrected: bool) -> Rate | Survival:
    """The policy of a head whose logits a trace keeps under `name`, to be swept over levels 1 - h.

    SpecDec++'s rule; of a pre-read head the rate rule's score, P(all accepted and the next one, too), in its place.
    corrected  undo the class weight's shift of an acceptance head (a pre-read head's is undone always)
    """
    shift, recorded = head.config["log_w_rej"], RecordedScorer(name)
    if isinstance(head, PrereadHead):
        return Rate(PrereadEstimator(name, scorer=recorded, log_w_rej=shift), rate=1.0)
    return Survival(HeadEstimator(name, corrected, scorer=recorded, log_w_rej=shift))

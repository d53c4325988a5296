"""Policies whose heads are read from a trace instead of computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from toolkit.errors import InputError
from toolkit.stopping import Bounded, StoppingPolicy
from toolkit.trace import recorded_name


@dataclass(frozen=True)
class RecordedScorer:
    """Stands for a head whose raw logits are in the trace, under this name."""

    name: str

    def __call__(self, step: Any) -> Tensor:
        logits: Tensor = step.estimate(self.name)
        return logits


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

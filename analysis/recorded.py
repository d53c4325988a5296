"""What a policy sees in a replay: steps and head estimates read from a trace instead of computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.stopping import Bounded, StoppingPolicy
from toolkit.trace import Trace


@dataclass
class RecordedStep:
    """A DraftStep read from a trace: same names, for the statistics a policy may ask for."""

    trace: Trace
    depth: int
    index: Tensor  # [B] steps of the trace
    drawn: bool = True

    @property
    def tokens(self) -> Tensor | None:
        """y_k [B]."""
        return self.trace.tokens[self.index].long() if self.drawn else None

    @property
    def draft_prob(self) -> Tensor:
        """q_k(y_k), warped [B]."""
        return self.trace.draft_prob[self.index]

    @property
    def token_prob(self) -> Tensor:
        """Unwarped probability of y_k [B]."""
        return self.trace.token_prob[self.index]

    @property
    def entropy(self) -> Tensor:
        """Of the unwarped law [B], nats."""
        return self.trace.entropy[self.index]

    @property
    def top_probs(self) -> Tensor:
        """The two largest unwarped probabilities [B, 2]."""
        return self.trace.top_probs[self.index]

    @property
    def margin(self) -> Tensor:
        """Between them [B]."""
        return self.top_probs[:, 0] - self.top_probs[:, 1]

    @property
    def hidden(self) -> Tensor:
        """States [B, D] that produced q_k."""
        if self.trace.hidden is None:
            raise InputError("this trace holds no hidden states: record it with hidden=true, or with the policy's head")
        return self.trace.hidden[self.index].float()

    def estimate(self, name: str) -> Tensor:
        """The recorded logit of a head, about y_{k-1} [B]."""
        if name not in self.trace.estimates:
            held = ", ".join(self.trace.estimates) or "none"
            raise InputError(
                f"this trace holds no estimates of {name} (held: {held}); record it with heads={{{name}: FOLDER}}"
            )
        return self.trace.estimates[name][self.index]


@dataclass(frozen=True)
class RecordedEstimator:
    """Stands for a head whose logits are in the trace; `shift` is added to them."""

    name: str
    shift: float = 0.0

    def bind(self, pair: object) -> RecordedEstimator:
        """Nothing to load."""
        return self

    def read_prob(self, step: Any) -> Tensor:
        """P(y_{k-1} accepted) [B]."""
        return torch.sigmoid(step.estimate(self.name) + self.shift)


def with_recorded_heads(policy: StoppingPolicy, names: Mapping[str, str]) -> StoppingPolicy:
    """A bound policy with its head's estimator replaced by the recorded one; `names`: head folder -> name in the trace."""
    if isinstance(policy, Bounded):
        return Bounded(with_recorded_heads(policy.policy, names), policy.min_drafted, policy.max_drafted)
    estimator: Any = getattr(policy, "estimator", None)
    if estimator is None or not hasattr(estimator, "head"):
        return policy
    if estimator.head not in names:
        raise InputError(
            f"the trace holds no estimates of the head in {estimator.head} (held: {', '.join(names) or 'none'})"
        )
    if estimator.module is None:
        raise InputError("with_recorded_heads: bind the policy to a pair first")
    shift = estimator.module.log_w_rej if estimator.corrected else 0.0
    return replace(policy, estimator=RecordedEstimator(names[estimator.head], shift))  # type: ignore[type-var]

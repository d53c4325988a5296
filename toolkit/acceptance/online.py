"""The online logistic of vLLM as an estimator: it learns acceptance from the verdicts of the text itself.

Source: vllm-project/vllm#52228, after a summary of it: feature, slope, intercepts, their start and that counts damp the fit.
Their code was not read. How they weigh old verdicts, and what they do beyond the deepest position, may differ further.

    logit of P(y_k accepted) = slope * log odds of the largest q + intercept of depth k

slope and intercepts begin at .5 and -.2. After each verdict they move by a step of Newton's method, coordinate by coordinate,
on the log loss of the accepted tokens and the first rejected one. The curvature of all tokens so far divides the step, so
counts damp it; `evidence` is the curvature that the start counts for.

Deviation: weights are those of a row and begin again with every prompt; theirs are shared by all requests and never begin
again. A policy here is a function of a row's steps and state alone. Carried from text to text, as they run it, they are
replayed by `analysis.heads` (`analysis.replay.predictors`).
Deviation: q is the draft's unwarped distribution; theirs is at the row's temperature.
Deviation: one step of Newton's method per round and weight is ours; how theirs is fitted again was not read.
Deviation: the rate rule asks for the next token, too: its log odds are not known yet, those of this one stand for them.
Weights that are fitted once and then fixed: `analysis.heads statistics=[TRACES] form=log_odds`.

Shapes: B rows, D depths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from toolkit.acceptance.statistics import log_odds
from toolkit.config.notes import AtLeast, Between
from toolkit.config.values import check_ranges
from toolkit.types import Step

DEEPEST = 16  # depths with an intercept of their own: deeper tokens have the last one, and teach nothing


@dataclass(frozen=True)
class OnlineLogistic:
    """P(accepted) from the largest probability, with weights that the row's verdicts move.

    slope      of the log odds, before any verdict
    intercept  of every depth, before any verdict
    evidence   curvature that these count for: a token adds at most 1/4 to its intercept's
    """

    slope: Annotated[float, Between(-100, 100)] = 0.5
    intercept: Annotated[float, Between(-100, 100)] = -0.2
    evidence: Annotated[float, AtLeast(0.01)] = 2.0

    def __post_init__(self) -> None:
        check_ranges(self, "policy.estimator.")

    def bind(self, pair: Any) -> OnlineLogistic:
        """Return the estimator itself: it needs nothing of a pair."""
        return self

    def init(self, num_rows: int, deepest: int, device: torch.device) -> dict[str, Tensor]:
        """The weights [B], [B, D], the curvature of their losses, and the round's log odds [B, D]."""
        per_row = torch.zeros(num_rows, dtype=torch.float32, device=device)
        per_depth = torch.zeros(num_rows, max(min(deepest, DEEPEST), 1), dtype=torch.float32, device=device)
        return {
            "slope": per_row + self.slope, "intercepts": per_depth + self.intercept, "log_odds": per_depth,
            "slope_curvature": per_row + self.evidence, "intercept_curvatures": per_depth + self.evidence,
        }  # fmt: skip

    def at(self, state: dict[str, Tensor]) -> RowLogistic:
        """The estimator with the weights of a state."""
        return RowLogistic(state["slope"], state["intercepts"])

    def read(self, step: Step, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state's log odds of the round with those of a step."""
        if step.depth > state["log_odds"].shape[1]:
            return {}
        values = state["log_odds"].clone()
        values[:, step.depth - 1] = log_odds(step).to(values.dtype)
        return {"log_odds": values}

    def learn(self, num_drafted: Tensor, num_accepted: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights and curvatures after a verdict on the round's tokens, drafted and accepted [B]."""
        depth = torch.arange(1, state["log_odds"].shape[1] + 1, device=num_accepted.device)
        accepted = depth <= num_accepted.unsqueeze(1)
        verified = depth <= torch.minimum(num_accepted + 1, num_drafted).unsqueeze(1)
        odds = torch.where(verified, state["log_odds"], 0.0)
        probs = torch.sigmoid(state["slope"].unsqueeze(1) * odds + state["intercepts"])
        error = torch.where(verified, accepted.to(probs.dtype) - probs, 0.0)
        curvature = torch.where(verified, probs * (1 - probs), 0.0)
        of_slope = state["slope_curvature"] + (curvature * odds**2).sum(1)
        of_intercepts = state["intercept_curvatures"] + curvature
        return {
            "slope": state["slope"] + (error * odds).sum(1) / of_slope,
            "intercepts": state["intercepts"] + error / of_intercepts,
            "slope_curvature": of_slope, "intercept_curvatures": of_intercepts,
        }  # fmt: skip


@dataclass(frozen=True)
class RowLogistic:
    """The regression with a row's own weights: slope [B], intercepts [B, D]."""

    slope: Tensor
    intercepts: Tensor

    def bind(self, pair: Any) -> RowLogistic:
        """Return the estimator itself."""
        return self

    def drawn_probs(self, step: Step) -> tuple[Tensor, Tensor]:
        """P(y_k accepted) and P(y_{k+1} accepted) [B] each, by the log odds of this step and the depth's intercept."""
        score, last = self.slope * log_odds(step).to(self.slope.dtype), self.intercepts.shape[1] - 1
        accepted, following = (self.intercepts[:, min(depth, last)] for depth in (step.depth - 1, step.depth))
        return torch.sigmoid(score + accepted), torch.sigmoid(score + following)

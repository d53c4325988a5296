"""Acceptance of the j-th candidate of a node, from the draft's probabilities alone: a logistic regression, fitted in seconds.

    python -m analysis.heads candidates=[RESPONSES]     writes candidates.json
    python -m toolkit.decode method=tree_rate policy.estimator.path=FOLDER/candidates.json

Candidates are the draft's most probable tokens, tried in turn as point masses. Candidate j is accepted with p(x_j) / (1 - the p
of those before it), if none of them was; at temperature 0 iff it is the argmax of p. The numbers that a regression reads:

    log odds  of the draft's probability of x_j among what is left: what acceptance would be if p were q
    log q     of x_j
    log rank  log j
    entropy   nats

q is what the draft samples from; at temperature 0 it is unwarped. Two regressions, `sampled` and `greedy`, of the numbers and
their products.

Draws without replacement are accepted by statistics of q (`StatisticsEstimator`), with the share of a draw among what those
before it left as its probability, times LATER for every draw before it.

Shapes: B rows, W nodes, C candidates per node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.acceptance.statistics import Logistic, StatisticsEstimator, input_names, inputs_of
from toolkit.config.notes import File
from toolkit.errors import InputError
from toolkit.files.atomic import parse_json_file
from toolkit.types import SMALLEST, Children, Step

NUMBERS = ("log odds", "log q", "log rank", "entropy")
OUTPUTS = ("sampled", "greedy")
SHIPPED = Path(__file__).parent.parent / "assets" / "candidates.json"
LATER = 0.7  # of the toy pair along its own texts: .29 of second draws are accepted, .20 of third ones
HINT = "python -m analysis.heads candidates=[RESPONSES] writes one"


def numbers_of(probs: Tensor, entropy: Tensor) -> Tensor:
    """The four numbers [..., C, 4] of candidates with probabilities [..., C] float64 under a q of this entropy [...]."""
    rank = torch.arange(1, probs.shape[-1] + 1, dtype=probs.dtype, device=probs.device).log()
    share = _share(probs).clamp(SMALLEST, 1 - SMALLEST)
    log_q = probs.clamp(min=SMALLEST).log()
    return torch.stack([share.logit(), log_q, rank.expand_as(probs), entropy.unsqueeze(-1).expand_as(probs)], -1)


def _share(probs: Tensor) -> Tensor:
    """The share of each candidate [..., C] among what the ones before it leave."""
    left = 1 - pad(probs.cumsum(-1)[..., :-1], (1, 0))
    return (probs / left.clamp(min=SMALLEST)).clamp(max=1)


@dataclass(frozen=True)
class CandidateEstimator:
    """P(accepted | none before) by the regressions of a file.

    path        what `analysis.heads candidates=` wrote; null: the weights that ship
    confidence  the draft's share of the candidate among what is left instead: what is accepted if p were q. Survival is then
                the product of q, EAGLE-2's value of a node
    draws       what estimates the acceptance of draws
    outputs     the regressions by name (`OUTPUTS`): set by `bind`
    """

    path: Annotated[str | None, File()] = None
    confidence: bool = False
    draws: StatisticsEstimator = field(default_factory=StatisticsEstimator)
    outputs: Mapping[str, Logistic] | None = None

    def bind(self, pair: Any) -> CandidateEstimator:
        """The estimator with its weights read. Raises InputError for a file of another kind."""
        outputs = None if self.confidence else read_candidates(self.path or SHIPPED)
        return replace(self, draws=self.draws.bind(pair), outputs=outputs)

    def candidate_probs(self, children: Children) -> Tensor:
        """P(accepted | the parent is, no candidate before it was) [B, W, C] float64."""
        if children.draws:
            return self._draw_probs(children)
        if self.confidence:
            return _share(children.probs)
        assert self.outputs is not None, "bind the estimator to a pair first"
        bias, weights = self.outputs["greedy" if children.greedy else "sampled"].column(input_names(NUMBERS))
        inputs = inputs_of(numbers_of(children.probs, children.entropy))
        return (inputs @ inputs.new_tensor(weights) + bias).sigmoid()

    def _draw_probs(self, children: Children) -> Tensor:
        entropy, share, tops = children.entropy, children.probs[..., 0], pad(children.probs, (0, 1))[..., :2]
        if children.drawn is not None:
            share = _share(children.drawn)
            entropy, tops = (values.unsqueeze(2).expand(*share.shape, *values.shape[2:]) for values in (entropy, tops))
        step = cast(Step, _Statistics(children.depth, entropy, tops, share))
        first = self.draws.position_prob(step).unsqueeze(-1) if children.drawn is None else self.draws.drawn_prob(step)
        return first * LATER ** torch.arange(children.probs.shape[-1], dtype=first.dtype, device=first.device)


@dataclass(frozen=True)
class _Statistics:
    """What statistics of q read of a step, of several nodes or draws at once."""

    depth: int
    entropy: Tensor
    top_probs: Tensor
    token_prob: Tensor


def read_candidates(path: Path | str) -> dict[str, Logistic]:
    """The regressions in a file. Raises InputError for a file of another kind."""
    content = parse_json_file(path)
    if not isinstance(content, dict) or set(content.get("outputs") or ()) != set(OUTPUTS):
        raise InputError(f"{path} holds no acceptance of candidates (outputs {', '.join(OUTPUTS)}): {HINT}")
    try:
        return {name: Logistic.of(content["outputs"][name], input_names(NUMBERS)) for name in OUTPUTS}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: a regression cannot be read ({error}): {HINT}") from None

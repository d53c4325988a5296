"""The probability that a copied token is accepted, from what is known of the match: a logistic regression, trained in seconds.

    python -m analysis.heads copies=RESPONSES      writes match.json
    python -m toolkit.decode method=lookup_rate method.policy.estimator.path=FOLDER/match.json

A copied token's q is a point mass, so it is accepted with p(token). Given the text it is accepted iff the text goes on with
it, so texts alone are the training data: from every position, what would be copied, and whether it agrees.

Shapes: B rows, n examples, F inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from toolkit.config.notes import File
from toolkit.engine.device import floats_on
from toolkit.errors import InputError
from toolkit.files.atomic import parse_json_file, write_json
from toolkit.types import Match

INPUTS = (
    "log length",
    "log occurrences",
    "agreement",
    "agreement * log length",
    "agreement * log occurrences",
    "log depth",
)
HINT = "python -m analysis.heads copies=RESPONSES writes one"
# No text has been fitted to these: they only order matches as one would guess.
UNTRAINED = (-4.0, 0.6, 0.0, 2.5, 0.3, 0.3, 0.3)  # bias and weights in the order of INPUTS


def inputs_of(match: Match, depth: Tensor) -> Tensor:
    """What the regression reads of tokens at depths, of any shape: [..., F]."""
    length, occurrences = match.length.log1p(), match.occurrences.log1p()
    share = match.agreement
    return torch.stack([length, occurrences, share, share * length, share * occurrences, depth.log()], -1)


@dataclass(frozen=True)
class MatchEstimator:
    """P(copied token accepted), given that the ones before it are.

    path     what `save` wrote; null: weights that no text has been fitted to
    weights  bias and weights: set by `bind`
    """

    path: Annotated[str | None, File()] = None
    weights: tuple[float, ...] = UNTRAINED

    def bind(self, pair: Any) -> MatchEstimator:
        """The estimator with its weights read. Raises InputError for a file of another kind."""
        if self.path is None:
            return self
        content = parse_json_file(self.path)
        if not isinstance(content, dict) or content.get("inputs") != list(INPUTS):
            raise InputError(
                f"{self.path} holds no estimator of copied tokens: expected the inputs {', '.join(INPUTS)}: {HINT}"
            )
        weights: Any = content.get("weights")
        numbers = isinstance(weights, list) and all(isinstance(value, int | float) for value in weights)
        if not numbers or len(weights) != len(UNTRAINED) or not all(map(math.isfinite, weights)):
            raise InputError(
                f"{self.path}: expected a bias and {len(INPUTS)} weights, numbers all, got {weights}: {HINT}"
            )
        return replace(self, weights=tuple(map(float, weights)))

    def prob(self, match: Match, depth: Tensor | int) -> Tensor:
        """P(y_k accepted) of the match's shape, k = depth; 0 where nothing is copied."""
        logits = self.logits(inputs_of(match, torch.as_tensor(depth).to(match.length).expand_as(match.length)))
        return torch.where(match.occurrences > 0, logits.sigmoid(), torch.zeros_like(logits))

    def logits(self, inputs: Tensor) -> Tensor:
        """The logits [...] of P(accepted), from inputs [..., F]."""
        bias, *weights = self.weights
        return inputs @ floats_on(inputs.device, weights).to(inputs.dtype) + bias

    def save(self, path: Path) -> Path:
        """Write the weights with the names of their inputs."""
        return write_json(path, {"inputs": list(INPUTS), "weights": list(self.weights)})


def examples(
    proposer: Any, texts: Sequence[tuple[Sequence[int], Sequence[int]]], most: int, end_ids: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Inputs [n, F] and labels [n] of every token that would be copied, up to the first that does not agree.

    texts  prompts and responses
    most   the longest copy
    """
    rows, labels = list[tuple[float, float, float, float]](), list[bool]()
    for prompt, response in texts:
        whole = [*prompt, *response]
        for start in range(len(prompt), len(whole)):
            copy = proposer.lookup(whole[:start], min(most, len(whole) - start), end_ids)
            agreeing = [token == other for token, other in zip(copy.tokens, whole[start:], strict=False)]
            num_verified = agreeing.index(False) + 1 if False in agreeing else len(agreeing)
            labels += agreeing[:num_verified]
            for i in range(num_verified):
                rows.append((copy.length, copy.occurrences[i], copy.agreement[i], i + 1))
    length, occurrences, agreement, depth = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4).unbind(-1)
    return inputs_of(Match(length, occurrences, agreement), depth), torch.tensor(labels)


def fit(inputs: Tensor, labels: Tensor) -> MatchEstimator:
    """The regression of labels [n] on inputs [n, F], weakly penalised. Raises InputError if all labels are the same."""
    from sklearn.linear_model import LogisticRegression

    if len(set(labels.tolist())) < 2:
        raise InputError(f"expected copied tokens of which some agree with the text and some do not, got {len(labels)}")
    model = LogisticRegression(C=10.0, max_iter=1000).fit(inputs.numpy(), labels.numpy())
    return MatchEstimator(weights=(float(model.intercept_[0]), *map(float, model.coef_[0])))

"""Token mixing: from a response of the target to a training example for acceptance heads.

Paper: SpecDec++ (arXiv:2405.19715), section 3.2. theirs -> ours: X -> the response, Y -> drafted, Z -> mixed,
P_i -> labels, r -> mixing_ratio.

    Y_i ~ q(. | X_<i)            one teacher-forced pass of the draft over X
    P_i = min(1, p/q)(Y_i | X_<i)   one of the target
    Z_i = X_i with probability r, else Y_i
    loss on the positions whose acceptance draw chose Y

Deviation: the published code labels with the raw softmax distributions although its responses come from warped ones. Here p and
q are warped once, by the same `warp` and with the sampling that the responses were made with.
The acceptance draw decides the mask, not the test Z_i != X_i. That test would leave out the Y_i that happen to equal
X_i, which are mostly accepted ones. It would pull the mean label away from the acceptance rate.

Shapes: B responses, N tokens of a response, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.models.pair import ModelPair
from toolkit.models.teacher import distributions_along, picked
from toolkit.sampling import Sampling, draw, row_generator

# Added to the seed: with the very stream that drew the response, Y would repeat X instead of being a fresh draw.
STREAM = 0x6D6978


@dataclass(frozen=True)
class MixedExample:
    """One training example.

    prompt_ids   as the models read it
    mixed [N]    Z
    labels [N]   P_i, the probability that the target accepts Y_i; also where Z_i is X_i
    drafted [N]  bool: the acceptance draw chose Y_i, so that Z_i is a drafted token and its label counts
    """

    row: int
    prompt_ids: list[int]
    mixed: Tensor
    labels: Tensor
    drafted: Tensor


def mix_batch(
    pair: ModelPair, rows: Sequence[Mapping[str, Any]], sampling: Sampling, mixing_ratio: float, seed: int
) -> list[MixedExample]:
    """Mix responses in two forwards, one per model.

    rows  each {"row", "prompt_ids", "token_ids"}; row r draws from a generator seeded with (seed, r), so that its
          result does not depend on the others
    """
    texts = [(row["prompt_ids"], row["token_ids"]) for row in rows]
    distributions = distributions_along(pair, texts, sampling)
    return [_mixed(row, p, q, mixing_ratio, seed) for row, (p, q) in zip(rows, distributions, strict=True)]


def _mixed(row: Mapping[str, Any], p: Tensor, q: Tensor, mixing_ratio: float, seed: int) -> MixedExample:
    """One response, from the distributions p and q [N, V] along it."""
    response = torch.tensor(row["token_ids"], device=p.device)
    uniforms = torch.rand(2, len(response), generator=row_generator(seed + STREAM, row["row"])).to(p.device)
    drafted = draw(q, uniforms[0])
    from_draft = uniforms[1] >= mixing_ratio
    return MixedExample(
        row=row["row"],
        prompt_ids=list(row["prompt_ids"]),
        mixed=torch.where(from_draft, drafted, response).cpu(),
        labels=(picked(p, drafted) / picked(q, drafted)).clamp(max=1).cpu(),
        drafted=from_draft.cpu(),
    )

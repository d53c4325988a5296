"""Token mixing: from a response of the target to a training row for acceptance heads.

Paper: SpecDec++ (arXiv:2405.19715), section 3.2. theirs -> ours: X -> the response, Y -> drafted, Z -> mixed,
P_i -> labels, r -> mixing_ratio.

    Y_i ~ q(. | X_<i)            one teacher-forced pass of the draft over X
    P_i = min(1, p/q)(Y_i | X_<i)   one of the target
    Z_i = X_i with probability r, else Y_i
    loss on the positions whose coin chose Y

Deviation: the published code labels with the raw softmax laws although its responses come from warped ones. Here p and
q are warped once, by the same `warp` and with the sampling that the responses were made with.
The coin decides the mask, not the test Z_i != X_i: that would leave out the Y_i that happen to equal X_i, which are
mostly accepted ones, and pull the mean label away from the acceptance rate.

Shapes: B rows, N tokens of a response, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.pair import ModelPair
from toolkit.sampling import Sampling, draw, row_generator, warp
from toolkit.teacher import logits_of, pad_right

# Added to the seed: with the very stream that drew the response, Y would repeat X instead of being a fresh draw.
STREAM = 0x6D6978


@dataclass(frozen=True)
class MixedRow:
    """One training row.

    prompt_ids   as the models read it
    mixed [N]    Z
    labels [N]   P_i, the chance that the target accepts Y_i; also where Z_i is X_i
    drafted [N]  bool: the coin chose Y_i, so that Z_i is a drafted token and its label counts
    """

    row: int
    prompt_ids: list[int]
    mixed: Tensor
    labels: Tensor
    drafted: Tensor


def mix_batch(
    pair: ModelPair, rows: Sequence[Mapping[str, Any]], sampling: Sampling, mixing_ratio: float, seed: int
) -> list[MixedRow]:
    """Mix responses in two forwards, one per model.

    rows  each {"row", "prompt_ids", "token_ids"}; row r draws from a generator seeded with (seed, r), so that its
          result does not depend on the other rows
    """
    tokens = pad_right([[*row["prompt_ids"], *row["token_ids"]] for row in rows])
    uniforms = [
        torch.rand(2, len(row["token_ids"]), generator=row_generator(seed + STREAM, row["row"])).to(pair.device)
        for row in rows
    ]
    logits = pair.fit(logits_of(pair.draft, tokens))
    drafted, draft_probs = [], []
    for i, row in enumerate(rows):
        laws = response_laws(logits[i], row, sampling)
        drafted.append(draw(laws, uniforms[i][0]))
        draft_probs.append(_pick(laws, drafted[i]))
    logits = logits_of(pair.target, tokens)
    mixed_rows = []
    for i, row in enumerate(rows):
        target_probs = _pick(response_laws(logits[i], row, sampling), drafted[i])
        response = torch.tensor(row["token_ids"], device=pair.device)
        from_draft = uniforms[i][1] >= mixing_ratio
        mixed_rows.append(
            MixedRow(
                row=row["row"],
                prompt_ids=list(row["prompt_ids"]),
                mixed=torch.where(from_draft, drafted[i], response).cpu(),
                labels=(target_probs / draft_probs[i]).clamp(max=1).cpu(),
                drafted=from_draft.cpu(),
            )
        )
    return mixed_rows


def response_laws(logits: Tensor, row: Mapping[str, Any], sampling: Sampling) -> Tensor:
    """The warped laws [N, V] of a response's tokens, from the logits [T, V] after each token of prompt and response."""
    start, length = len(row["prompt_ids"]), len(row["token_ids"])
    logits = logits[start - 1 : start - 1 + length]
    penalised = sampling.repetition_penalty != 1.0
    return warp(logits, sampling, _seen_before(row, logits) if penalised else None)


def _seen_before(row: Mapping[str, Any], logits: Tensor) -> Tensor:
    """Which tokens the text holds before each of the response's [N, V] bool."""
    new = torch.zeros(logits.shape, dtype=torch.uint8, device=logits.device)
    new[0, row["prompt_ids"]] = 1
    new[torch.arange(1, len(new)), row["token_ids"][:-1]] = 1
    return new.cummax(0).values.bool()


def _pick(laws: Tensor, tokens: Tensor) -> Tensor:
    """Probabilities [N] of tokens [N] under laws [N, V]."""
    return laws.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

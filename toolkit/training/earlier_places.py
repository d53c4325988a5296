"""The draft's outputs at earlier positions of a mixed text, in the form that live decoding keeps (`toolkit.types.Earlier`).

A position's entry holds the state that its token was drawn from, its token (drafted or the target's) and the shape of q.
Positions are those of the response. Distributions are the draft's own, over its whole output layer.

Shapes: T tokens of a text, n positions, H earlier ones, D width of the states, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.types import SMALLEST, Earlier


def earlier_at(states: Tensor, logits: Tensor, tokens: Tensor, places: Tensor, first: int, count: int) -> Earlier:
    """The `count` newest positions up to and including each of `places` [n]: what is known once the token there was read.

    states [T, D], logits [T, V] after every token, tokens [T]; first: the response's first position, from 1
    """
    probs = logits[:-1].float().softmax(-1)  # of the tokens at positions 1..T-1
    token_prob = probs.gather(-1, tokens[1:].unsqueeze(-1)).squeeze(-1)
    said = token_prob.double().clamp(min=SMALLEST).log()
    said[: first - 1] = 0
    back = torch.arange(count, device=places.device).flip(0)
    at = places.unsqueeze(1) - back
    present = at >= first
    before = (at - 1).clamp(min=0)
    entropy = torch.special.entr(probs).sum(-1)
    shown = (
        states[before],
        tokens[at.clamp(min=0)],
        token_prob[before],
        entropy[before],
        probs.topk(2, -1).values[before],
    )
    hidden, came, chance, spread, top = (v * present.view(*present.shape, *[1] * (v.dim() - 2)) for v in shown)
    likelihood, number = said.cumsum(0)[places - 1].float(), (places - first + 1).float()
    return Earlier(hidden, came, chance, spread, top, present, likelihood, number)

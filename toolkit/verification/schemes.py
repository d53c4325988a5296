"""How the K candidates of a node are drawn from the draft's distribution: the schemes that rules declare.

    iid                  K independent draws from q; they may repeat
    independent          one draw from each of K distributions
    without_replacement  one after another from q with the earlier ones removed and renormalised
    greedy               the K - 1 most probable of q, and one draw from the rest (Hu et al., arXiv:2502.18779)
    top_k                the K most probable of q, for certain: rules are given a point mass on each as what it was drawn from

Each function takes a distribution and K uniforms in [0, 1) and returns the candidates [..., K] with the number of real
ones [...]. Where q has fewer tokens than the scheme needs, the last candidates are padded with token 0.

Shapes: leading dimensions `...` are free; K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from toolkit.errors import InputError, unknown_name
from toolkit.sampling import draw, draws


def candidates(scheme: str, draft_probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw K candidates by the scheme's name: draft_probs [..., V] ([..., K, V] if independent), uniforms [..., K]."""
    if scheme not in SCHEMES:
        raise unknown_name("scheme", scheme, SCHEMES)
    if uniforms.shape[-1] < 1:
        raise InputError(f"uniforms: expected at least 1 per node, got shape {list(uniforms.shape)}")
    return SCHEMES[scheme](draft_probs, uniforms)


def iid(draft_probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """K independent draws from draft_probs [..., V] with uniforms [..., K]."""
    return draws(draft_probs, uniforms), _counts(uniforms, uniforms.shape[-1])


def independent(draft_probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One draw from each distribution: draft_probs [..., K, V], uniforms [..., K]."""
    return draw(draft_probs, uniforms), _counts(uniforms, uniforms.shape[-1])


def without_replacement(draft_probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """K draws from draft_probs [..., V], each without the tokens drawn before it."""
    left, drawn = draft_probs.clone(), []
    for uniform in uniforms.unbind(-1):
        drawn.append(draw(left, uniform))
        left.scatter_(-1, drawn[-1].unsqueeze(-1), 0.0)
    return _padded(torch.stack(drawn, -1), num_distinct(draft_probs, uniforms.shape[-1]))


def greedy(draft_probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The K - 1 most probable of draft_probs [..., V], and one draw from the rest with the last uniform."""
    top = _widened(top_tokens(draft_probs, uniforms.shape[-1] - 1), uniforms.shape[-1] - 1)
    sampled = draw(draft_probs.scatter(-1, top, 0.0), uniforms[..., -1])
    return _padded(torch.cat([top, sampled.unsqueeze(-1)], -1), num_distinct(draft_probs, uniforms.shape[-1]))


def top_k(draft_probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The K most probable of draft_probs [..., V], of equals the first; uniforms [..., K] give K, and are not used."""
    num_drafts = uniforms.shape[-1]
    return _padded(_widened(top_tokens(draft_probs, num_drafts), num_drafts), num_distinct(draft_probs, num_drafts))


def most_probable(logits: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The tokens of the largest logits [..., V] in order, of equals the first: [..., num_tokens], padded with token 0.

    Also how many are real [...]: tokens of logit -inf cannot be drawn.
    """
    counts = (~logits.isneginf()).sum(-1).clamp(max=num_tokens)
    return _padded(_widened(top_tokens(logits, num_tokens), num_tokens), counts)


def top_tokens(scores: Tensor, num_tokens: int) -> Tensor:
    """The tokens of the largest scores [..., V] in order, of equals the first; at most V: [..., num_tokens]."""
    left, tokens = scores.clone(), []
    for _ in range(min(num_tokens, scores.shape[-1])):
        tokens.append(left.argmax(-1, keepdim=True))
        left.scatter_(-1, tokens[-1], -torch.inf)
    return torch.cat(tokens, -1) if tokens else left[..., :0].long()


def num_distinct(draft_probs: Tensor, num_drafts: int) -> Tensor:
    """How many of `num_drafts` distinct candidates draft_probs [..., V] can fill: [...]."""
    return (draft_probs > 0).sum(-1).clamp(max=num_drafts)


def _widened(tokens: Tensor, count: int) -> Tensor:
    """`count` tokens, the last ones 0: where the vocabulary has no more."""
    return torch.nn.functional.pad(tokens, (0, count - tokens.shape[-1]))


def _padded(drawn: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct candidates with token 0 after the first `counts` [...], the real ones."""
    padding = torch.arange(drawn.shape[-1], device=drawn.device) >= counts.unsqueeze(-1)
    return drawn.masked_fill(padding, 0), counts


def _counts(uniforms: Tensor, count: int) -> Tensor:
    return torch.full(uniforms.shape[:-1], count, device=uniforms.device)


SCHEMES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "iid": iid,
    "independent": independent,
    "without_replacement": without_replacement,
    "greedy": greedy,
    "top_k": top_k,
}

"""The target's verdict on a forest, layer by layer; without a forest, one layer of plain beams.

Paper: Dynamic-Width Speculative Beam Decoding (arXiv:2409.16560), Algorithm 1. A layer that keeps as many beams as it
asks for passes; the first one that does not is filled up from the residual (one beam) and from p_beam (the rest), and
ends the round. If all pass, one more layer is drawn from p_beam. Draft beams whose parent was not kept have p = 0.

Shapes: B rows, W input beams, W_S draft beams, N nodes, L layers drafted, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.decoding.beam_settings import Beams
from toolkit.decoding.forest import Forest, joint_law
from toolkit.sampling import Sampling, draws
from toolkit.verification.base import split_uniforms
from toolkit.verification.layer import LayerRule


@dataclass
class BeamVerdict:
    """What became of a forest.

    kept [B, N]          nodes that are beams of their layer
    node_scores [B, N]   their log-likelihoods by the target
    length [B]           layers that passed; the round ends in layer `length`, counted from 0, or, if the row is done, before
    num_extra [B]        beams of that layer that were not drafted: the first ones of
    extra_parents, extra_tokens, extra_scores [B, E]   parents are block indices
    valid [B]            False where a law was not a law
    """

    kept: Tensor
    node_scores: Tensor
    length: Tensor
    num_extra: Tensor
    extra_parents: Tensor
    extra_tokens: Tensor
    extra_scores: Tensor
    valid: Tensor


def judge(
    rule: LayerRule,
    beams: Beams,
    forest: Forest,
    logits: Tensor,
    uniforms: Tensor,
    sampling: Sampling,
    end_ids: tuple[int, ...],
    room: Tensor,
) -> BeamVerdict:
    """logits [B, W + N, V] of the target at the block; uniforms [B, 3 M + 1], in the layout of every rule.

    room [B]  a row is done, and its round ends, once this many beams have ended
    """
    _, tests, extras = split_uniforms(uniforms)
    num_rows, vocab_size = len(logits), logits.shape[-1]
    scores, first, count = forest.scores, 0, forest.num_before  # of the layer before
    active = ~scores.isneginf().all(1)
    valid = ~logits.isnan().flatten(1).any(1)  # of rejected nodes, too: their slots stay in the cache for a while
    length = torch.zeros(num_rows, dtype=torch.long, device=logits.device)
    width = torch.full_like(length, beams.num_beams)
    kept_layers, score_layers = [], []
    num_candidates = forest.pairs[0].shape[1] if forest.pairs else 0
    verdict = _Extras(num_rows, beams, len(end_ids), vocab_size, logits)
    for layer in range(len(forest.pairs) + 1):
        law, joint = joint_law(scores, logits[:, first : first + count], sampling)
        valid &= torch.isfinite(law).all(-1) | ~active
        drafted = active & (forest.num_layers > layer)
        residual, num_kept = law, torch.zeros_like(length)
        if layer < len(forest.pairs):
            pairs, q = forest.pairs[layer], forest.laws[layer]
            valid &= torch.isfinite(q).all(-1) | ~drafted
            # A layer that was not drafted has no q to take a width from, and keeps the last one's.
            counts = forest.counts[layer]
            width = torch.where(drafted, beams.width(law, q, num_candidates, counts), width)
            tested = torch.where(drafted, width, 0)
            span = slice(layer * num_candidates, (layer + 1) * num_candidates)
            real = drafted.unsqueeze(1) & (torch.arange(num_candidates, device=counts.device) < counts.unsqueeze(1))
            kept, residual = rule.walk(law, q, pairs, real, tested, tests[:, span])
            num_kept = kept.sum(1)
            kept_layers.append(kept)
            score_layers.append(joint.flatten(1).gather(1, pairs))
        passes = drafted & (num_kept == width)
        ends = active & ~passes
        verdict.fill(ends, law, residual, joint, width - num_kept, first, extras)
        active = passes
        length = length + passes
        if layer < len(forest.pairs):
            goes_on = kept & passes.unsqueeze(1)
            for end in end_ids:
                goes_on = goes_on & (pairs % vocab_size != end)
            scores = score_layers[-1].double().masked_fill(~goes_on, -torch.inf)
            room = room - torch.where(passes, num_kept - goes_on.sum(1), 0)
            active = active & goes_on.any(1) & (room > 0)
            first, count = forest.num_before + layer * num_candidates, num_candidates
    empty = logits.new_zeros(num_rows, 0)
    return BeamVerdict(
        kept=torch.cat([empty.bool(), *kept_layers], 1),
        node_scores=torch.cat([empty.double(), *(layer.double() for layer in score_layers)], 1),
        length=length,
        num_extra=verdict.num,
        extra_parents=verdict.parents,
        extra_tokens=verdict.tokens,
        extra_scores=verdict.scores,
        valid=valid,
    )


class _Extras:
    """Beams that were not drafted, of the layer each row ends in."""

    def __init__(self, num_rows: int, beams: Beams, num_ends: int, vocab_size: int, like: Tensor):
        self.top = beams.selection == "top"
        # Beam search looks further: pairs that end a text do not take a living beam's place.
        self.room = beams.num_beams * (1 + num_ends) if self.top else beams.num_beams
        self.vocab_size = vocab_size
        self.num = torch.zeros(num_rows, dtype=torch.long, device=like.device)
        self.parents = torch.zeros(num_rows, self.room, dtype=torch.long, device=like.device)
        self.tokens = torch.zeros_like(self.parents)
        self.scores = torch.zeros(num_rows, self.room, dtype=torch.float64, device=like.device)

    def fill(
        self, ends: Tensor, law: Tensor, residual: Tensor, joint: Tensor, needed: Tensor, first: int, extras: Tensor
    ) -> None:
        """Where a row ends [B]: the likeliest pairs, or one draw from the residual and the rest from the law."""
        flat = joint.flatten(1)
        if self.top:
            size = min(self.room, flat.shape[1])
            pairs = torch.nn.functional.pad(flat.topk(size, dim=1).indices, (0, self.room - size))
            needed = (~flat.isneginf()).sum(1).clamp(max=self.room)
        else:
            uniforms = extras[:, : self.room]
            one, rest = draws(residual.nan_to_num(1.0), uniforms[:, :1]), draws(law.nan_to_num(1.0), uniforms[:, 1:])
            pairs = torch.cat([one, rest], 1)
        where = ends.unsqueeze(1)
        self.num = torch.where(ends, needed, self.num)
        self.parents = torch.where(where, first + pairs // self.vocab_size, self.parents)
        self.tokens = torch.where(where, pairs % self.vocab_size, self.tokens)
        self.scores = torch.where(where, flat.gather(1, pairs).double(), self.scores)

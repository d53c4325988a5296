"""The target's verdict on a forest, layer by layer; without a forest, one layer of plain beams.

Paper: Dynamic-Width Speculative Beam Decoding (arXiv:2409.16560), Algorithm 1. A layer passes if it keeps as many beams as
it asks for. The first layer that does not pass is filled up: one beam comes from the residual, the rest from p_beam. This
layer ends the round. If all layers pass, one more is drawn from p_beam. Draft beams whose parent was not kept have p = 0.

Shapes: B rows, W input beams, W_S draft beams, N nodes, L layers drafted, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from toolkit.decoding.beam_settings import Beams
from toolkit.decoding.proposers.forest import Forest, joint_distribution
from toolkit.decoding.text_order import TextOrder
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
    valid [B]            False where a distribution held what is not a number
    """

    kept: Tensor
    node_scores: Tensor
    length: Tensor
    num_extra: Tensor
    extra_parents: Tensor
    extra_tokens: Tensor
    extra_scores: Tensor
    valid: Tensor


def verify_forest(
    rule: LayerRule,
    beams: Beams,
    forest: Forest,
    logits: Tensor,
    uniforms: Tensor,
    sampling: Sampling,
    end_ids: tuple[int, ...],
    room: Tensor,
    stopped: Tensor | None = None,
    most_pairs: int | None = None,
) -> BeamVerdict:
    """Verify a forest by the target's logits [B, W + N, V] at the block; uniforms [B, 3 M + 1], in the layout of every rule.

    room [B]     a row is done, and its round ends, once this many beams have ended
    stopped [B, N]  not 0: nodes that end although their token is none of `end_ids`: a stop string is complete; None: none
    most_pairs   pairs that beam search looks at: more than W, for those that end take no living beam's place
    """
    _, tests, extras = split_uniforms(uniforms)
    walk = _Walk.begin(forest, logits, beams, room)
    added = _Extras(len(logits), beams, most_pairs or beams.num_beams * (1 + len(end_ids)), logits)
    ended = torch.zeros_like(forest.tokens, dtype=torch.bool) if stopped is None else stopped.bool()
    for end in end_ids:
        ended = ended | (forest.tokens == end)
    for layer in range(len(forest.pairs)):
        p, joint = walk.layer_probs(logits, sampling)
        accepted, residual = walk.test(rule, beams, forest, layer, p, tests)
        passes = walk.passing(forest, layer, accepted)
        added.fill(walk, walk.active & ~passes, p, residual, joint, walk.width - accepted.sum(1), extras)
        walk.descend(forest, layer, accepted, passes, joint, ended)
    p, joint = walk.layer_probs(logits, sampling)
    added.fill(walk, walk.active, p, p, joint, walk.width, extras)
    return walk.verdict(added)


@dataclass
class _Walk:
    """How far every row has come.

    scores [B, n]   log-likelihood of the beams that the next layer follows, -inf where none lives
    texts           how their texts compare
    first, count    where these lie in the block
    active [B]      the round goes on
    width [B]       beams that the newest layer asks for
    """

    scores: Tensor
    sequences: TextOrder
    first: int
    count: int
    active: Tensor
    valid: Tensor
    length: Tensor
    width: Tensor
    room: Tensor
    accepted: list[Tensor] = field(default_factory=list)
    node_scores: list[Tensor] = field(default_factory=list)

    @classmethod
    def begin(cls, forest: Forest, logits: Tensor, beams: Beams, room: Tensor) -> _Walk:
        """The walk before the first layer."""
        length = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        valid = ~(logits.isnan().any(2) & forest.counts_in_block).any(1)
        return cls(
            scores=forest.scores,
            sequences=forest.sequences,
            first=0,
            count=forest.num_before,
            active=~forest.scores.isneginf().all(1),
            valid=valid if forest.valid is None else valid & forest.valid,
            length=length,
            width=torch.full_like(length, beams.num_beams),
            room=room,
        )

    def layer_probs(self, logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """p_beam of the next layer [B, n V], and its logarithm before warping [B, n, V]."""
        layer_logits = logits[:, self.first : self.first + self.count]
        p, joint = joint_distribution(self.scores, layer_logits, sampling, self.sequences)
        self.valid &= torch.isfinite(p).all(-1) | ~self.active
        return p, joint

    def test(
        self, rule: LayerRule, beams: Beams, forest: Forest, layer: int, p: Tensor, tests: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which candidates of a drafted layer are accepted [B, W_S], and what one further beam is drawn from [B, n V]."""
        pairs, q, counts = forest.pairs[layer], forest.draft_probs[layer], forest.counts[layer]
        num_candidates = pairs.shape[1]
        drafted = self.active & (forest.num_layers > layer)
        self.valid &= torch.isfinite(q).all(-1) | ~drafted
        # A layer that was not drafted has no q to take a width from, and keeps the last one's.
        self.width = torch.where(drafted, beams.width(p, q, num_candidates, counts), self.width)
        tested = torch.where(drafted, self.width, 0)
        span = slice(layer * num_candidates, (layer + 1) * num_candidates)
        real = drafted.unsqueeze(1) & (torch.arange(num_candidates, device=counts.device) < counts.unsqueeze(1))
        return rule.walk(p, q, pairs, real, tested, tests[:, span])

    def passing(self, forest: Forest, layer: int, accepted: Tensor) -> Tensor:
        """Rows [B] that go on below a layer: it was drafted, and accepted as many beams as it asked for."""
        return self.active & (forest.num_layers > layer) & (accepted.sum(1) == self.width)

    def descend(
        self, forest: Forest, layer: int, accepted: Tensor, passes: Tensor, joint: Tensor, ended: Tensor
    ) -> None:
        """Go on below the beams that a layer accepted, where it passes, but for those that end. ended [B, N]."""
        pairs = forest.pairs[layer]
        scores = joint.flatten(1).gather(1, pairs)
        self.accepted.append(accepted)
        self.node_scores.append(scores)
        span = slice(layer * pairs.shape[1], (layer + 1) * pairs.shape[1])
        lives = accepted & passes.unsqueeze(1) & ~ended[:, span]
        self.scores = scores.double().masked_fill(~lives, -torch.inf)
        self.sequences = self.sequences.after(pairs, joint.shape[2])
        self.length = self.length + passes
        self.room = self.room - torch.where(passes, accepted.sum(1) - lives.sum(1), 0)
        self.active = passes & lives.any(1) & (self.room > 0)
        self.first, self.count = forest.num_before + layer * pairs.shape[1], pairs.shape[1]

    def verdict(self, added: _Extras) -> BeamVerdict:
        """The verdict of the whole walk."""
        nothing = torch.zeros(len(self.length), 0, dtype=torch.float32, device=self.length.device)
        return BeamVerdict(
            kept=torch.cat([nothing.bool(), *self.accepted], 1),
            node_scores=torch.cat([nothing.double(), *(layer.double() for layer in self.node_scores)], 1),
            length=self.length,
            num_extra=added.num,
            extra_parents=added.parents,
            extra_tokens=added.tokens,
            extra_scores=added.scores,
            valid=self.valid,
        )


class _Extras:
    """Beams that were not drafted, of the layer each row ends in."""

    def __init__(self, num_rows: int, beams: Beams, most_pairs: int, logits: Tensor):
        self.top = beams.selection == "top"
        self.room = most_pairs if self.top else beams.num_beams
        self.vocab_size = logits.shape[-1]
        self.num = torch.zeros(num_rows, dtype=torch.long, device=logits.device)
        self.parents = torch.zeros(num_rows, self.room, dtype=torch.long, device=logits.device)
        self.tokens = torch.zeros_like(self.parents)
        self.scores = torch.zeros(num_rows, self.room, dtype=torch.float64, device=logits.device)

    def fill(
        self, walk: _Walk, ends: Tensor, p: Tensor, residual: Tensor, joint: Tensor, needed: Tensor, extras: Tensor
    ) -> None:
        """Fill the layer of rows that end in it [B]: the most probable pairs, or a draw from the residual, then from p."""
        flat = joint.flatten(1)
        if self.top:
            size = min(self.room, flat.shape[1])
            pairs = torch.nn.functional.pad(walk.sequences.largest(joint, size), (0, self.room - size))
            needed = (~flat.isneginf()).sum(1).clamp(max=self.room)
        else:
            uniforms = extras[:, : self.room]
            from_residual = draws(residual.nan_to_num(1.0), uniforms[:, :1])
            from_target = draws(p.nan_to_num(1.0), uniforms[:, 1:])
            pairs = torch.cat([from_residual, from_target], 1)
        where = ends.unsqueeze(1)
        self.num = torch.where(ends, needed, self.num)
        self.parents = torch.where(where, walk.first + pairs // self.vocab_size, self.parents)
        self.tokens = torch.where(where, pairs % self.vocab_size, self.tokens)
        self.scores = torch.where(where, flat.gather(1, pairs).double(), self.scores)

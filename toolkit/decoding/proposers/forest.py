"""Draft beams: a forest with one tree per input beam, drawn layer by layer from the draft's joint distribution.

Paper: Dynamic-Width Speculative Beam Decoding (arXiv:2409.16560), section 3. theirs -> ours: W_S -> num_beams, gamma ->
num_layers, q_beam -> draft_probs. With one layer less than the target reads, as in every proposer: the last layer is not read
by the draft.
Deviation: candidates are i.i.d. draws from q_beam, as the paper's theorem assumes (its code draws without replacement).
Deviation: an input beam weighs what the *target* says of it, and only drafted tokens weigh by the draft. Any q is exact;
this one is nearer to p. With weights=draft it weighs the draft's likelihood of its whole response, as in the paper.

Shapes: B rows, W input beams, W_S draft beams, N = W_S x layers nodes, V vocabulary. A **block** is what the target reads:
the W newest tokens of the input beams, then the N nodes; parents are indices into it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from toolkit.config.notes import Between
from toolkit.config.values import check_ranges
from toolkit.decoding.proposers.base import Numbers, Proposer, where_active
from toolkit.decoding.text_order import TextOrder
from toolkit.engine import Session
from toolkit.engine.device import Gate, tensor_on
from toolkit.errors import InputError
from toolkit.sampling import Sampling, warp
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import DraftStep
from toolkit.verification.schemes import candidates


@dataclass
class ForestContext:
    """What a proposer of beams may use in one round.

    session          the draft's; None if nothing is drafted
    unread           prompt tokens its cache lacks [B, U], right-aligned, and how many per row
    catch_up         tokens of the input beams it lacks [B, C], with the node ids of their parents [B, C]
    newest [B, W]    which of them is the newest token of each beam
    held             per row: nodes in the target's cache before the round; the block's nodes follow them
    scores [B, W]    log-likelihood of the input beams by the target; -inf: no beam
    draft_scores     [B, W] their log-likelihoods by the draft, up to the first token of theirs that it has not read
    texts            which input beams are copies of one text, and how they compare
    limits [B]       the most layers each row may draft; `most` is the largest
    uniforms [B, M]  one per node; uniforms_of_collapse [B] one to choose among beams
    """

    session: Session | None
    unread: tuple[Tensor, list[int]]
    catch_up: tuple[Tensor, Tensor]
    newest: Tensor
    held: list[int]
    scores: Tensor
    draft_scores: Tensor
    sequences: TextOrder
    limits: Tensor
    most: int
    uniforms: Tensor
    sampling: Sampling
    fit: Callable[[Tensor], Tensor]
    end_ids: tuple[int, ...]
    uniforms_of_collapse: Tensor


@dataclass(frozen=True)
class Forest:
    """What goes to the target.

    tokens [B, N], parents [B, N]  nodes, layer by layer; parents are block indices
    draft_probs  per layer q_beam [B, n V] over pairs of the n nodes before (beams, in the first layer) and the tokens
    pairs        per layer the drawn pairs [B, W_S]
    counts       per layer how many of them count [B]: the first ones
    num_layers   [B] layers that count
    num_calls    [B] draft forward passes
    scores       [B, W] of the input beams, -inf: no beam; texts: how they compare
    newest_ids   [B, W] of the beams' newest tokens in the draft's cache; node n has id node_ids[:, n], if n < num_read
    was_read     whether the draft was asked at all
    joint        per layer of nodes (input beams first) that the draft has read: log q of the pairs after them [B, n, V]
    valid        [B] False where the draft or the policy worked with what is not a number; None: it is for the rule to find
    """

    tokens: Tensor
    parents: Tensor
    draft_probs: list[Tensor]
    pairs: list[Tensor]
    counts: list[Tensor]
    num_layers: Tensor
    num_calls: Tensor
    scores: Tensor
    sequences: TextOrder
    newest_ids: Tensor
    node_ids: Tensor
    num_read: int
    was_read: bool
    joint: list[Tensor] = field(default_factory=list)
    valid: Tensor | None = None

    @property
    def num_before(self) -> int:
        """W, the number of input beams of the block."""
        return self.scores.shape[1]

    @property
    def num_nodes(self) -> int:
        """Policies learn from layers as from tokens of a chain."""
        return len(self.pairs)

    @property
    def num_drafted(self) -> Tensor:
        """Layers that count [B]: see `num_nodes`."""
        return self.num_layers

    @property
    def counts_in_block(self) -> Tensor:
        """Which entries of the block count [B, W + N] bool: the beams there are, and the candidates of drafted layers."""
        layers = [
            (torch.arange(pairs.shape[1], device=pairs.device) < count.unsqueeze(1))
            & (self.num_layers > layer).unsqueeze(1)
            for layer, (pairs, count) in enumerate(zip(self.pairs, self.counts, strict=True))
        ]
        return torch.cat([~self.scores.isneginf(), *layers], 1)


def joint_distribution(
    scores: Tensor, logits: Tensor, sampling: Sampling, sequences: TextOrder
) -> tuple[Tensor, Tensor]:
    """The distribution of a layer over pairs (beam, token), warped as one distribution [B, n V]; and its logarithm
    before [B, n, V].

    scores [B, n] log-likelihoods of the beams, -inf for those that do not go on; logits [B, n, V] after them. Rows without
    a beam get zeros.
    """
    logits = sequences.shared(logits if logits.dtype == torch.float64 else logits.float())
    dead = scores.isneginf()  # whatever follows them, be it not a number
    alive = ~dead.all(1, keepdim=True)
    top = torch.where(alive, scores.amax(1, keepdim=True), 0.0)
    logps = logits.log_softmax(-1)
    relative = (scores - top).to(logps.dtype).unsqueeze(-1) + logps  # float32 has no digits to spare for long texts
    nothing = torch.where(alive, -torch.inf, 0.0).to(logps.dtype).unsqueeze(-1)
    probs = sequences.warp(torch.where(dead.unsqueeze(-1), nothing, relative), sampling)
    joint = scores.unsqueeze(-1) + logps.double()
    return torch.where(alive, probs, 0.0), joint.masked_fill(dead.unsqueeze(-1), -torch.inf)


@dataclass(frozen=True)
class ForestProposer(Proposer):
    """Beam sampling with the draft.

    num_beams   W_S: draft beams of a layer
    num_layers  gamma: the most layers of a round; the policy may stop earlier, scoring the most probable beam of each layer
    min_beams   the fewest draft beams of a layer, where the policy foresees acceptance (trained heads). Then enough
                are drafted to let this many be accepted, ceil(min_beams / P(accepted)), at most num_beams; None:
                always num_beams
    weights     whose likelihood weighs an input beam: "target", or "draft" as in the paper
    scheme      how a layer's beams are drawn from q_beam: "iid", or "without_replacement" as in the published code
    """

    name = "forest"
    num_beams: Annotated[int, Between(1, 4096)] = 6
    num_layers: Annotated[int, Between(0, 4096)] = 3
    min_beams: Annotated[int, Between(1, 4096)] | None = None
    scheme: Literal["iid", "without_replacement"] = "iid"
    weights: Literal["target", "draft"] = "target"
    obeys = ("begin", "read", "step", "observe")

    def __post_init__(self) -> None:
        check_ranges(self, "proposer.")
        if self.min_beams is not None and not 1 <= self.min_beams <= self.num_beams:
            raise InputError(
                f"proposer.min_beams: expected 1 to {self.num_beams} (num_beams) or null, got {self.min_beams}"
            )

    @property
    def fewest(self) -> int:
        """The fewest candidates a layer can have."""
        return self.num_beams if self.min_beams is None else self.min_beams

    def max_nodes(self, limit: int) -> int:
        """The most nodes of a round of at most `limit` layers."""
        return self.num_beams * self.max_layers(limit)

    def max_layers(self, limit: int) -> int:
        """The most layers of a round whose policy asks for at most `limit`."""
        return min(limit, self.num_layers)

    def propose(self, context: ForestContext, policy: StoppingPolicy, state: State) -> tuple[Forest, State]:
        """Draw layer after layer until no row wants another one."""
        limits = context.limits
        device, width = limits.device, self.num_beams
        state, starts = policy.begin(limits > 0, state)
        drafting = starts & (limits > 0)
        num_layers, num_calls = torch.zeros_like(limits), torch.zeros_like(limits)
        growing = _Growing(context, width, self.scheme, self.weights == "draft")
        gate, numbers = Gate(device), Numbers(policy, limits)
        while growing.depth < context.most and gate.passes(drafting):
            logits, hidden = growing.read()
            num_calls += drafting
            drafting = drafting & ~growing.scores.isneginf().all(1)
            probs, joint = joint_distribution(growing.scores, logits, context.sampling, growing.sequences)
            growing.joint += [joint] if growing.weighed_by_draft else []
            numbers.add(probs[:, 0], drafting)
            if policy.reads:
                step = growing.step(logits, hidden, None)
                numbers.add_step(step, drafting)
                new_state, go_on = policy.read(step, state)
                numbers.add_state(new_state, state, drafting)
                state, drafting = where_active(new_state, state, drafting), drafting & go_on
                if not gate.passes(drafting):
                    break
            growing.add(probs, joint)
            num_layers += drafting
            step = growing.step(logits, hidden, growing.best)
            numbers.add_step(step, drafting)
            new_state, go_on = policy.step(step, state)
            numbers.add_state(new_state, state, drafting)
            if self.min_beams is not None:
                growing.widen(policy.foresee(step), self.min_beams)
            state = where_active(new_state, state, drafting)
            drafting = drafting & go_on & (limits > growing.depth) & ~growing.scores.isneginf().all(1)
        longest = gate.settle() // (2 if policy.reads else 1)
        return growing.forest(longest, num_layers, num_calls, numbers.valid()), state


class _Growing:
    """The forest so far, all rows alike in shape."""

    def __init__(self, context: ForestContext, width: int, scheme: str, weighed_by_draft: bool):
        self.context, self.width, self.scheme, self.weighed_by_draft = context, width, scheme, weighed_by_draft
        self.scores = context.scores  # [B, n] of the newest layer; -inf: does not go on
        self.sequences = context.sequences  # its own
        self.best = torch.zeros(len(context.limits), 0, dtype=torch.long, device=context.limits.device)
        self.count = torch.full_like(context.limits, width)  # candidates of the next layer that count
        self.counts: list[Tensor] = []
        self.tokens: list[Tensor] = []
        self.parents: list[Tensor] = []  # index within the layer before
        self.draft_probs: list[Tensor] = []
        self.pairs: list[Tensor] = []
        self.num_forwards = 0
        self.ids = self.newest_ids = torch.zeros_like(context.newest)
        self.layer_ids: list[Tensor] = []
        self.joint: list[Tensor] = []  # per forward pass, before warping, if the draft weighs the beams

    @property
    def depth(self) -> int:
        return len(self.pairs)

    def read(self) -> tuple[Tensor, Tensor]:
        """Read the newest layer in one draft forward pass: its logits [B, n, V] and states [B, n, D]."""
        context, session = self.context, self.context.session
        assert session is not None
        device = session.index.device
        held = tensor_on(device, [session.index.num_nodes(row) for row in range(len(context.limits))])
        if not self.num_forwards:
            (unread, counts), (tokens, parents) = context.unread, context.catch_up
            reading = session.extend(
                torch.cat([unread, tokens], 1), counts=counts, parents=parents, last=tokens.shape[1]
            )
            index = context.newest.to(device)
            self.ids = self.newest_ids = held.unsqueeze(1) + index
            if self.weighed_by_draft:
                logps = context.fit(reading.logits).double().log_softmax(-1)
                likelihoods = _likelihoods(logps, tokens, parents - held.unsqueeze(1)).gather(1, index)
                scores = context.draft_scores + likelihoods.to(context.limits.device)
                self.scores = scores.masked_fill(context.scores.isneginf(), -torch.inf)
            logits, hidden = (_at(value, index) for value in (reading.logits, reading.hidden))
        else:
            parents = self.ids.gather(1, self.parents[-1].to(device))
            reading = session.extend(self.tokens[-1].to(device), parents=parents, last=self.width)
            self.ids = held.unsqueeze(1) + torch.arange(self.width, device=device)
            self.layer_ids.append(self.ids)
            logits, hidden = reading.logits, reading.hidden
        self.num_forwards += 1
        return context.fit(logits), hidden.to(context.limits.device)

    def add(self, probs: Tensor, joint: Tensor) -> None:
        """Draw the next layer from its distribution [B, n V]; joint [B, n, V]."""
        first, vocab_size = self.depth * self.width, joint.shape[-1]
        pairs, num_real = candidates(self.scheme, probs, self.context.uniforms[:, first : first + self.width])
        count = torch.minimum(self.count, num_real.to(self.count.dtype))
        tokens = pairs % vocab_size
        self.tokens.append(tokens)
        self.parents.append(pairs // vocab_size)
        self.draft_probs.append(probs)
        self.pairs.append(pairs)
        self.counts.append(count)
        self.sequences = self.sequences.after(pairs, vocab_size)
        scores = joint.flatten(1).gather(1, pairs)
        beyond = torch.arange(self.width, device=pairs.device) >= count.unsqueeze(1)
        scores = scores.masked_fill(beyond, -torch.inf)
        self.best = scores.argmax(1)
        for end in self.context.end_ids:
            scores = scores.masked_fill(tokens == end, -torch.inf)
        self.scores = scores

    def widen(self, prob: Tensor | None, min_accepted: int) -> None:
        """Set how many candidates of the next layer count, if one is accepted with this probability [B]."""
        if prob is not None:
            needed = (min_accepted / prob.nan_to_num(1.0).clamp(min=1e-6)).ceil().clamp(min_accepted, self.width)
            self.count = needed.to(self.count.dtype)

    def step(self, logits: Tensor, hidden: Tensor, best: Tensor | None) -> DraftStep:
        """What a policy sees: the most probable beam. Before a layer is drawn: the state that has read the last one's best."""
        rows = torch.arange(len(logits), device=logits.device)
        if best is None:
            at = self.best if self.depth else self.scores.argmax(1)
            return DraftStep(
                self.depth + 1, logits[rows, at], warp(logits[rows, at], self.context.sampling), hidden[rows, at]
            )
        at = self.parents[-1][rows, best]
        probs = warp(logits[rows, at], self.context.sampling)
        return DraftStep(self.depth, logits[rows, at], probs, hidden[rows, at], self.tokens[-1][rows, best])

    def forest(self, num_layers: int, counted: Tensor, num_calls: Tensor, valid: Tensor) -> Forest:
        """The first layers as flat arrays."""
        num_rows, num_beams = self.context.scores.shape
        empty = torch.zeros(num_rows, 0, dtype=torch.long, device=counted.device)
        parents = [
            index + (num_beams + (layer - 1) * self.width if layer else 0)
            for layer, index in enumerate(self.parents[:num_layers])
        ]
        return Forest(
            tokens=torch.cat([empty, *self.tokens[:num_layers]], 1),
            parents=torch.cat([empty, *parents], 1),
            draft_probs=self.draft_probs[:num_layers],
            pairs=self.pairs[:num_layers],
            counts=self.counts[:num_layers],
            num_layers=counted,
            num_calls=num_calls,
            scores=self.context.scores,
            sequences=self.context.sequences,
            newest_ids=self.newest_ids,
            node_ids=torch.cat([empty.to(self.ids.device), *self.layer_ids], 1),
            num_read=self.width * min(len(self.layer_ids), num_layers),
            was_read=self.num_forwards > 0,
            joint=self.joint,
            valid=valid,
        )


def _likelihoods(logps: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
    """Log-likelihood [B, C] of every node from log-probabilities [B, C, V] after each, its first token not counted.

    parents [B, C] are earlier nodes of these; negative where a node is a first one.
    """
    rows = torch.arange(len(tokens), device=tokens.device)
    total = torch.zeros_like(tokens, dtype=torch.float64)
    for node in range(tokens.shape[1]):
        above = parents[:, node].clamp(min=0)
        following = total[rows, above] + logps[rows, above, tokens[:, node]]
        total[:, node] = torch.where(parents[:, node] >= 0, following, 0.0)
    return total


def _at(values: Tensor, index: Tensor) -> Tensor:
    """The values [B, C, ...] at index [B, W]."""
    return values[torch.arange(len(values), device=values.device).unsqueeze(1), index]

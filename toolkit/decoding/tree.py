"""Draft trees: several candidates at every node, drawn level by level, judged in one target forward.

Papers: MCSD (arXiv:2401.06706), section 3 (k_config, tree attention); SpecInfer (arXiv:2305.09781); Khisti et al.
(arXiv:2410.18234) for independent drafts. theirs -> ours: k_config -> k_config.
Deviation: a stopping policy may leave a node without children. Drawn candidates are never withdrawn.

Shapes: B rows, n nodes of a level, k children per node, S sources of laws, V vocabulary, D hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from toolkit.decoding.proposers import DraftContext
from toolkit.errors import InputError
from toolkit.sampling import warp
from toolkit.session import Reading
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.transfer import Gate
from toolkit.types import DraftStep, Proposal, Verdict
from toolkit.verification.drawing import DRAWINGS, candidates


def parse_k_config(k_config: str | int | Sequence[int]) -> tuple[int, ...]:
    """Children per level: "4x2x1", "4,2,1" or [4, 2, 1]. Raises InputError unless they are positive integers."""
    parts = re.split(r"[x,]", k_config) if isinstance(k_config, str) else k_config
    parts = [parts] if isinstance(parts, int) else parts
    try:
        widths = tuple(int(str(part).strip()) for part in parts)
    except ValueError:
        widths = ()
    if not widths or min(widths) < 1:
        raise InputError(f"k_config: expected positive integers like 4x2x1, got {k_config!r}")
    return widths


def num_nodes(k_config: Sequence[int]) -> int:
    """Nodes of a full tree: the sum of the cumulative products."""
    total, level = 0, 1
    for width in k_config:
        level *= width
        total += level
    return total


@dataclass
class _Tree:
    """The tree so far, all rows alike in shape; `real` says which nodes count. Node ids are those of the caches."""

    tokens: list[Tensor] = field(default_factory=list)  # per level [B, n]
    parents: list[Tensor] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)  # per level that has children [B, n * S, V]
    law_of: list[Tensor] = field(default_factory=list)
    real: list[Tensor] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Nodes of all levels."""
        return sum(level.shape[1] for level in self.tokens)

    def cut(self, levels: int) -> None:
        """Leave the first levels."""
        for part in (self.tokens, self.parents, self.laws, self.law_of, self.real):
            del part[levels:]


@dataclass
class TreeProposer:
    """A tree of candidates per round.

    k_config      children per level; the policy stops levels and nodes within it
    drawing       how the children of a node are drawn, see `toolkit.verification.drawing`
    temperatures  with drawing "independent": child j is drawn at temperatures[j % S]; several drafts take turns likewise
    """

    k_config: str | Sequence[int] = "4x2x1"
    drawing: str = "iid"
    temperatures: Sequence[float] = ()
    teaches: ClassVar[bool] = False
    takes_turns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.widths = parse_k_config(self.k_config)
        if self.drawing not in DRAWINGS:
            raise InputError(f"drawing: expected one of {', '.join(DRAWINGS)}, got {self.drawing!r}")
        if self.temperatures and self.drawing != "independent":
            raise InputError(f"several temperatures need drawing=independent, got {self.drawing}")

    def max_nodes(self, limit: int) -> int:
        """The most nodes of a round of at most `limit` levels."""
        return num_nodes(self.widths[:limit])

    def propose(self, context: DraftContext, policy: StoppingPolicy, state: State) -> tuple[Proposal, State]:
        """Grow the tree level by level until no row wants another one. A level grown in vain is cut off again."""
        limits = context.limits
        num_rows, device = len(limits), limits.device
        drafting = policy.begin(num_rows, state, device) & (limits > 0)
        num_calls = torch.zeros_like(limits)
        gate, tree, node_state = Gate(device), _Tree(), state
        growing = drafting.unsqueeze(1)  # [B, n]: nodes of the newest level that get children
        num_read = 0  # nodes the drafts have read
        most = context.most if policy.limit is None else min(context.most, policy.limit)
        for depth, width in enumerate(self.widths[:most], start=1):
            growing = growing & (limits >= depth).unsqueeze(1)
            if not gate.passes(growing):
                break
            readings, num_read = self._read(context, tree), tree.size
            num_calls += growing.any(1)
            logits = [context.fit(reading.logits) for reading in readings]
            hidden = readings[0].hidden.to(device)
            laws = self._laws(context, logits, tree)
            if policy.reads:
                step = DraftStep(depth, _flat(logits[0]), _flat(laws[:, :, 0]), _flat(hidden))
                node_state, go_on = policy.read(step, node_state)
                growing = growing & go_on.view_as(growing)
                if not gate.passes(growing):
                    break
            growing, node_state = self._draw(context, tree, growing, laws, logits[0], hidden, width, policy, node_state)
        tree.cut(gate.settle() // (2 if policy.reads else 1))  # a question before each forward, one before each draw
        return _proposal(tree, num_calls, device, min(num_read, tree.size)), state

    def commit(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, accepted: list[int], lengths: list[int]
    ) -> None:
        """Keep the accepted path in every draft cache, as far as it was read there."""
        keep_path(context, proposal, verdict, lengths)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _read(self, context: DraftContext, tree: _Tree) -> list[Reading]:
        """Every draft reads the context, then level after level."""
        if not tree.tokens:
            pairs = zip(context.sessions, context.unread, strict=True)
            return [session.extend(tokens, counts=counts) for session, (tokens, counts) in pairs]
        tokens, parents = tree.tokens[-1], tree.parents[-1]
        return [
            session.extend(tokens.to(device), parents=parents.to(device), last=tokens.shape[1])
            for session in context.sessions
            for device in (session.index.device,)
        ]

    def _laws(self, context: DraftContext, logits: list[Tensor], tree: _Tree) -> Tensor:
        """The laws of each source at each node of the newest level: [B, n, S, V]."""
        seen = _seen(context, tree)
        if len(logits) > 1:
            temperatures: list[float | None] = list(self.temperatures) or [None] * len(logits)
            settings = [context.sampling.at(t) for t in temperatures]
            pairs = zip(logits, settings, strict=True)
        else:
            settings = [context.sampling.at(t) for t in self.temperatures] or [context.sampling]
            pairs = zip(logits * len(settings), settings, strict=True)
        return torch.stack([warp(source, sampling, seen) for source, sampling in pairs], 2)

    def _draw(
        self,
        context: DraftContext,
        tree: _Tree,
        growing: Tensor,
        laws: Tensor,
        logits: Tensor,
        hidden: Tensor,
        width: int,
        policy: StoppingPolicy,
        node_state: State,
    ) -> tuple[Tensor, State]:
        """Draw `width` children of every node of the newest level; returns which of them grow, and their state."""
        num_rows, num_parents, num_sources, vocab_size = laws.shape
        first, first_parent = tree.size, tree.size - (num_parents if tree.tokens else 0)
        count = num_parents * width
        uniforms = context.uniforms[:, first : first + count].view(num_rows, num_parents, width)
        source = torch.arange(width, device=laws.device) % num_sources
        of_child = laws[:, :, source] if self.drawing == "independent" else laws[:, :, 0]
        tokens, num_real = candidates(self.drawing, of_child, uniforms)
        real = growing.unsqueeze(2) & (torch.arange(width, device=laws.device) < num_real.unsqueeze(2))
        parent = torch.arange(num_parents, device=laws.device).repeat_interleave(width)
        start = sum(level.shape[1] for level in tree.laws)
        tree.tokens.append(tokens.reshape(num_rows, count))
        ids = parent + first_parent if len(tree.tokens) > 1 else torch.full_like(parent, -1)
        tree.parents.append(ids.expand(num_rows, -1))
        tree.laws.append(laws.reshape(num_rows, -1, vocab_size))
        tree.law_of.append((start + parent * num_sources + source.repeat(num_parents)).expand(num_rows, -1))
        tree.real.append(real.reshape(num_rows, count))

        flat = (torch.arange(num_rows, device=laws.device).unsqueeze(1) * num_parents + parent).reshape(-1)
        child_state = {key: value[flat] for key, value in node_state.items()}
        child_law = laws[:, parent, source.repeat(num_parents)]
        step = DraftStep(
            len(tree.tokens), _flat(logits)[flat], _flat(child_law), _flat(hidden)[flat], tree.tokens[-1].reshape(-1)
        )
        child_state, go_on = policy.step(step, child_state)
        grows = tree.real[-1] & go_on.view(num_rows, count)
        for end in context.end_ids:
            grows = grows & (tree.tokens[-1] != end)
        return grows, child_state


def keep_path(context: DraftContext, proposal: Proposal, verdict: Verdict, lengths: list[int]) -> None:
    """Leave in every draft's cache the context (`lengths` tokens per row) and the accepted nodes that were read there."""
    if proposal.cache_ids is None or proposal.num_read == 0:
        for session in context.sessions:
            session.truncate(lengths)
        return
    steps = torch.arange(verdict.path.shape[1], device=verdict.path.device)
    ids = proposal.cache_ids.gather(1, verdict.path.clamp(min=0))
    kept = (steps < verdict.length.unsqueeze(1)) & (ids < proposal.num_read)
    deepest = torch.where(kept, ids, -1).amax(1, keepdim=True)
    for session in context.sessions:
        session.keep(deepest.to(session.index.device))


def _flat(values: Tensor) -> Tensor:
    """[B, n, ...] as [B * n, ...]: nodes are rows to a policy."""
    return values.reshape(-1, *values.shape[2:])


def _proposal(tree: _Tree, num_calls: Tensor, device: torch.device, num_read: int) -> Proposal:
    """The tree as flat arrays, nodes that count first."""
    num_rows = len(num_calls)
    if not tree.tokens:
        empty = torch.zeros(num_rows, 0, dtype=torch.long, device=device)
        return Proposal(empty, torch.zeros(num_rows, 0, 1, device=device), torch.zeros_like(num_calls), num_calls)
    real = torch.cat(tree.real, 1)
    order = (~real).to(torch.uint8).argsort(dim=1, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=device).expand_as(order))
    parents = torch.cat(tree.parents, 1).gather(1, order)
    parents = torch.where(parents >= 0, rank.gather(1, parents.clamp(min=0)), -1)
    return Proposal(
        tokens=torch.cat(tree.tokens, 1).gather(1, order),
        laws=torch.cat(tree.laws, 1),
        num_drafted=real.sum(1),
        num_calls=num_calls,
        parents=parents,
        law_of=torch.cat(tree.law_of, 1).gather(1, order),
        cache_ids=order,
        num_read=num_read,
    )


def _seen(context: DraftContext, tree: _Tree) -> Tensor | None:
    """Tokens of the text up to each node of the newest level [B, n, V] bool, for the repetition penalty."""
    if context.seen is None:
        return None
    seen, first = context.seen.unsqueeze(1), -1
    for tokens, parents in zip(tree.tokens, tree.parents, strict=True):
        before = seen[torch.arange(len(tokens), device=tokens.device).unsqueeze(1), parents - first]
        first += seen.shape[1]
        seen = before.scatter(2, tokens.unsqueeze(2), True)
    return seen

"""Draft trees: several candidates at every node, drawn level by level, verified in one forward pass of the target.

Papers: MCSD (arXiv:2401.06706), section 3 (k_config, tree attention); SpecInfer (arXiv:2305.09781). SpecTr
(arXiv:2310.15141) and Khisti et al. (arXiv:2410.18234), section 2, have K chains; section 5.2 has different drafts.
theirs -> ours: k_config -> k_config; K i.i.d. chains of length L -> k_config Kx1x...x1.

Chains may draw the same token. They share a node then, which caches hold and models read once. Its candidates are the
next tokens of all chains that share it. They stand in the order of the chains, each with the distribution it was drawn
from. So all chains that agree with the accepted text stay candidates.

With several drafts, or temperatures, first-level child j and everything below it comes from source j mod S. Each draft
model reads its own chains only. At temperature 0 child j is the next of its source's most probable tokens.
Deviation: a stopping policy may leave a node without children. Drawn candidates are never withdrawn.

Shapes: B rows, k children per chain, W distinct nodes of a level, S sources, V vocabulary, D hidden size. C is the number of
chains of a level, the product of the levels' widths.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from toolkit.config.notes import AtLeast
from toolkit.config.values import check_ranges, shown
from toolkit.decoding.proposers.base import DraftContext, Numbers, TextProposer, empty_proposal
from toolkit.decoding.proposers.distinct import DistinctNodes
from toolkit.engine import Session
from toolkit.engine.device import Gate, tensor_on
from toolkit.errors import InputError
from toolkit.grammar import masked
from toolkit.sampling import Sampling, penalized, warp
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import DraftStep, Proposal, Verdict
from toolkit.verification.schemes import candidates, most_probable

MOST = 2**16  # nodes of a tree


def parse_k_config(k_config: str | int | Sequence[int]) -> tuple[int, ...]:
    """Children per level: "4x2x1", "4,2,1" or [4, 2, 1]. Raises InputError unless they are positive integers."""
    parts = re.split(r"[x,]", k_config) if isinstance(k_config, str) else k_config
    parts = [parts] if isinstance(parts, int) else parts
    try:
        widths = tuple(int(str(part).strip()) for part in parts)
    except (ValueError, TypeError):
        widths = ()
    if not widths or min(widths) < 1:
        raise InputError(f"k_config: expected positive integers like 4x2x1, got {shown(k_config)}")
    if len(widths) > MOST or num_nodes(widths) > MOST:
        raise InputError(f"k_config: expected at most {MOST} nodes, got {shown(k_config)}")
    return widths


def num_nodes(k_config: Sequence[int]) -> int:
    """Nodes of a full tree: the sum of the cumulative products."""
    total, level = 0, 1
    for width in k_config:
        level *= width
        total += level
    return total


@dataclass
class TreeProposer(TextProposer):
    """A tree of candidates per round.

    k_config      children per level; the policy stops levels and nodes within it
    scheme        how the children of a node are drawn, see `toolkit.verification.schemes`
    temperatures  with scheme "independent": one per source; several drafts take their own
    """

    name = "tree"
    k_config: Annotated[str | int | Sequence[int], "children per level: 4x2x1 or [4,2,1]"] = "4x2x1"
    scheme: Literal["iid", "independent", "without_replacement", "greedy", "top_k"] = "iid"
    temperatures: Sequence[Annotated[float, AtLeast(0)]] = ()
    obeys = ("begin", "read", "step")
    uses_all_drafts: ClassVar[bool] = True
    reads_grammars: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ranges(self, "proposer.")
        self.widths = parse_k_config(self.k_config)
        self.temperatures = tuple(self.temperatures)  # an array has no truth value of its own
        if self.temperatures and self.scheme != "independent":
            raise InputError(f"several temperatures need scheme=independent, got {self.scheme}")

    def greedy(self) -> TreeProposer:
        """The tree at temperature 0: the children of a node are the k most probable tokens (MCSD)."""
        return replace(self, scheme="top_k", temperatures=())

    def max_nodes(self, limit: int) -> int:
        return num_nodes(self.widths[:limit])

    def num_drafts(self, available: int) -> int:
        """Draft models that have a child of the context to draft; the first one alone where all children are of one q."""
        return min(available, self.widths[0] if self.scheme in ("independent", "top_k") else 1)

    def propose(self, context: DraftContext, policy: StoppingPolicy, state: State) -> tuple[Proposal, State]:
        """Grow the tree level by level until no row wants another one. Levels beyond that are cut off again."""
        limits = context.limits
        state, starts = policy.begin(limits > 0, state)
        drafting = starts & (limits > 0)
        sources = [_Source(draft, context.sampling.at(own)) for draft, own in self.sources(len(context.sessions))]
        tree = _Tree(sources, len(context.sessions), drafting, state, Numbers(policy, limits))
        gate, num_calls = Gate(limits.device), torch.zeros_like(limits)
        most = context.most if policy.limit is None else min(context.most, policy.limit)
        for depth, width in enumerate(self.widths[:most], start=1):
            tree.growing = tree.growing & (limits >= depth).unsqueeze(1)
            if not gate.passes(tree.growing):
                break
            level = tree.read(context, depth)
            num_calls += level.num_calls
            tree.add_numbers(level)
            if policy.reads:
                logits, probs = (_rows(values, level.own) for values in (level.logits, level.probs))
                step, before = DraftStep(depth, _flat(logits), _flat(probs), _flat(level.hidden)), tree.state
                tree.state, go_on = policy.read(step, before)
                tree.numbers.add_state(tree.state, before, tree.growing.flatten())
                tree.growing = tree.growing & go_on.view_as(tree.growing)
                if not gate.passes(tree.growing):
                    break
            tree.grow(context, level, width, self.scheme, policy)
        tree.cut(gate.settle() // (2 if policy.reads else 1))  # questions: one per forward pass, one per draw
        return tree.proposal(num_calls), state

    def commit(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, accepted: list[int], lengths: list[int]
    ) -> None:
        """Keep the accepted path in every draft cache, as far as it was read there."""
        keep_path(context, proposal, verdict, lengths)

    def sources(self, num_drafts: int) -> list[tuple[int, float | None]]:
        """Where first-level children come from in turn, with this many drafts: draft model and its own temperature, if any.

        Raises InputError unless the temperatures fit the drafts.
        """
        if self.temperatures and num_drafts > 1 and len(self.temperatures) != num_drafts:
            raise InputError(
                f"proposer.temperatures: expected one per draft model ({num_drafts}), got {len(self.temperatures)}"
            )
        temperatures: list[float | None] = list(self.temperatures) or [None] * num_drafts
        return [(s if num_drafts > 1 else 0, temperature) for s, temperature in enumerate(temperatures)]


@dataclass(frozen=True)
class _Source:
    """A draft model (its index) and the settings it draws with."""

    draft: int
    sampling: Sampling


@dataclass(frozen=True)
class _Level:
    """What the newest forward pass of each draft says, at the nodes of every source, one source after another: n in all.

    logits, penalized, probs [B, n, V]  as they come, after the repetition penalty, and as tokens are drawn
    at [B, C, S]                    which of them is a chain's end, by source
    own [B, C], hidden [B, C, D]    the same by the chain's own source (the first one at the context), and the state there
    num_calls [B]                   forward passes that the row pays for
    """

    logits: Tensor
    penalized: Tensor
    probs: Tensor
    at: Tensor
    own: Tensor
    hidden: Tensor
    num_calls: Tensor


@dataclass
class _Tree:
    """The tree so far.

    growing [B, C]    chains that get children; `state` [B * C, ...] is the policy's at their ends
    source            where each chain comes from; at the context there is one chain, of no source
    nodes             the target's; per draft its own nodes, and per level, the context first, its own chains [C_d]
    """

    sources: list[_Source]
    num_drafts: int
    drafting: Tensor
    state: State
    numbers: Numbers
    source: list[int] = field(init=False)
    growing: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.growing = self.drafting.unsqueeze(1)
        self.source = [0]
        self.nodes = DistinctNodes()
        self.own_nodes = [DistinctNodes() for _ in range(self.num_drafts)]
        self.own_chains = [[[0]] for _ in range(self.num_drafts)]
        self.tables: list[Tensor] = []  # per level with children [B, L, V]
        self.drawn_from: list[Tensor] = []  # per level [B, C]: index into all tables
        self.alive: list[Tensor] = []  # per level [B, C]
        self.num_read = [0] * self.num_drafts  # levels that each draft has read, the context not counted

    @property
    def depth(self) -> int:
        return len(self.alive)

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, context: DraftContext, depth: int) -> _Level:
        """Let every draft read the newest nodes of its chains."""
        readings = [self._read_one(context, draft, session) for draft, session in enumerate(context.sessions)]
        num_rows, num_chains = self.growing.shape
        device = self.growing.device
        tables, at, first = [], [], 0
        num_calls = torch.zeros(num_rows, dtype=torch.long, device=device)
        for draft in range(self.num_drafts):
            num_calls = num_calls + self.growing[:, tensor_on(device, self.own_chains[draft][-1])].any(1)
        for source in self.sources:
            logits, _ = readings[source.draft]
            nodes, allowed = self.own_nodes[source.draft], None
            seen = None if context.seen is None else nodes.seen(context.seen)
            if context.grammars is not None:
                allowed = nodes.allowed(context.grammars, context.vocab_size).to(logits.device)
                logits = masked(logits, allowed)
            q = warp(logits, source.sampling, seen, allowed=allowed)
            tables.append((logits, penalized(logits, source.sampling, seen), q))
            at.append(first + self._end_of_chains(source.draft, num_rows, num_chains))
            first += logits.shape[1]
        index = torch.stack(at, 2)
        own = index.gather(2, _columns(self.source, index)).squeeze(2)
        logits, penalties, probs = (torch.cat(parts, 1) for parts in zip(*tables, strict=True))
        # States of different models are not comparable: heads are refused with several drafts (`Method.bind`).
        states = torch.cat([readings[0][1]] * len(self.sources), 1) if self.num_drafts == 1 else logits[..., :0]
        return _Level(logits, penalties, probs, index, own, _rows(states, own), num_calls)

    def add_numbers(self, level: _Level) -> None:
        """Add what a level's children are drawn from, and the states there, to the numbers of the round."""
        ends = level.own.unsqueeze(2) if self.depth else level.at  # children of the context are of all sources
        probs = _flat(_rows(level.probs[..., :1], ends.flatten(1)))
        hidden = level.hidden.unsqueeze(2).expand(*ends.shape, -1).flatten(0, 2)
        rows = self.growing.unsqueeze(2).expand_as(ends).flatten()
        self.numbers.add_step(DraftStep(self.depth, probs, probs, hidden), rows)

    def _read_one(self, context: DraftContext, draft: int, session: Session) -> tuple[Tensor, Tensor]:
        """Logits [B, W, V] and states [B, W, D] at the draft's newest nodes."""
        nodes, device = self.own_nodes[draft], self.growing.device
        if not nodes.tokens:
            tokens, counts = context.unread(draft)
            reading = session.extend(tokens, counts=counts)
        else:
            device_of_cache = session.index.device
            tokens, parents = nodes.tokens[-1].to(device_of_cache), nodes.parents[-1].to(device_of_cache)
            reading = session.extend(tokens, parents=parents, last=tokens.shape[1])
            self.num_read[draft] = len(nodes.tokens)
        return context.fit(reading.logits), reading.hidden.to(device)

    def _end_of_chains(self, draft: int, num_rows: int, num_chains: int) -> Tensor:
        """The draft's newest node at the end of each chain [B, C]; 0 for chains of other drafts."""
        chains, device = self.own_chains[draft][-1], self.growing.device
        own = self.own_nodes[draft].newest(num_rows, len(chains), device)
        ends = torch.zeros(num_rows, num_chains, dtype=torch.long, device=device)
        return ends.index_copy(1, tensor_on(device, chains), own)

    # -- growing --------------------------------------------------------------------------------------------------

    def grow(self, context: DraftContext, level: _Level, width: int, scheme: str, policy: StoppingPolicy) -> None:
        """Draw `width` children of every chain; chains without children stop."""
        num_rows, num_chains = self.growing.shape
        count, device = num_chains * width, self.growing.device
        parent = torch.arange(num_chains, device=device).repeat_interleave(width)
        child = torch.arange(width, device=device).repeat(num_chains)
        of_child = [j % len(self.sources) for j in range(width)]
        self.source = [s for source in self.source for s in [source] * width] if self.depth else of_child
        drawn_from = source_rows = level.at[:, parent].gather(2, _columns(self.source, level.at)).squeeze(2)
        first = sum(alive.shape[1] for alive in self.alive)
        uniforms = context.uniforms[:, first : first + count].view(num_rows, num_chains, width)
        child_probs = _rows(level.probs, drawn_from).view(num_rows, num_chains, width, -1)
        table = level.probs
        if scheme == "top_k":  # nothing is drawn: each child's q is a point mass on it
            together = 1 if self.depth else len(self.sources)  # siblings of equal rank
            rank, rows = child // together, torch.arange(num_rows, device=device).unsqueeze(1)
            ranked, num_real = most_probable(level.penalized, (width - 1) // together + 1)
            tokens, real = ranked[rows, drawn_from, rank], rank < num_real[rows, drawn_from]
            table = torch.nn.functional.one_hot(tokens, table.shape[-1]).to(table.dtype)
            drawn_from = torch.arange(count, device=device).expand(num_rows, -1)
            child_probs = table.view_as(child_probs)
        else:
            tokens, num_real = candidates(
                scheme, child_probs if scheme == "independent" else child_probs[:, :, 0], uniforms
            )
            tokens, real = tokens.flatten(1), child < num_real.repeat_interleave(width, 1)
        alive = self.growing[:, parent] & real
        num_before = sum(other.shape[1] for other in self.tables)
        self._add(tokens, parent, alive, width)
        self.tables.append(table)
        self.drawn_from.append(num_before + drawn_from)
        flat = (torch.arange(num_rows, device=device).unsqueeze(1) * num_chains + parent).reshape(-1)
        logits, hidden = _flat(_rows(level.logits, source_rows)), _flat(level.hidden)[flat]
        step = DraftStep(self.depth, logits, child_probs.flatten(0, 2), hidden, tokens.reshape(-1))
        before = {key: value[flat] for key, value in self.state.items()}
        self.state, go_on = policy.step(step, before)
        self.numbers.add_state(self.state, before, alive.flatten())
        self.growing = alive & go_on.view_as(alive)
        for end in context.end_ids:
            self.growing = self.growing & (tokens != end)

    def _add(self, tokens: Tensor, parent: Tensor, alive: Tensor, width: int) -> None:
        """Add a level of chains: tokens and alive [B, C], parent [C] among the chains of the level before."""
        above = self.nodes.ids[-1][:, parent] if self.depth else torch.full_like(tokens, -1)
        self.nodes.add(tokens, above, alive)
        self.alive.append(alive)
        for draft, nodes in enumerate(self.own_nodes):
            before = {chain: i for i, chain in enumerate(self.own_chains[draft][-1])}
            chains = [c for c, source in enumerate(self.source) if self.sources[source].draft == draft]
            self.own_chains[draft].append(chains)
            columns = tensor_on(parent.device, chains)
            if nodes.ids:
                parents = nodes.ids[-1][:, tensor_on(parent.device, [before[chain // width] for chain in chains])]
            else:
                parents = torch.full_like(tokens[:, columns], -1)
            nodes.add(tokens[:, columns], parents, alive[:, columns])

    def cut(self, levels: int) -> None:
        """Leave the first levels."""
        for part in (self.tables, self.drawn_from, self.alive):
            del part[levels:]
        for nodes in (self.nodes, *self.own_nodes):
            nodes.cut(levels)
        for chains in self.own_chains:
            del chains[levels + 1 :]
        self.num_read = [min(read, levels) for read in self.num_read]

    # -- the result -----------------------------------------------------------------------------------------------

    def proposal(self, num_calls: Tensor) -> Proposal:
        """The tree as flat arrays: nodes that count first, and candidates that count first."""
        if not self.alive:
            return empty_proposal(num_calls, self.numbers.valid())
        real = torch.cat(self.nodes.real, 1)
        order, rank = _first_ones(real)
        parents = torch.cat(self.nodes.parents, 1).gather(1, order)
        alive = torch.cat(self.alive, 1)
        chosen, _ = _first_ones(alive)
        return Proposal(
            tokens=torch.cat(self.nodes.tokens, 1).gather(1, order),
            draft_probs=torch.cat(self.tables, 1),
            num_drafted=real.sum(1),
            num_calls=num_calls,
            parents=_renumbered(parents, rank),
            candidates=_renumbered(torch.cat(self.nodes.ids, 1).gather(1, chosen), rank),
            drawn_from=torch.cat(self.drawn_from, 1).gather(1, chosen),
            cache_ids=torch.stack([self._cached(draft).gather(1, order) for draft in range(self.num_drafts)], 1),
            valid=self.numbers.valid(),
        )

    def _cached(self, draft: int) -> Tensor:
        """Per node of the target's, padding included, its id in the draft's cache [B, sum of W]; -1: not read there."""
        ids = torch.full((len(self.growing), self.nodes.size + 1), -1, device=self.growing.device)
        for level in range(self.num_read[draft]):
            chains = tensor_on(ids.device, self.own_chains[draft][level + 1])
            shared = self.nodes.ids[level][:, chains]
            ids.scatter_(1, torch.where(shared >= 0, shared, self.nodes.size), self.own_nodes[draft].ids[level])
        return ids[:, :-1]


def keep_path(context: DraftContext, proposal: Proposal, verdict: Verdict, lengths: list[int]) -> None:
    """Leave in every draft's cache the context (`lengths` tokens per row) and the accepted nodes that were read there."""
    if proposal.cache_ids is None:
        for session in context.sessions:
            session.truncate(lengths)
        return
    steps = torch.arange(verdict.path.shape[1], device=verdict.path.device)
    accepted = steps < verdict.length.unsqueeze(1)
    for draft, session in enumerate(context.sessions):
        ids = proposal.cache_ids[:, draft].gather(1, verdict.path.clamp(min=0))
        deepest = torch.where(accepted, ids, -1).amax(1, keepdim=True)
        if session.index.ancestors is None:  # it has read the context alone
            session.truncate(lengths)
        else:
            session.keep(deepest.to(session.index.device))


def _columns(source: list[int], like: Tensor) -> Tensor:
    """Which source each chain comes from, as an index [B, C, 1] into the last dimension of `like` [B, ., S]."""
    return tensor_on(like.device, source).expand(len(like), -1).unsqueeze(2)


def _rows(values: Tensor, at: Tensor) -> Tensor:
    """The values [B, W, ...] at [B, C]."""
    return values[torch.arange(len(values), device=values.device).unsqueeze(1), at]


def _first_ones(real: Tensor) -> tuple[Tensor, Tensor]:
    """The order that puts what is real [B, N] first, and the index of each in it."""
    order = (~real).to(torch.uint8).argsort(dim=1, stable=True)
    positions = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return order, torch.empty_like(order).scatter_(1, order, positions)


def _renumbered(ids: Tensor, rank: Tensor) -> Tensor:
    """Node ids [B, M] in the new order; -1 stays."""
    return torch.where(ids >= 0, rank.gather(1, ids.clamp(min=0)), -1)


def _flat(values: Tensor) -> Tensor:
    """Values [B, C, ...] as [B * C, ...]: chains are rows to a policy."""
    return values.flatten(0, 1)

"""Best-first trees: the draft's most probable tokens as nodes, as many as a policy wants and where it wants them.

Papers: EAGLE-2 (arXiv:2406.16858), section 4: expansion of a level's best nodes, then reranking of all; OPT-Tree
(arXiv:2406.17276); Miao et al., SpecInfer (arXiv:2305.09781), whose rule verifies.
theirs -> ours: V_i (value of a node) -> survival; top-k of a level -> width; m nodes kept -> `num_sent` of the policy.

Nothing is drawn: a node is a point mass on its token, so which nodes are sent may depend on all of q, at any temperature. The
policy judges every candidate by P(it is accepted | its parent is, no candidate before it was). Products of these are the
probability that a node enters the text, its survival. After each level the policy says how many of the best nodes are sent
if the tree ends there, and which of the newest the draft reads next. The best n nodes are a tree: no node survives with more
than its parent's probability, or than that of a candidate before it.
Deviation: survival is what the policy estimates, not the product of q; `TreeRate` has EAGLE-2's as a setting.

Shapes: B rows, W nodes that the draft reads at once, C candidates per node, M nodes that are kept, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.config.notes import Between
from toolkit.config.values import check_ranges
from toolkit.decoding.proposers.base import DraftContext, Numbers, TextProposer, empty_proposal, where_active
from toolkit.decoding.proposers.copying import point_masses
from toolkit.decoding.proposers.distinct import DistinctNodes
from toolkit.decoding.proposers.tree import keep_path
from toolkit.engine.device import Gate, most_of
from toolkit.grammar import masked
from toolkit.sampling import penalized, warp
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import Children, Nodes, Proposal, Verdict
from toolkit.verification.schemes import most_probable

TOKEN, PARENT, DEPTH, ID, NEWEST = range(5)


@dataclass
class BestFirstProposer(TextProposer):
    """A tree of the first draft model's most probable tokens per round.

    num_nodes     the most nodes of a tree
    width         the most nodes of a level that the draft reads
    num_children  candidates of a node
    """

    name = "best_first"
    scheme = "top_k"
    obeys = ("begin", "choose", "observe")
    chooses_nodes: ClassVar[bool] = True
    reads_grammars: ClassVar[bool] = True
    num_nodes: Annotated[int, Between(1, 1024)] = 64
    width: Annotated[int, Between(1, 1024)] = 10
    num_children: Annotated[int, Between(1, 64)] = 8

    def __post_init__(self) -> None:
        check_ranges(self, "proposer.")

    def max_nodes(self, limit: int) -> int:
        """The most nodes that the target reads at once, or the draft in a round."""
        return max(self.num_nodes, self.width * (limit - 1)) if limit else 0

    def propose(self, context: DraftContext, policy: StoppingPolicy, state: State) -> tuple[Proposal, State]:
        """Grow the tree level by level until the policy of no row has another one read."""
        limits = context.limits
        state, starts = policy.begin(limits > 0, state)
        growing = starts & (limits > 0)
        tree = _Tree(len(limits), self.num_nodes, limits.device)
        numbers, gate = Numbers(policy, limits), Gate(limits.device)
        num_calls, num_sent = torch.zeros_like(limits), torch.zeros_like(limits)
        most = context.most if policy.limit is None else min(context.most, policy.limit)
        for depth in range(1, most + 1):
            growing = growing & (limits >= depth)
            if not gate.passes(growing):
                break
            tokens, children = self._children(context, tree)
            num_calls = num_calls + growing
            real = children.real & tree.is_read(growing).unsqueeze(-1)
            probs = torch.where(real, policy.judge(children), 0.0)
            numbers.add(probs, growing)
            tree.add(tokens, probs.nan_to_num(0.0))
            before = state
            state, sent, read = policy.choose(tree.nodes, state)
            numbers.add_state(state, before, growing)
            state = where_active(state, before, growing)
            num_sent = torch.where(growing, torch.minimum(sent, (tree.survival > 0).sum(1)), num_sent)
            for end in context.end_ids:
                read = read & (tree.facts[TOKEN] != end)
            growing = tree.read_next(read & tree.nodes.newest & growing.unsqueeze(1), self.width)
        return tree.proposal(num_sent, num_calls, context.vocab_size, numbers.valid()), state

    def commit(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, accepted: list[int], lengths: list[int]
    ) -> None:
        """Keep the accepted path in the draft's cache, as far as it was read there."""
        keep_path(context, proposal, verdict, lengths)

    def _children(self, context: DraftContext, tree: _Tree) -> tuple[Tensor, Children]:
        """The candidates [B, W, C] of the nodes that the draft reads now, and what it says of them."""
        session, read, sampling = context.sessions[0], tree.read, context.sampling
        if not read.tokens:
            tokens, counts = context.unread(0)
            reading = session.extend(tokens, counts=counts)
        else:
            device = session.index.device
            tokens, parents = read.tokens[-1].to(device), read.parents[-1].to(device)
            reading = session.extend(tokens, parents=parents, last=tokens.shape[1])
        logits, seen = context.fit(reading.logits), None if context.seen is None else read.seen(context.seen)
        allowed = None
        if context.grammars is not None:
            allowed = read.allowed(context.grammars, context.vocab_size).to(logits.device)
            logits = masked(logits, allowed)
        ranked = penalized(logits, sampling, seen)
        candidates, num_real = most_probable(ranked, self.num_children)
        shown = sampling if sampling.temperature else replace(sampling, temperature=1.0)
        q = warp(logits, shown, seen, allowed=allowed)
        tree.dtype = q.dtype
        q = q.double()
        real = torch.arange(self.num_children, device=q.device) < num_real.unsqueeze(-1)
        probs = torch.where(real, q.gather(-1, candidates), 0.0)
        return candidates, Children(probs, torch.special.entr(q).sum(-1), real, sampling.temperature == 0)


class _Tree:
    """The best nodes so far, best first, padded to M.

    survival  [B, M] float64, probability to enter the text; 0 of padding
    facts     [5, B, M]: TOKEN, PARENT (index among the nodes, -1: the context), DEPTH (0 of padding), ID (in the draft's
              cache, -1: not read) and NEWEST (of the newest level, 0 or 1)
    read      the nodes that the draft has read, or reads next, by level; `at` [B, W] is where the newest of them are
    dtype     of the distributions that nodes are sent with
    """

    def __init__(self, num_rows: int, num_nodes: int, device: torch.device):
        self.survival = torch.zeros(num_rows, num_nodes, dtype=torch.float64, device=device)
        self.facts = torch.zeros(5, num_rows, num_nodes, dtype=torch.long, device=device)
        self.facts[[PARENT, ID]] = -1
        self.read, self.at, self.dtype = DistinctNodes(), self.facts[TOKEN, :, :0], torch.float32

    @property
    def nodes(self) -> Nodes:
        """What the policy sees of them."""
        return Nodes(len(self.read.tokens) + 1, self.survival, self.facts[DEPTH], self.facts[NEWEST] > 0)

    def is_read(self, growing: Tensor) -> Tensor:
        """Which of the nodes read last are no padding [B, W], in the rows [B] that grow; at first they are the contexts."""
        return self.read.real[-1] & growing.unsqueeze(1) if self.read.real else growing.unsqueeze(1)

    def add(self, tokens: Tensor, probs: Tensor) -> None:
        """Add the candidates [B, W, C] of the nodes read last, by P(accepted | parent is, none before) [B, W, C]."""
        facts, parents = self.facts.clone(), torch.full_like(tokens[..., 0], -1)
        facts[NEWEST] = 0
        above, depths = torch.ones_like(probs[..., 0]), torch.ones_like(parents)
        if self.read.real:
            above, depths, parents = self.survival.gather(1, self.at), facts[DEPTH].gather(1, self.at) + 1, self.at
            ids = self.read.first(len(self.read.tokens) - 1) + torch.arange(self.at.shape[1], device=tokens.device)
            facts[ID] = facts[ID].scatter(
                1, self.at, torch.where(self.read.real[-1], ids, facts[ID].gather(1, self.at))
            )
        none_before = pad((1 - probs).cumprod(-1), (1, -1), value=1.0)
        survival = (above.unsqueeze(-1) * none_before * probs).cummin(-1).values
        shared = (values.unsqueeze(-1).expand_as(tokens) for values in (parents, depths))
        children = torch.stack([tokens, *shared, torch.full_like(tokens, -1), torch.ones_like(tokens)])
        survival, facts = torch.cat([self.survival, survival.flatten(1)], 1), torch.cat([facts, children.flatten(2)], 2)
        order = survival.argsort(dim=1, descending=True, stable=True)  # of equals the parent is first
        rank, best = order.argsort(dim=1), order[:, : self.survival.shape[1]]
        self.survival, self.facts = survival.gather(1, best), facts.gather(2, best.expand(5, -1, -1))
        above = self.facts[PARENT]
        self.facts[PARENT] = torch.where((above >= 0) & (self.survival > 0), rank.gather(1, above.clamp(min=0)), -1)
        self.facts[NEWEST] *= self.survival > 0

    def read_next(self, wanted: Tensor, width: int) -> Tensor:
        """Have the draft read the best `width` of the nodes that are wanted [B, M]; returns which rows [B] have any."""
        wanted = wanted & (wanted.cumsum(1) <= width)
        counts = wanted.sum(1)
        self.at = (
            (~wanted).to(torch.uint8).argsort(dim=1, stable=True)[:, : most_of(counts, min(width, wanted.shape[1]))]
        )
        above = self.facts[PARENT].gather(1, self.at)
        ids = self.facts[ID].gather(1, above.clamp(min=0))
        self.read.tokens.append(self.facts[TOKEN].gather(1, self.at))
        self.read.parents.append(torch.where(above >= 0, ids, -1))
        self.read.real.append(wanted.gather(1, self.at))
        return counts > 0

    def proposal(self, num_sent: Tensor, num_calls: Tensor, vocab_size: int, valid: Tensor) -> Proposal:
        """The best nodes of every row, num_sent [B] of which count."""
        sent = most_of(num_sent, self.survival.shape[1], least=0)
        if not sent:
            return empty_proposal(num_calls, valid)
        index = torch.arange(sent, device=num_sent.device)
        facts = self.facts[:, :, :sent]
        return Proposal(
            tokens=facts[TOKEN],
            draft_probs=point_masses(facts[TOKEN], vocab_size, self.dtype),
            num_drafted=num_sent,
            num_calls=num_calls,
            parents=facts[PARENT],
            candidates=torch.where(index < num_sent.unsqueeze(1), index, -1),
            cache_ids=facts[ID].unsqueeze(1),
            valid=valid,
        )

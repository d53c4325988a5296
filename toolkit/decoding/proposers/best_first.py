"""Best-first trees: the draft's most probable tokens as nodes, as many as a policy wants and where it wants them.

Papers: EAGLE-2 (arXiv:2406.16858), section 4: expansion of a level's best nodes, then reranking of all; OPT-Tree
(arXiv:2406.17276); Miao et al., SpecInfer (arXiv:2305.09781), whose rule verifies.
theirs -> ours: V_i (value of a node) -> survival; top-k of a level -> width; m nodes kept -> `num_sent` of the policy.

Scheme top_k: nothing is drawn. A node is a point mass on its token, so which nodes are sent may depend on all of q, at any
temperature. The policy judges every candidate by P(it is accepted | its parent is, no candidate before it was). Products of
these are the probability that a node enters the text, its survival. After each level the policy says how many of the best
nodes are sent if the tree ends there, and which of the newest the draft reads next. The best n nodes are a tree: no node
survives with more than its parent's probability, or than that of a candidate before it.

Scheme without_replacement: children are drawn. The policy judges draws of a level before any of them is made, and chooses how
many are, best first. So how many children a node gets depends on earlier levels alone. What was drawn is sent. The policy
judges it again, to say what the draft reads next.

Deviation: survival is what the policy estimates, not the product of q; `TreeRate` has EAGLE-2's as a setting.

Shapes: B rows, W nodes that the draft reads at once, C candidates per node, M nodes that are kept, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

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
from toolkit.types import SMALLEST, Children, Nodes, Proposal, Verdict
from toolkit.verification.schemes import most_probable, num_distinct, without_replacement

TOKEN, PARENT, DEPTH, ID, NEWEST = range(5)


@dataclass
class BestFirstProposer(TextProposer):
    """A tree of the first draft model's tokens per round.

    num_nodes     the most nodes of a tree
    width         the most nodes of a level that the draft reads
    num_children  candidates of a node
    scheme        top_k: the most probable tokens; without_replacement: draws from q
    """

    name = "best_first"
    obeys = ("begin", "choose", "observe")
    chooses_nodes: ClassVar[bool] = True
    reads_grammars: ClassVar[bool] = True
    num_nodes: Annotated[int, Between(1, 1024)] = 64
    width: Annotated[int, Between(1, 1024)] = 10
    num_children: Annotated[int, Between(1, 64)] = 8
    scheme: Literal["top_k", "without_replacement"] = "top_k"

    def __post_init__(self) -> None:
        check_ranges(self, "proposer.")

    def greedy(self) -> BestFirstProposer:
        """The proposer at temperature 0: nothing is drawn."""
        return replace(self, scheme="top_k")

    def max_nodes(self, limit: int) -> int:
        """The most nodes that the target reads at once, or the draft in a round."""
        return max(self.num_nodes, self.width * (limit - 1)) if limit else 0

    def propose(self, context: DraftContext, policy: StoppingPolicy, state: State) -> tuple[Proposal, State]:
        """Grow the tree level by level until the policy of no row has another one read."""
        limits = context.limits
        state, starts = policy.begin(limits > 0, state)
        growing = starts & (limits > 0)
        tree = _Tree(len(limits), self.num_nodes, self.width, context.end_ids, limits.device)
        numbers, gate = Numbers(policy, limits), Gate(limits.device)
        num_calls, num_sent = torch.zeros_like(limits), torch.zeros_like(limits)
        most = context.most if policy.limit is None else min(context.most, policy.limit)
        for depth in range(1, most + 1):
            growing = growing & (limits >= depth)
            if not gate.passes(growing):
                break
            tokens, q, children = self._children(context, tree, depth)
            num_calls = num_calls + growing
            is_read = tree.is_read(growing)
            numbers.add(torch.where(is_read, children.entropy, 0.0), growing)
            real = children.real & is_read.unsqueeze(-1)
            probs = torch.where(real, policy.judge(children), 0.0)
            numbers.add(probs, growing)
            tree.add(tokens, probs.nan_to_num(0.0))
            if self.scheme != "top_k":
                tokens = tree.draw(q, policy.choose(tree.nodes, state)[1], context.uniforms, self.num_children)
                probs = policy.judge(replace(children, drawn=q.gather(-1, tokens).double()))
                numbers.add(torch.where(real, probs, 0.0), growing)
                tree.judge(probs.nan_to_num(0.0))
            before = state
            state, sent, read = policy.choose(tree.nodes, state)
            sent = torch.maximum(sent, tree.num_drawn)
            numbers.add_state(state, before, growing)
            state = where_active(state, before, growing)
            num_sent = torch.where(growing, torch.minimum(sent, (tree.survival > 0).sum(1)), num_sent)
            growing = tree.read_next(read & growing.unsqueeze(1))
        return tree.proposal(num_sent, num_calls, context.vocab_size, numbers.valid()), state

    def commit(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, accepted: list[int], lengths: list[int]
    ) -> None:
        """Keep the accepted path in the draft's cache, as far as it was read there."""
        keep_path(context, proposal, verdict, lengths)

    def _children(self, context: DraftContext, tree: _Tree, depth: int) -> tuple[Tensor, Tensor, Children]:
        """The most probable children [B, W, C] of the nodes that the draft reads now, q [B, W, V], and what it says of them."""
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
        tree.dtype, draws = q.dtype, self.scheme != "top_k"
        if draws:
            num_real = num_distinct(q, self.num_children)
        exact = q.double()
        real = torch.arange(self.num_children, device=q.device) < num_real.unsqueeze(-1)
        probs = torch.where(real, exact.gather(-1, candidates), 0.0)
        entropy = torch.special.entr(exact).sum(-1)
        return candidates, q, Children(probs, entropy, real, sampling.temperature == 0, depth, draws)


class _Tree:
    """The best nodes so far, best first, padded to M.

    survival  [B, M] float64, probability to enter the text; 0 of padding
    facts     [5, B, M]: TOKEN, PARENT (index among the nodes, -1: the context), DEPTH (0 of padding), ID (in the draft's
              cache, -1: not read) and NEWEST (of the newest level, 0 or 1)
    width     the most nodes of a level that the draft reads; it reads no token of end_ids
    read      the nodes that the draft has read, or reads next, by level; `at` [B, W] is where the newest of them are
    dtype     of the distributions that nodes are sent with
    num_drawn  [B] the first nodes, in the order of their draws; 0 where nothing is drawn. `q` [B, W, V] per level is what they
              were drawn from
    slots     [B, W * C] where the children of the nodes read last are; M: not kept
    """

    def __init__(self, num_rows: int, num_nodes: int, width: int, end_ids: Sequence[int], device: torch.device):
        self.width, self.end_ids = width, end_ids
        self.survival = torch.zeros(num_rows, num_nodes, dtype=torch.float64, device=device)
        self.facts = torch.zeros(5, num_rows, num_nodes, dtype=torch.long, device=device)
        self.facts[[PARENT, ID]] = -1
        self.read, self.at, self.dtype = DistinctNodes(), self.facts[TOKEN, :, :0], torch.float32
        self.num_drawn, self.slots, self.q = self.facts[TOKEN, :, 0], self.at, list[Tensor]()

    @property
    def nodes(self) -> Nodes:
        """What the policy sees of them."""
        readable = self.facts[NEWEST] > 0
        for end in self.end_ids:
            readable = readable & (self.facts[TOKEN] != end)
        return Nodes(len(self.read.tokens) + 1, self.survival, self.facts[DEPTH], readable, self.num_drawn, self.width)

    def is_read(self, growing: Tensor) -> Tensor:
        """Which of the nodes read last are no padding [B, W], in the rows [B] that grow; at first they are the contexts."""
        return self.read.real[-1] & growing.unsqueeze(1) if self.read.real else growing.unsqueeze(1)

    def add(self, tokens: Tensor, probs: Tensor) -> None:
        """Add the candidates [B, W, C] of the nodes read last, by P(accepted | parent is, none before) [B, W, C]."""
        facts, parents = self.facts.clone(), torch.full_like(tokens[..., 0], -1)
        facts[NEWEST] = 0
        depths = torch.ones_like(parents)
        if self.read.real:
            depths, parents = facts[DEPTH].gather(1, self.at) + 1, self.at
            ids = self.read.first(len(self.read.tokens) - 1) + torch.arange(self.at.shape[1], device=tokens.device)
            facts[ID] = facts[ID].scatter(
                1, self.at, torch.where(self.read.real[-1], ids, facts[ID].gather(1, self.at))
            )
        survival = self._survival(probs).cummin(-1).values
        shared = (values.unsqueeze(-1).expand_as(tokens) for values in (parents, depths))
        children = torch.stack([tokens, *shared, torch.full_like(tokens, -1), torch.ones_like(tokens)])
        survival, facts = torch.cat([self.survival, survival.flatten(1)], 1), torch.cat([facts, children.flatten(2)], 2)
        most, index = self.survival.shape[1], torch.arange(survival.shape[1], device=tokens.device)
        priority = torch.where(index < self.num_drawn.unsqueeze(1), torch.inf, survival)
        order = priority.argsort(dim=1, descending=True, stable=True)  # of equals the parent is first
        rank, best = order.argsort(dim=1), order[:, :most]
        self.slots = rank[:, most:].clamp(max=most)
        self.survival, self.facts = survival.gather(1, best), facts.gather(2, best.expand(5, -1, -1))
        above = self.facts[PARENT]
        self.facts[PARENT] = torch.where((above >= 0) & (self.survival > 0), rank.gather(1, above.clamp(min=0)), -1)
        self.facts[NEWEST] *= self.survival > 0

    def draw(self, q: Tensor, wanted: Tensor, uniforms: Tensor, num_children: int) -> Tensor:
        """Draw the newest nodes among the first `wanted` [B] from q [B, W, V], node n by uniform n; the others are left out.

        Returns the children [B, W, C], of which those in the tree count.
        """
        most = self.survival.shape[1]
        self.num_drawn = torch.minimum(torch.maximum(wanted, self.num_drawn), (self.survival > 0).sum(1))
        kept = torch.arange(most, device=q.device) < self.num_drawn.unsqueeze(1)
        self.survival = torch.where(kept, self.survival, 0.0)
        self.facts[NEWEST] *= kept
        self.slots = torch.where(self.slots < self.num_drawn.unsqueeze(1), self.slots, most)
        own = pad(uniforms[:, :most], (0, 1)).gather(1, self.slots).view(*q.shape[:2], num_children)
        tokens, _ = without_replacement(q, own)
        self.facts[TOKEN] = pad(self.facts[TOKEN], (0, 1)).scatter(1, self.slots, tokens.flatten(1))[:, :-1]
        self.q.append(q)
        return tokens

    def judge(self, probs: Tensor) -> None:
        """Take the newest nodes' survival from what is known after the draw [B, W, C]. A node that was drawn stays one."""
        survival = self._survival(probs).clamp(min=SMALLEST)
        self.survival = pad(self.survival, (0, 1)).scatter(1, self.slots, survival.flatten(1))[:, :-1]

    def _survival(self, probs: Tensor) -> Tensor:
        """P(each child enters the text) [B, W, C], of the nodes read last, by P(accepted | parent is, none before)."""
        none_before = pad((1 - probs).cumprod(-1), (1, -1), value=1.0)
        above = self.survival.gather(1, self.at) if self.read.real else torch.ones_like(probs[..., 0])
        return above.unsqueeze(-1) * none_before * probs

    def read_next(self, wanted: Tensor) -> Tensor:
        """Have the draft read the best `width` of the nodes that are wanted [B, M]; returns which rows [B] have any."""
        wanted = self.nodes.read(wanted)
        counts = wanted.sum(1)
        widest = most_of(counts, min(self.width, wanted.shape[1]))
        self.at = (~wanted).to(torch.uint8).argsort(dim=1, stable=True)[:, :widest]
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
        facts, drawn_from = self.facts[:, :, :sent], None
        if self.q:  # the context's, then those of the nodes by their ids in the draft's cache
            above = facts[ID].gather(1, facts[PARENT].clamp(min=0))
            drawn_from = torch.where(facts[PARENT] >= 0, above + 1, 0)
        return Proposal(
            tokens=facts[TOKEN],
            draft_probs=torch.cat(self.q, 1) if self.q else point_masses(facts[TOKEN], vocab_size, self.dtype),
            drawn_from=drawn_from,
            num_drafted=num_sent,
            num_calls=num_calls,
            parents=facts[PARENT],
            candidates=torch.where(index < num_sent.unsqueeze(1), index, -1),
            cache_ids=facts[ID].unsqueeze(1),
            valid=valid,
        )

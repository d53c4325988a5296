"""A beam draft: beam sampling with the draft model, of which the most probable path goes to the target as a chain.

Paper: Multi-Token Assisted Decoding (arXiv:2407.09722), section 3.2 and Algorithm 1, lines 2-3.
theirs -> ours: beam width B -> num_beams, gamma -> num_tokens.
Deviation: a stopping policy may end the draft early. Every beam carries its own state of the policy; the most probable decides.
Deviation: q(x_1..j) is the product of warped per-token distributions (`probs` of the proposal), like p; not the
distribution of the beam draw.
Deviation: a drafted end of text is a path of its own and is not extended. It competes with longer ones by its joint
probability, as a block that stays at its end.

One forward pass per depth reads all beams of all rows, in one tree cache. Beams are a multiset: equal draws are
different nodes.

Shapes: B rows, W beams, n beams of a level (1 at the context, else W), K tokens of the longest chain, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from toolkit.config.notes import Between
from toolkit.config.values import check_ranges
from toolkit.decoding.proposers.base import DraftContext, Numbers, TextProposer, empty_proposal
from toolkit.decoding.proposers.tree import keep_path
from toolkit.decoding.text_order import TextOrder
from toolkit.engine import Reading
from toolkit.engine.device import Gate
from toolkit.sampling import Sampling, warp
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import DraftStep, Proposal, Verdict
from toolkit.verification.schemes import iid


@dataclass
class _Level:
    """The beams of one depth; level 0 is the context, alone.

    tokens, parents [B, n]  newest token, and the beam it extends (index in the level before)
    scores [B, n]           log-probability of the whole drafted path under the draft, unwarped
    ended [B, n]            the path has reached an end of text
    texts                   which paths are equal, and how they compare
    state                   the policy's, [B * n, ...]
    seen [B, n, V]          tokens of the text, for the repetition penalty; None if it is off
    probs [B, n, V]          warped next-token distributions, once the level was read
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    ended: Tensor
    sequences: TextOrder
    state: State
    seen: Tensor | None
    probs: Tensor | None = None


@dataclass
class BeamChainProposer(TextProposer):
    """The most probable path of `num_beams` sampled beams of at most `num_tokens` tokens.

    Only the chain counts as drafted: beams that are not sent cost the forward passes that read them (`num_calls`, one per
    depth), and no discarded tokens. Not for lossless rules: the chosen path is no draw from q.
    """

    name = "beam_draft"
    num_beams: Annotated[int, Between(1, 4096), "beams of the draft"] = 8
    num_tokens: Annotated[int, Between(1, 4096), "most tokens of a round"] = 4
    scheme = "beams"
    obeys = ("begin", "read", "step", "observe")

    def __post_init__(self) -> None:
        check_ranges(self, "proposer.")

    def max_nodes(self, limit: int) -> int:
        """Nodes of the draft's cache, each with a uniform of its own; the chain that is sent is shorter."""
        return self.num_beams * min(self.num_tokens, limit)

    def propose(self, context: DraftContext, policy: StoppingPolicy, state: State) -> tuple[Proposal, State]:
        """Extend the beams until every row's most probable path has ended, or its policy or limit says so.

        Levels that were extended before that was known are cut off again.
        """
        limits = context.limits.clamp(max=self.num_tokens)
        device = limits.device
        state, starts = policy.begin(limits > 0, state)
        drafting = starts & (limits > 0)
        num_calls, leader = torch.zeros_like(limits), torch.full_like(limits, -1)
        gate, levels, num_read = Gate(device), [_context_level(context, state)], 0
        numbers = Numbers(policy, limits)
        most = min(context.most, self.num_tokens, self.num_tokens if policy.limit is None else policy.limit)
        while len(levels) <= most and gate.passes(drafting):
            depth = len(levels)
            num_calls += drafting
            reading, num_read = self._read(context, levels), (depth - 1) * self.num_beams
            logits, hidden = levels[-1].sequences.shared(context.fit(reading.logits)), reading.hidden.to(device)
            levels[-1].probs = probs = warp(logits, context.sampling, levels[-1].seen)
            step = DraftStep(depth, _flat(logits), _flat(probs), _flat(hidden))
            rows = _flat(drafting.unsqueeze(1) & ~levels[-1].ended)
            numbers.add_step(step, rows)
            if policy.reads:
                before = levels[-1].state
                drafting = drafting & self._of_leader(levels, leader, _read_state(policy, step, levels[-1], drafting))
                numbers.add_state(levels[-1].state, before, rows)
                if not gate.passes(drafting):
                    break
            level, picked = self._draw(context, levels, logits, drafting)
            step = DraftStep(
                depth,
                _flat(logits)[picked],
                _flat(probs)[picked],
                _flat(hidden)[picked],
                level.tokens.flatten(),
            )
            before = {key: value[picked] for key, value in levels[-1].state.items()}
            level.state, go_on = policy.step(step, before)
            numbers.add_state(level.state, before, _flat(drafting.unsqueeze(1).expand_as(level.ended)))
            levels.append(level)
            leader = torch.where(drafting, _leader(levels), leader)
            going = go_on.view_as(level.ended) & ~level.ended
            drafting = drafting & self._of_leader(levels, leader, going) & (limits > depth)
        longest = gate.settle() // (2 if policy.reads else 1)  # questions: one per forward pass, one per draw
        del levels[longest + 1 :]
        num_read = min(num_read, longest * self.num_beams)
        return self._proposal(levels, leader, num_calls, num_read, numbers.valid()), _leader_state(levels, leader)

    def commit(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, accepted: list[int], lengths: list[int]
    ) -> None:
        """Keep the accepted part of the chain in the draft's cache, as far as it was read; forget all other beams."""
        keep_path(context, proposal, verdict, lengths)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _read(self, context: DraftContext, levels: list[_Level]) -> Reading:
        """Let the draft read the context, or the newest beams."""
        session = context.sessions[0]
        if len(levels) == 1:
            tokens, counts = context.unread(0)
            return session.extend(tokens, counts=counts)
        tokens, parents = levels[-1].tokens, levels[-1].parents
        first = (len(levels) - 3) * self.num_beams  # id of the first node of the level before
        ids = torch.full_like(parents, -1) if len(levels) == 2 else parents + first
        device = session.index.device
        return session.extend(tokens.to(device), parents=ids.to(device), last=tokens.shape[1])

    def _draw(
        self, context: DraftContext, levels: list[_Level], logits: Tensor, drafting: Tensor
    ) -> tuple[_Level, Tensor]:
        """The next level (its state is still to come), and each of its beams' parent as an index into [B * n]."""
        last, (num_rows, num_parents, vocab_size) = levels[-1], logits.shape
        joint = last.scores.unsqueeze(2) + _log_probs(logits, context.sampling, last.seen)
        closed = last.ended & drafting.unsqueeze(1)  # rows that are done draw on, unheard, from whatever they have
        pair_probs = last.sequences.warp(joint.masked_fill(closed.unsqueeze(2), -torch.inf), context.sampling)
        first = (len(levels) - 1) * self.num_beams
        drawn, _ = iid(pair_probs, context.uniforms[:, first : first + self.num_beams])
        parents, tokens = drawn // vocab_size, drawn % vocab_size
        ended = torch.zeros_like(tokens, dtype=torch.bool)
        for end in context.end_ids:
            ended |= tokens == end
        rows = torch.arange(num_rows, device=tokens.device).unsqueeze(1)
        seen = None if last.seen is None else last.seen[rows, parents].scatter(2, tokens.unsqueeze(2), True)
        scores, sequences = joint.flatten(1).gather(1, drawn), last.sequences.after(drawn, vocab_size)
        return _Level(tokens, parents, scores, ended, sequences, {}, seen), (rows * num_parents + parents).flatten()

    def _of_leader(self, levels: list[_Level], leader: Tensor, flags: Tensor) -> Tensor:
        """flags [B, n] of the newest level at each row's leader [B]; False where the leader ended in an older one."""
        if len(levels) == 1:
            return flags.squeeze(1)
        index = leader - (len(levels) - 2) * self.num_beams
        return flags.gather(1, index.clamp(min=0).unsqueeze(1)).squeeze(1) & (index >= 0)

    def _proposal(
        self, levels: list[_Level], leader: Tensor, num_calls: Tensor, num_read: int, valid: Tensor
    ) -> Proposal:
        """The path down to each row's leader [B], as a chain; -1: nothing was drafted."""
        num_rows, device = len(leader), leader.device
        if len(levels) == 1:
            return empty_proposal(num_calls, valid)
        length = torch.where(leader >= 0, leader // self.num_beams + 1, 0)
        rows = torch.arange(num_rows, device=device)
        index = leader.clamp(min=0) % self.num_beams
        tokens, probs, ids = [], [], []
        for depth in reversed(range(1, len(levels))):
            level, before = levels[depth], levels[depth - 1].probs
            assert before is not None
            parent = level.parents[rows, index]
            tokens.append(level.tokens[rows, index])
            probs.append(before[rows, parent])
            ids.append(index + (depth - 1) * self.num_beams)
            index = torch.where(length >= depth, parent, index)  # shorter chains wait for their own depth
        cache_ids = torch.stack(ids[::-1], 1)
        return Proposal(
            tokens=torch.stack(tokens[::-1], 1),
            draft_probs=torch.stack(probs[::-1], 1),
            num_drafted=length,
            num_calls=num_calls,
            cache_ids=torch.where(cache_ids < num_read, cache_ids, -1).unsqueeze(1),  # -1: the draft has not read it
            valid=valid,
        )


def _context_level(context: DraftContext, state: State) -> _Level:
    """The one beam that every row starts from."""
    none = torch.zeros_like(context.limits).unsqueeze(1)
    seen = None if context.seen is None else context.seen.unsqueeze(1)
    return _Level(none, none, none.float(), none.bool(), TextOrder.of(none), state, seen)


def _log_probs(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """Next-token log-probabilities [B, n, V], with the repetition penalty but otherwise unwarped."""
    plain = Sampling(repetition_penalty=sampling.repetition_penalty)
    return warp(logits, plain, seen).log()


def _leader(levels: list[_Level]) -> Tensor:
    """Node id [B] of the most probable path: among the newest beams and those that ended before."""
    older = [level.scores.masked_fill(~level.ended, -torch.inf) for level in levels[1:-1]]
    return torch.cat([*older, levels[-1].scores], 1).argmax(1)


def _read_state(policy: StoppingPolicy, step: DraftStep, level: _Level, drafting: Tensor) -> Tensor:
    """Let the policy read at every beam of the level: its flags [B, n]. The level's state moves where rows draft."""
    new, go_on = policy.read(step, level.state)
    moving = drafting.unsqueeze(1).expand_as(level.ended).flatten()
    level.state = {
        key: torch.where(moving.view(-1, *[1] * (value.dim() - 1)), value, level.state[key])
        for key, value in new.items()
    }
    return go_on.view_as(level.ended)


def _leader_state(levels: list[_Level], leader: Tensor) -> State:
    """The policy's state at each row's leader [B] (-1: the context): what it learns from when the verdict comes."""
    num_rows = len(leader)
    rows = torch.arange(num_rows, device=leader.device)
    keys = levels[0].state
    return {
        key: torch.cat([level.state[key].view(num_rows, -1, *keys[key].shape[1:]) for level in levels], 1)[
            rows, leader + 1
        ]
        for key in keys
    }


def _flat(values: Tensor) -> Tensor:
    """Values [B, n, ...] as [B * n, ...]: beams are rows to a policy."""
    return values.flatten(0, 1)

"""One text per row: chains and trees of drafted tokens after it, of which one path is accepted.

Shapes: B batch slots, N proposed nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from toolkit.decoding.batch import Batch, Clock, Job, Row, right_aligned
from toolkit.decoding.context_window import HistoryWindow
from toolkit.decoding.method import Method
from toolkit.decoding.proposers.base import DraftContext, TextProposer
from toolkit.decoding.proposers.copying import point_masses
from toolkit.engine import Session
from toolkit.engine.device import tensor_on
from toolkit.engine.engine import Sessions
from toolkit.grammar import TextGrammar
from toolkit.grammar.walk import FORCED, along, stacked
from toolkit.sampling import Sampling, warp
from toolkit.stopping.base import State, in_context
from toolkit.types import Drafted, Proposal, Round, RoundCounts, Verdict, Verified
from toolkit.verification import TextRule
from toolkit.verification.base import first_ones, split_uniforms


class TextBatch(Batch[DraftContext, Proposal, Verdict]):
    """Rows whose context is one text."""

    def __init__(self, job: Job, sessions: Sessions, rows: list[Row]):
        super().__init__(job, sessions, rows)
        proposer, rule = job.method.proposer, job.method.rule
        assert isinstance(proposer, TextProposer) and isinstance(rule, TextRule)  # checked by Method
        self.proposer, self.rule = proposer, rule
        count = job.method.policy.num_history
        self.earlier = HistoryWindow(len(rows), count) if count and self.drafts else None

    @staticmethod
    def capacity(method: Method, sampling: Sampling, longest: int) -> int:
        return sampling.longest_text(longest) + method.max_nodes + 1

    def join(self, slot: int) -> None:
        if self.earlier is not None:
            self.earlier.reset(slot)

    def select(self, slots: list[int]) -> None:
        if self.earlier is not None:
            self.earlier.select(slots)

    def unread(self, session: Session, slot: int) -> list[int]:
        context, end = self.rows[slot].context, -1
        if self.earlier is not None and session is not self.target:  # from the prompt's last token on states are kept
            end = min(len(context), len(self.rows[slot].generation.prompt_ids)) - 1
        return context[session.lengths[slot] : end]

    # -- a round --------------------------------------------------------------------------------------------------

    def context(self, uniforms: Tensor) -> DraftContext:
        room = [0] * len(self.rows)  # slots without a text draft nothing, nor do texts past a draft's context
        for slot, row in enumerate(self.rows):
            if self.busy[slot]:
                left = self.sampling.room(len(row.generation.prompt_ids)) - row.num_produced - 1
                room[slot] = max(0, min(left, self.most, self.draft_room(len(row.context))))
        if self.earlier is not None:
            held = self.drafts[0].lengths
            self.earlier.pending = [
                max(0, min(len(row.context) - held[slot] - 1, row.num_produced)) if self.busy[slot] else 0
                for slot, row in enumerate(self.rows)
            ]
        grammars = [row.grammar if busy else None for row, busy in zip(self.rows, self.busy, strict=True)]
        return DraftContext(
            sequences=[row.context for row in self.rows],
            sessions=self.drafts,
            unread=cache(lambda draft: self._unread(self.drafts[draft])),
            limits=tensor_on(self.device, room),
            room=room,
            uniforms=uniforms[:, : self.most],
            sampling=self.draft_sampling,
            vocab_size=self.pair.vocab_size,
            fit=self.pair.fit,
            seen=self._seen() if self.sampling.repetition_penalty != 1.0 else None,
            end_ids=self.end_ids,
            grammars=grammars if any(grammar is not None for grammar in grammars) else None,
            earlier=self.earlier,
        )

    def propose(self, context: DraftContext) -> tuple[Proposal, State]:
        policy, lengths = self.method.policy, [len(row.context) for row in self.rows]
        state = self.state
        if policy.reads_context:
            state = in_context(policy, state, tensor_on(self.device, lengths))
        proposal, state = self.proposer.propose(context, policy, state)
        if context.grammars is not None and proposal.parents is None:
            proposal = self._with_forced(context.grammars, proposal)
        return proposal, state

    def score(self, context: DraftContext, proposal: Proposal) -> Tensor:
        """p after the context and after every node: [B, N + 1, V], from one forward pass."""
        unread, counts = self._unread(self.target)
        real = first_ones(proposal.tokens, proposal.num_drafted)
        nodes = torch.where(
            real.to(unread.device), proposal.tokens.to(unread.device), unread[:, -1:]
        )  # read in any case
        tokens = torch.cat([unread, nodes], 1)
        if proposal.parents is None:
            counts = [count + proposal.num_nodes for count in counts]
        reading = self.target.extend(tokens, counts=counts, parents=proposal.parents, last=proposal.num_nodes + 1)
        allowed = (
            None if context.grammars is None else _allowed_at_nodes(context.grammars, proposal, self.pair.vocab_size)
        )
        return warp(reading.logits, self.sampling, _seen_at_nodes(context, proposal), allowed=allowed)

    def verify(self, context: DraftContext, proposal: Proposal, scores: Tensor, uniforms: Tensor) -> Verdict:
        if proposal.num_nodes > self.most:
            uniforms = _with_certain(uniforms, proposal.num_nodes - self.most)
        verdict = self.rule.verify(proposal, scores, uniforms)
        return verdict if proposal.valid is None else replace(verdict, valid=verdict.valid & proposal.valid)

    def observed(self, proposal: Proposal, verdict: Verdict) -> tuple[Drafted, Verified]:
        """The round without certain tokens: they say nothing of acceptance."""
        if proposal.certain is None:
            return proposal, verdict
        nodes = torch.arange(proposal.num_nodes, device=verdict.length.device)
        sent, kept = (nodes < count.unsqueeze(1) for count in (proposal.num_drafted, verdict.length))
        counts = [(part & proposal.certain).sum(1) for part in (sent, kept)]
        own = [count - less for count, less in zip((proposal.num_drafted, verdict.length), counts, strict=True)]
        round_ = RoundCounts(own[0], proposal.num_calls, own[1], *counts)
        return round_, round_

    def commit(self, context: DraftContext, proposal: Proposal, verdict: Verdict, clock: Clock) -> None:
        """Take the accepted tokens into the texts, cut caches back, end rows that are done."""
        tokens, path, extra = proposal.tokens.tolist(), verdict.path.tolist(), verdict.extra.tolist()
        columns = (verdict.length, proposal.num_drafted, proposal.num_calls, verdict.bonus.long(), verdict.valid.long())
        facts = torch.cat([torch.stack(columns, 1), self.spoilt()], 1).tolist()
        seconds = clock.seconds()
        accepted, lengths = [], [len(row.context) for row in self.rows]
        for slot, row in enumerate(self.rows):
            length, num_drafted, num_calls, bonus, valid, *_ = facts[slot]
            accepted.append(length)
            if not self.busy[slot]:
                continue
            if not valid:
                self.fail(slot)
                continue
            new = [tokens[slot][node] for node in path[slot][:length]] + [extra[slot]]
            produced, reason = self._cut(row, new)
            row.generation.token_ids += produced
            row.context += produced
            if row.grammar is not None and not reason:
                row.grammar = along(row.grammar, produced)[-1]
                if row.grammar is None or not row.grammar.allowed.any():
                    self.fail(slot, "the grammar is stuck: no token of the vocabulary goes on from here")
                    continue
            row.generation.rounds.append(Round(num_drafted, num_calls, length, len(produced), bool(bonus), *seconds))
            if reason:
                self.end(slot, reason)
        self._forget(context, proposal, verdict, accepted, lengths)
        self.clear([row[len(columns) :] for row in facts])

    # -- inside ---------------------------------------------------------------------------------------------------

    def _unread(self, session: Session) -> tuple[Tensor, list[int]]:
        pending = [row.context[session.lengths[slot] :] for slot, row in enumerate(self.rows)]
        return right_aligned(pending, session.index.device)

    def _with_forced(self, grammars: Sequence[TextGrammar | None], proposal: Proposal) -> Proposal:
        """A chain, and after it the tokens that follow with certainty, row by row; an end of text is the last one."""
        counts, rows = proposal.num_drafted.tolist(), proposal.tokens.tolist()
        runs = []
        for slot, (row, grammar) in enumerate(zip(self.rows, grammars, strict=True)):
            last = along(grammar, rows[slot][: counts[slot]])[-1]
            room = self.sampling.room(len(row.generation.prompt_ids)) - row.num_produced - 1 - counts[slot]
            runs.append([] if last is None else last.run(min(room, FORCED)))
        if not any(runs):
            return proposal
        chains = [row[:count] + run for row, count, run in zip(rows, counts, runs, strict=True)]
        width = max(map(len, chains))
        tokens = tensor_on(self.device, [chain + [0] * (width - len(chain)) for chain in chains])
        q = point_masses(tokens, self.pair.vocab_size, proposal.draft_probs.dtype)
        certain = torch.ones_like(tokens, dtype=torch.bool)
        for slot, count in enumerate(counts):
            q[slot, :count] = proposal.draft_probs[slot, :count]
            certain[slot, :count] = False if proposal.certain is None else proposal.certain[slot, :count]
        lengths = tensor_on(self.device, [*map(len, chains)])
        return replace(proposal, tokens=tokens, draft_probs=q, num_drafted=lengths, certain=certain)

    def _seen(self) -> Tensor:
        """Tokens of each context [B, V] bool, for the repetition penalty."""
        seen = torch.zeros(len(self.rows), self.pair.vocab_size, dtype=torch.bool, device=self.device)
        for slot, row in enumerate(self.rows):
            seen[slot, row.context] = True
        return seen

    def _cut(self, row: Row, new: list[int]) -> tuple[list[int], str]:
        """The produced part of a round's tokens, and why the row ends there, if it does."""
        room = self.sampling.room(len(row.generation.prompt_ids)) - row.num_produced
        produced, reason = new[:room], "length" if len(new) >= room else ""
        ends = [i for i, token in enumerate(produced) if token in self.end_ids]
        if ends:
            produced, reason = produced[: ends[0] + 1], "end"
        if self.has_stops:
            before = row.generation.token_ids
            if self.stop_position(row.generation, before + produced) is not None:
                starts = (self.stop_position(row.generation, before + produced[: i + 1]) for i in range(len(produced)))
                first = next(i for i, start in enumerate(starts) if start is not None)
                produced, reason = produced[: first + 1], "stop"
        return produced, reason

    def _forget(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, accepted: list[int], lengths: list[int]
    ) -> None:
        """Leave in the caches what the texts hold, less their newest token."""
        if proposal.parents is None:
            self.target.truncate([length + count for length, count in zip(lengths, accepted, strict=True)])
        else:
            last = verdict.path.gather(1, (verdict.length - 1).clamp(min=0).unsqueeze(1))
            self.target.keep(torch.where(verdict.length.unsqueeze(1) > 0, last, -1))
        if self.drafts:
            self.proposer.commit(context, proposal, verdict, accepted, lengths)
        for slot, row in enumerate(self.rows):
            if not self.busy[slot]:  # the slot decodes one token on, which is thrown away
                row.context = row.context[:1]
                for session in self.sessions:
                    session.reset(slot)
                self.join(slot)


def _allowed_at_nodes(grammars: Sequence[TextGrammar | None], proposal: Proposal, vocab_size: int) -> Tensor:
    """Which tokens may come after the context and after every node [B, N + 1, V] bool; all of them after padding."""
    tokens, counts = proposal.tokens.tolist(), proposal.num_drafted.tolist()
    chain = [list(range(-1, proposal.num_nodes - 1))] * len(tokens)
    parents = chain if proposal.parents is None else proposal.parents.tolist()
    masks = []
    for slot, grammar in enumerate(grammars):
        states = [grammar]
        for node in range(counts[slot]):
            above = states[parents[slot][node] + 1]
            states.append(None if above is None else above.after(tokens[slot][node]))
        masks.append(stacked(states + [None] * (proposal.num_nodes - counts[slot]), vocab_size))
    return torch.stack(masks).to(proposal.tokens.device)


def _with_certain(uniforms: Tensor, count: int) -> Tensor:
    """Uniforms of a round with `count` more nodes, all of them certain; a row's own stay what they are without these.

    A certain token is accepted whatever its uniform is. The token after the last of more than M is drawn with the uniform of
    that after M, which such a row does not use.
    """
    draws, tests, extras = split_uniforms(uniforms)
    certain = draws.new_zeros(len(draws), count)
    return torch.cat([draws, certain, tests, certain, extras, extras[:, -1:].expand(-1, count)], 1)


def _seen_at_nodes(context: DraftContext, proposal: Proposal) -> Tensor | None:
    """Tokens of the text up to each node [B, N + 1, V] bool."""
    if context.seen is None:
        return None
    seen = [context.seen]
    batch = torch.arange(len(context.seen), device=context.seen.device)
    for node in range(proposal.num_nodes):
        before = seen[-1]
        if proposal.parents is not None:
            before = torch.stack(seen, 1)[batch, proposal.parents[:, node] + 1]
        seen.append(before.scatter(1, proposal.tokens[:, node : node + 1], True))
    return torch.stack(seen, 1)

"""A chain: one token after another from the draft model.

Shapes: B batch slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from toolkit.decoding.proposers.base import DraftContext, Numbers, TextProposer, empty_proposal, where_active
from toolkit.decoding.proposers.copying import point_masses
from toolkit.engine import Reading
from toolkit.engine.device import Gate
from toolkit.grammar import masked
from toolkit.sampling import draw, first_maximum, warp
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import DraftStep, History, Proposal, Verdict


class ChainProposer(TextProposer):
    """One token after another from the first draft model."""

    name = "chain"
    obeys = ("begin", "read", "step", "sent", "observe")
    shows_live_rows: ClassVar[bool] = True
    reads_grammars: ClassVar[bool] = True
    keeps_history: ClassVar[bool] = True

    def max_nodes(self, limit: int) -> int:
        return limit

    def propose(self, context: DraftContext, policy: StoppingPolicy, state: State) -> tuple[Proposal, State]:
        """Draft until every row has stopped. Rows that have stopped draft on, and what they draft is thrown away.

        A token that a grammar leaves alone is drafted without asking the policy; without a forward pass if that is so in all
        rows that draft.
        """
        limits = context.limits
        num_rows, device = len(limits), limits.device
        state, starts = policy.begin(limits > 0, state)
        drafting = starts & (limits > 0)
        num_drafted, num_calls = torch.zeros_like(limits), torch.zeros_like(limits)
        gate = Gate(device)
        walk = context.walk()
        alone = num_rows == 1 and gate.ahead == 0 and walk is None  # a single row is never past its own stop
        skips = walk is not None and not self.reads_blocks and not any(draft.reads_states for draft in context.sessions)
        seen, numbers = context.seen, Numbers(policy, limits)
        tokens: list[Tensor] = []
        draft_probs: list[Tensor] = []
        certain: list[Tensor] = []
        num_read = -1  # of the tokens drafted, by the draft; -1: not even the context
        # Whether to draft at all is worth waiting for: nothing is launched for a round without drafts.
        while len(tokens) < context.most and gate.passes(drafting, now=policy.couples_rows and not tokens):
            depth = len(tokens) + 1
            forced = None if walk is None else walk.forced()
            asked = drafting if forced is None else drafting & (forced < 0)  # rows whose token is not certain
            if walk is not None and forced is not None and skips and not bool(asked.any()):
                tokens.append(forced.clamp(min=0))
                draft_probs.append(point_masses(tokens[-1], context.vocab_size))
                certain.append(drafting)
                num_drafted += drafting
                drafting = drafting & (limits > depth) & ~_ends(tokens[-1], context.end_ids)
                walk.take(tokens[-1])
                seen = seen if seen is None else seen.scatter(1, tokens[-1].unsqueeze(1), True)
                continue
            reading = self._read(context, tokens, num_read)
            num_read = len(tokens)
            if depth == 1 or not self.reads_blocks:
                num_calls += asked if skips else drafting
            logits, allowed = context.fit(reading.logits[:, -1]), None
            if walk is not None:
                allowed = walk.allowed()
                logits = masked(logits, allowed)
            probs = warp(logits, context.sampling, seen, allowed=allowed)
            before = self._before(context, reading, depth)
            step = DraftStep(depth, logits, probs, reading.hidden[:, -1].to(device), live=drafting, before=before)
            numbers.add_step(step, drafting)
            if policy.reads:
                new_state, go_on = policy.read(step, state)
                numbers.add_state(new_state, state, asked)
                state = new_state if alone else where_active(new_state, state, asked)
                drafting, asked = drafting & (go_on | ~asked), asked & go_on
                if not gate.passes(drafting):
                    self._note(context, step)
                    break
            step.tokens = drawn = self.draw(context, depth, probs)
            tokens.append(drawn)
            draft_probs.append(probs)
            certain.append(drafting & ~asked)
            num_drafted += drafting
            new_state, go_on = policy.step(step, state)
            numbers.add_state(new_state, state, asked)
            state = new_state if alone else where_active(new_state, state, asked)
            self._note(context, step)
            drafting = drafting & (go_on | ~asked) & (limits > depth) & ~_ends(drawn, context.end_ids)
            if walk is not None:
                walk.take(drawn)
            if seen is not None:
                seen = seen.scatter(1, drawn.unsqueeze(1), True)
        num_drafted = policy.sent(num_drafted, state)
        longest = gate.largest(num_drafted) if tokens else 0
        if not longest:
            return empty_proposal(num_calls, numbers.valid()), state
        drawn_tokens, probs = (
            torch.stack(tokens[:longest], 1),
            torch.cat([q.unsqueeze(1) for q in draft_probs[:longest]], 1),
        )
        certain_at = None if walk is None else torch.stack(certain[:longest], 1)
        return Proposal(drawn_tokens, probs, num_drafted, num_calls, certain=certain_at, valid=numbers.valid()), state

    def _read(self, context: DraftContext, tokens: list[Tensor], num_read: int) -> Reading:
        """Let the draft read what it has not read: of the context, if num_read is -1, and of the drafted tokens."""
        session = context.sessions[0]
        new = torch.stack(tokens[max(num_read, 0) :], 1).to(session.index.device) if tokens else None
        if new is not None and num_read >= 0:
            return session.extend(new)
        unread, counts = context.unread(0)
        if new is not None:
            return session.extend(torch.cat([unread, new], 1), counts=[count + new.shape[1] for count in counts])
        more = 0 if context.earlier is None else context.earlier.most_pending
        return session.extend(unread, counts=counts, last=1 + more)

    @staticmethod
    def _before(context: DraftContext, reading: Reading, depth: int) -> History | None:
        """The positions before the one that a forward pass has just scored, if the policy looks at them."""
        earlier = context.earlier
        if earlier is None:
            return None
        if depth == 1:
            more, device = earlier.most_pending, context.limits.device
            tokens = context.unread(0)[0].to(device)
            logits, hidden = (
                context.fit(reading.logits[:, -1 - more : -1]),
                reading.hidden[:, -1 - more : -1].to(device),
            )
            earlier.begin(logits, hidden, tokens[:, tokens.shape[1] - more :])
        return earlier.now

    @staticmethod
    def _note(context: DraftContext, step: DraftStep) -> None:
        if context.earlier is not None:
            context.earlier.note(step)

    def draw(self, context: DraftContext, depth: int, probs: Tensor) -> Tensor:
        """The token of every row [B] at a depth (from 1), from its distribution [B, V]."""
        if context.sampling.temperature == 0:
            return first_maximum(probs)  # as `draw` would, in less time
        return draw(probs, context.uniforms[:, depth - 1])

    def commit(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, accepted: list[int], lengths: list[int]
    ) -> None:
        session = context.sessions[0]
        session.truncate([length + count for length, count in zip(lengths, accepted, strict=True)])
        if context.earlier is not None:
            context.earlier.commit(verdict.length, verdict.extra)


def _ends(tokens: Tensor, end_ids: Sequence[int]) -> Tensor:
    """Which of these tokens [B] end a text."""
    ended = torch.zeros_like(tokens, dtype=torch.bool)
    for end in end_ids:
        ended = ended | (tokens == end)
    return ended

"""A chain: one token after another from the draft model.

Shapes: B batch slots, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from toolkit.decoding.proposers.base import DraftContext, Numbers, TextProposer, empty_proposal, where_active
from toolkit.engine import Reading
from toolkit.engine.device import Gate
from toolkit.sampling import draw, first_maximum, warp
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import DraftStep, History, Proposal, Verdict


class ChainProposer(TextProposer):
    """One token after another from the first draft model."""

    name = "chain"
    obeys = ("begin", "read", "step", "sent", "observe")
    shows_live_rows: ClassVar[bool] = True
    keeps_history: ClassVar[bool] = True

    def max_nodes(self, limit: int) -> int:
        return limit

    def propose(self, context: DraftContext, policy: StoppingPolicy, state: State) -> tuple[Proposal, State]:
        """Draft until every row has stopped. Rows that have stopped draft on, and what they draft is thrown away."""
        limits = context.limits
        num_rows, device = len(limits), limits.device
        state, starts = policy.begin(limits > 0, state)
        drafting = starts & (limits > 0)
        num_drafted, num_calls = torch.zeros_like(limits), torch.zeros_like(limits)
        gate = Gate(device)
        alone = num_rows == 1 and gate.ahead == 0  # a single row is never past its own stop
        seen, numbers = context.seen, Numbers(policy, limits)
        tokens: list[Tensor] = []
        draft_probs: list[Tensor] = []
        # Whether to draft at all is worth waiting for: nothing is launched for a round without drafts.
        while len(tokens) < context.most and gate.passes(drafting, now=policy.couples_rows and not tokens):
            depth = len(tokens) + 1
            reading = self._read(context, tokens)
            if depth == 1 or not self.reads_blocks:
                num_calls += drafting
            logits = context.fit(reading.logits[:, -1])
            probs = warp(logits, context.sampling, seen)
            before = self._before(context, reading, depth)
            step = DraftStep(depth, logits, probs, reading.hidden[:, -1].to(device), live=drafting, before=before)
            numbers.add_step(step, drafting)
            if policy.reads:
                new_state, go_on = policy.read(step, state)
                numbers.add_state(new_state, state, drafting)
                state, drafting = new_state if alone else where_active(new_state, state, drafting), drafting & go_on
                if not gate.passes(drafting):
                    self._note(context, step)
                    break
            step.tokens = drawn = self.draw(context, depth, probs)
            tokens.append(drawn)
            draft_probs.append(probs)
            num_drafted += drafting
            new_state, go_on = policy.step(step, state)
            numbers.add_state(new_state, state, drafting)
            state = new_state if alone else where_active(new_state, state, drafting)
            self._note(context, step)
            drafting = drafting & go_on & (limits > depth)
            for end in context.end_ids:
                drafting = drafting & (drawn != end)
            if seen is not None:
                seen = seen.scatter(1, drawn.unsqueeze(1), True)
        num_drafted = policy.sent(num_drafted, state)
        longest = gate.largest(num_drafted) if tokens else 0
        if not longest:
            return empty_proposal(num_calls, numbers.valid()), state
        drawn_tokens, probs = torch.stack(tokens[:longest], 1), torch.stack(draft_probs[:longest], 1)
        return Proposal(drawn_tokens, probs, num_drafted, num_calls, valid=numbers.valid()), state

    def _read(self, context: DraftContext, tokens: list[Tensor]) -> Reading:
        """Let the draft read what it has not read of the context, or the newest token."""
        session = context.sessions[0]
        if tokens:
            return session.extend(tokens[-1].unsqueeze(1).to(session.index.device))
        unread, counts = context.unread(0)
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

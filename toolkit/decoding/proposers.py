"""Proposers: how drafts are drawn. A chain here; trees and forests are siblings of it.

Shapes: B rows, U unread tokens, K drafted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from toolkit.sampling import Sampling, draw, warp
from toolkit.session import Reading, Session
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.transfer import Gate
from toolkit.types import DraftStep, Proposal, Verdict


@dataclass
class DraftContext:
    """What a proposer may use in one round.

    sessions     one per draft model
    unread       per draft: tokens [B, U] of the context that its cache lacks, right-aligned, and how many per row
    limits [B]   the most tokens each row may draft (its length limit, less one for the extra token)
    most         the largest of them
    uniforms     [B, M] one per node
    fit          a draft's logits on the target's device and vocabulary
    seen         tokens of the context [B, V] bool, for the repetition penalty; None if it is off
    end_ids      tokens that end a text: nothing is drafted behind them
    """

    sessions: list[Session]
    unread: list[tuple[Tensor, list[int]]]
    limits: Tensor
    most: int
    uniforms: Tensor
    sampling: Sampling
    fit: Callable[[Tensor], Tensor]
    seen: Tensor | None
    end_ids: tuple[int, ...]


class ChainProposer:
    """One token after another from the first draft model."""

    drawing: ClassVar[str] = "iid"
    teaches: ClassVar[bool] = True  # policies that learn can learn from its rounds
    takes_turns: ClassVar[bool] = False  # several drafts; else the first one drafts alone

    def max_nodes(self, limit: int) -> int:
        """The most nodes of a round whose policy asks for at most `limit` tokens."""
        return limit

    def propose(self, context: DraftContext, policy: StoppingPolicy, state: State) -> tuple[Proposal, State]:
        """Draft until every row has stopped. Rows that have stopped go on unheard: nothing waits for them."""
        limits = context.limits
        num_rows, device = len(limits), limits.device
        drafting = policy.begin(num_rows, state, device) & (limits > 0)
        num_drafted, num_calls = torch.zeros_like(limits), torch.zeros_like(limits)
        gate = Gate(device)
        alone = num_rows == 1 and gate.ahead == 0  # a single row is never past its own stop
        seen = context.seen
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        while len(tokens) < context.most and gate.passes(drafting):
            depth = len(tokens) + 1
            reading = self._read(context, tokens)
            num_calls += drafting
            logits = context.fit(reading.logits[:, -1])
            probs = warp(logits, context.sampling, seen)
            step = DraftStep(depth, logits, probs, reading.hidden[:, -1].to(device))
            if policy.reads:
                new_state, go_on = policy.read(step, state)
                state, drafting = new_state if alone else frozen(new_state, state, drafting), drafting & go_on
                if not gate.passes(drafting):
                    break
            step.tokens = drawn = self.draw(context, depth, probs)
            tokens.append(drawn)
            laws.append(probs)
            num_drafted += drafting
            new_state, go_on = policy.step(step, state)
            state = new_state if alone else frozen(new_state, state, drafting)
            drafting = drafting & go_on & (limits > depth)
            for end in context.end_ids:
                drafting = drafting & (drawn != end)
            if seen is not None:
                seen = seen.scatter(1, drawn.unsqueeze(1), True)
        longest = gate.settle() // (2 if policy.reads else 1)  # a question before each forward, one before each draw
        if not longest:
            empty = torch.zeros(num_rows, 0, dtype=torch.long, device=device)
            return Proposal(empty, torch.zeros(num_rows, 0, 1, device=device), num_drafted, num_calls), state
        return Proposal(torch.stack(tokens[:longest], 1), torch.stack(laws[:longest], 1), num_drafted, num_calls), state

    def _read(self, context: DraftContext, tokens: list[Tensor]) -> Reading:
        """The draft reads what it has not read of the context, or the newest token."""
        session = context.sessions[0]
        if tokens:
            return session.extend(tokens[-1].unsqueeze(1).to(session.index.device))
        unread, counts = context.unread[0]
        return session.extend(unread, counts=counts)

    def draw(self, context: DraftContext, depth: int, probs: Tensor) -> Tensor:
        """The token of every row [B] at a depth (from 1), from its laws [B, V]."""
        return draw(probs, context.uniforms[:, depth - 1])

    def commit(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, accepted: list[int], lengths: list[int]
    ) -> None:
        """Forget what was not accepted. `lengths`: tokens of each row's context before the round."""
        session = context.sessions[0]
        session.truncate([length + count for length, count in zip(lengths, accepted, strict=True)])


def frozen(new: State, old: State, moving: Tensor) -> State:
    """The new state where a row is still drafting [B], the old one elsewhere."""
    return {key: torch.where(moving.view(-1, *[1] * (value.dim() - 1)), value, old[key]) for key, value in new.items()}

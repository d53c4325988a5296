"""A block: one draft forward pass gives the distributions of several positions; they are drawn one by one.

Position by position it is a chain. The policy is asked before a token is drawn (`read`, which knows q_k) and after it (`step`,
which may decide about the next position), and a drawn token is sent. So every policy of chains works, and is exact: whether
position k is sent depends on q_k, states and the tokens before it, never on its own token. What drew first and trimmed
afterwards would replace dropped tokens by draws from p, and the text would no longer follow p
(`toolkit.testing.check_anticipation`).

A policy that ranks the positions of all rows (`StoppingPolicy.sent`) sees whole blocks. It may send fewer tokens than were
drawn, where the choice is the one that would have been made position by position.

Of some drafts q_k is the same whatever is drawn before it, of others it depends on the token before.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from toolkit.decoding.proposers.base import DraftContext
from toolkit.decoding.proposers.chain import ChainProposer
from toolkit.engine import BlockSession, Reading
from toolkit.types import Proposal, Verdict


class BlockProposer(ChainProposer):
    """One block of the first draft model per round. A round pays one draft forward pass, however much of it is sent."""

    name = "block"
    keeps_history: ClassVar[bool] = False
    reads_blocks: ClassVar[bool] = True

    def _read(self, context: DraftContext, tokens: list[Tensor], num_read: int) -> Reading:
        session = context.sessions[0]
        assert isinstance(session, BlockSession), "Method.bind pairs blocks with drafts that give them"
        if not tokens:
            session.draft(*context.unread(0))
        return session.position(len(tokens) + 1, tokens[-1] if tokens else None)

    def commit(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, accepted: list[int], lengths: list[int]
    ) -> None:
        """Do nothing: the draft's cache holds the text alone."""

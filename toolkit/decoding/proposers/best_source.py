"""Best source: every row of a round copies tokens, drafts with the draft model, or does neither, as the policy chooses.

What may be copied is looked up first, because it costs no forward pass. Then the policy is asked whether the row drafts with
the draft model instead (`begin`). While any row does, the draft reads all rows: their text as far as it has not read it
(rounds may have passed without it), then the drafted tokens. What it read after the text of a row that copied is forgotten.

Shapes: B batch slots, K tokens of the longest draft, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.decoding.proposers.base import DraftContext, Numbers
from toolkit.decoding.proposers.chain import ChainProposer
from toolkit.decoding.proposers.copying import CopyProposer, point_masses
from toolkit.decoding.proposers.suffix import SuffixProposer
from toolkit.engine.device import most_of
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import Proposal, Verdict


@dataclass
class BestSourceProposer(ChainProposer):
    """A chain from one source per row.

    copies  where copied tokens come from
    """

    obeys = ("begin", "read", "step", "plan", "observe")  # not `sent`: the two sources are counted apart
    shows_matches: ClassVar[bool] = True
    keeps_history: ClassVar[bool] = False
    copies: CopyProposer = field(default_factory=SuffixProposer)

    def check(self, vocab_size: int) -> None:
        self.copies.check(vocab_size)

    def propose(self, context: DraftContext, policy: StoppingPolicy, state: State) -> tuple[Proposal, State]:
        numbers, rows, before = Numbers(policy, context.limits), context.limits > 0, state
        copied, num_copied, state = self.copies.copied(
            context.sequences, context.room, context.end_ids, policy, state, rows, context.grammars
        )
        numbers.add_state(state, before, rows)
        drafted, state = super().propose(context, policy, state)
        assert drafted.valid is not None
        drafted = replace(drafted, valid=drafted.valid & numbers.valid())
        return _joined(drafted, copied, num_copied, context.vocab_size), state

    def commit(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, accepted: list[int], lengths: list[int]
    ) -> None:
        """Keep in the draft's cache what it has drafted itself and was accepted; copied tokens are unread."""
        drafted = (proposal.num_calls > 0).tolist()
        own = [count if by_draft else 0 for count, by_draft in zip(accepted, drafted, strict=True)]
        super().commit(context, proposal, verdict, own, lengths)


def _joined(drafted: Proposal, copied: Tensor, num_copied: Tensor, vocab_size: int) -> Proposal:
    """The draft's chain where it was asked, else the copied tokens [B, K], of which num_copied [B] count."""
    by_draft = drafted.num_calls > 0
    if copied.shape[1] == 0:
        return drafted
    num_drafted, num_drawn = torch.where(by_draft, drafted.num_drafted, num_copied), drafted.num_nodes
    width = max(copied.shape[1], num_drawn)
    tokens = pad(copied, (0, width - copied.shape[1]))
    tokens = torch.where(by_draft.unsqueeze(1), pad(drafted.tokens, (0, width - num_drawn)), tokens)
    q = point_masses(tokens, vocab_size, drafted.draft_probs.dtype)
    if num_drawn:
        q[:, :num_drawn] = torch.where(by_draft.view(-1, 1, 1), drafted.draft_probs, q[:, :num_drawn])
    sent, certain = most_of(num_drafted, width, least=0), drafted.certain
    if certain is not None:
        certain = (pad(certain, (0, width - num_drawn)) & by_draft.unsqueeze(1))[:, :sent]
    return Proposal(tokens[:, :sent], q[:, :sent], num_drafted, drafted.num_calls, certain=certain, valid=drafted.valid)

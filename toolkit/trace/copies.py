"""Replay of copied tokens from texts alone: no recording is needed.

Their q is a point mass, so a copied token y at position i is accepted with probability p(y). If it is rejected, the token drawn
instead is another one, because the residual has no mass left at y. So, given the emitted token X_i, y was accepted iff y = X_i.

Shapes: T texts, P positions of all of them, B rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from toolkit.decoding.proposers.copying import NOTHING, Copy, CopyProposer
from toolkit.grammar import TextGrammar
from toolkit.grammar.walk import FORCED, along
from toolkit.models.teacher import Text
from toolkit.stopping import StoppingPolicy
from toolkit.stopping.base import State
from toolkit.trace.steps import Certain, Geometry


class Copies:
    """What may be copied at every position of some texts [P]: worked out once, for all policies that decide on it.

    proposer  None: nothing is copied, as in autoregressive decoding
    most      the longest copy, `max_drafted` as of a recording

    grammars  of the texts, before their first produced tokens; None: no text has one

    text_first [T + 1]  where each text's positions begin;  geometry  as that of a recording
    leads [P]  certain tokens that come before what may be copied
    after [P, C]  certain tokens that ride along after 0, 1, ... copied ones
    """

    def __init__(
        self,
        proposer: CopyProposer | None,
        sequences: Sequence[Text],
        most: int,
        max_new_tokens: int,
        end_ids: Sequence[int],
        grammars: Sequence[TextGrammar | None] | None = None,
    ):
        self.proposer, self.max_drafted = _Recalled([]), most
        room, left, context = list[int](), list[int](), list[int]()
        leads, after = list[int](), list[Tensor]()
        for text, (prompt, produced) in enumerate(sequences):
            whole = [*map(int, prompt), *map(int, produced)]
            states = along(None if grammars is None else grammars[text], whole[len(prompt) :])
            for number in range(len(produced)):
                start = len(prompt) + number
                room.append(min(max_new_tokens - number - 1, most))
                left.append(len(produced) - number)
                context.append(start)
                lead, copy = list[int](), NOTHING
                if proposer is not None:
                    lead, copy = proposer.along(whole[:start], room[-1], states[number], end_ids)
                pairs = zip(copy.tokens, whole[start + len(lead) :], strict=False)
                agreeing = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
                self.proposer.copies.append((copy, agreeing))
                leads.append(len(lead))
                ahead = max_new_tokens - number - 1 - len(lead)
                following = along(states[number], [*lead, *copy.tokens])[len(lead) :]
                runs = [
                    0 if state is None else len(state.run(min(FORCED, ahead - copied)))
                    for copied, state in enumerate(following)
                ]
                after.append(torch.tensor(runs))
        self.text_first = torch.tensor([0, *(len(produced) for _, produced in sequences)]).cumsum(0)
        self.leads, self.after = torch.tensor(leads), pad_sequence(after, batch_first=True)
        self.has_grammars = grammars is not None
        run = self.leads + torch.tensor([agreeing for _, agreeing in self.proposer.copies])
        self.geometry = Geometry(run, torch.tensor(left), torch.tensor(room), run, torch.tensor(context))

    @property
    def num_texts(self) -> int:
        """T."""
        return len(self.text_first) - 1

    @property
    def num_positions(self) -> int:
        """P."""
        return len(self.geometry.run)

    @property
    def most_sent(self) -> int:
        """The most tokens of a round, as `Trace.most_sent`."""
        return self.max_drafted + (FORCED if self.has_grammars else 0)

    def certain(self, starts: Tensor, num_drafted: Tensor) -> Certain | None:
        """The certain tokens of rounds from `starts` [B] that copy so many [B], those before the copy among these."""
        if not self.has_grammars:
            return None
        copied = num_drafted - self.leads[starts]
        after = (self.after[starts, copied.clamp(min=0)] - copied.clamp(max=0)).clamp(max=FORCED)
        kept = torch.where(num_drafted <= self.geometry.run[starts], after, 0)
        return Certain(torch.zeros_like(after), after, kept)

    def round(
        self, starts: Tensor, room: Tensor, policy: StoppingPolicy, state: State, begins: Tensor
    ) -> tuple[Tensor, Tensor, State]:
        """Tokens copied by rounds from positions `starts` [B], how many agree with the text [B], the policy's state.

        Certain tokens before a copy are among them, whatever the policy says.

        room    the most tokens that may be copied [B]
        begins  whether the round may copy at all [B] bool
        """
        positions, lead = [[start] for start in starts.tolist()], torch.minimum(self.leads[starts], room)
        _, copied, state = self.proposer.copied(positions, (room - lead).tolist(), (), policy, state, begins)
        copied = lead + copied
        return copied, torch.minimum(copied, self.geometry.run[starts]), state

    def draft(
        self, starts: Tensor, policy: StoppingPolicy, state: State, busy: Tensor | None = None
    ) -> tuple[Tensor, Tensor, State]:
        """One round from each of `starts` [B]: tokens copied [B], draft forwards (none) [B], the policy's state.

        busy  [B] bool: slots that hold a text; the others copy nothing. None: all do
        """
        room = self.geometry.room[starts]
        room = room if busy is None else torch.where(busy, room, 0)
        state, begins = policy.begin(room > 0, self.geometry.in_context(policy, state, starts))
        copied, _, state = self.round(starts, room, policy, state, begins)
        return copied, torch.zeros_like(copied), state


class _Recalled(CopyProposer):
    """Copies that were looked up before, each with how many of its tokens agree; a text is the number of its position."""

    def __init__(self, copies: list[tuple[Copy, int]]):
        self.copies = copies

    def lookup(self, text: Sequence[int], most: int, end_ids: Sequence[int]) -> Copy:
        copy = self.copies[text[0]][0]
        return copy._replace(tokens=copy.tokens[:most])

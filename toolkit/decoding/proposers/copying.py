"""Proposers that copy tokens which the text, or another one, holds already: no draft model.

The draft's q is a point mass on the copied tokens. So every rule that is exact for draws from q is exact for it: a copied
token is accepted with p(token), at any temperature. Which tokens are copied, and how many are sent, depends on the text
alone.

Shapes: B batch slots, K copied tokens, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from toolkit.decoding.proposers.base import DraftContext, Numbers, TextProposer, empty_proposal, where_active
from toolkit.engine.device import floats_on, most_of, tensor_on
from toolkit.grammar import walk
from toolkit.grammar.text import TextGrammar
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import DraftStep, Match, Proposal, Verdict


class Copy(NamedTuple):
    """What a row may copy in a round.

    tokens       [k]
    length       how many tokens before them agree with the text's last ones
    occurrences  [k] earlier occurrences of these tokens that agree with what is copied before the token
    agreement    [k] share of these occurrences that go on with the token
    """

    tokens: list[int]
    length: int
    occurrences: list[int]
    agreement: list[float]

    @classmethod
    def of(cls, tokens: Sequence[int], length: int = 1) -> Copy:
        """A copy from one occurrence, before which `length` tokens agree."""
        return cls(list(tokens), length, [1] * len(tokens), [1.0] * len(tokens))


NOTHING = Copy([], 0, [], [])


class CopyProposer(TextProposer):
    """Drafts a copy as far as the policy, the limits and an end of text in it allow.

    A policy is asked once for all tokens (`plan`, if it plans copies), or before each token (`read`, if it reads) and after it
    (`step`), and for all rows at the end (`sent`). Its steps hold the token's `match`.
    """

    obeys = ("begin", "read", "step", "sent", "plan", "observe")
    needs_draft_model: ClassVar[bool] = False
    shows_matches: ClassVar[bool] = True
    shows_live_rows: ClassVar[bool] = True
    reads_grammars: ClassVar[bool] = True

    def max_nodes(self, limit: int) -> int:
        return limit

    @abstractmethod
    def lookup(self, text: Sequence[int], most: int, end_ids: Sequence[int]) -> Copy:
        """At most `most` tokens to copy after a text, none after an end of text."""

    def propose(self, context: DraftContext, policy: StoppingPolicy, state: State) -> tuple[Proposal, State]:
        state, starts = policy.begin(context.limits > 0, state)
        before, numbers = state, Numbers(policy, context.limits)
        tokens, num_drafted, state = self.copied(
            context.sequences, context.room, context.end_ids, policy, state, starts, context.grammars
        )
        numbers.add_state(state, before, starts)
        num_calls, valid = torch.zeros_like(context.limits), numbers.valid()
        if not tokens.shape[1]:
            return empty_proposal(num_calls, valid), state
        q = point_masses(tokens, context.vocab_size)
        return Proposal(tokens, q, num_drafted, num_calls, valid=valid), state

    def copied(
        self,
        sequences: Sequence[Sequence[int]],
        room: Sequence[int],
        end_ids: Sequence[int],
        policy: StoppingPolicy,
        state: State,
        starts: Tensor,
        grammars: Sequence[TextGrammar | None] | None = None,
    ) -> tuple[Tensor, Tensor, State]:
        """Copied tokens [B, K], how many of them count [B], and the policy's state after it. No model is asked.

        K is the largest count, so that the target reads no token that no row sends; on a GPU the longest copy. With grammars a
        row's certain tokens come first, whatever the policy says, and a copy ends where its grammar does not go on.

        room    the most tokens each row may draft
        starts  whether the row may copy at all [B] bool
        """
        if grammars is None:
            copies = [
                self.lookup(text, most, end_ids) if most > 0 else NOTHING
                for text, most in zip(sequences, room, strict=True)
            ]
            return self._sent(copies, policy, state, starts)
        rows = zip(sequences, room, grammars, strict=True)
        runs, cut = zip(*[self.along(text, most, grammar, end_ids) for text, most, grammar in rows], strict=True)
        tokens, counts, state = self._sent(cut, policy, state, starts)
        certain = tensor_on(starts.device, [*map(len, runs)])
        chains = [run + row[:count] for run, row, count in zip(runs, tokens.tolist(), counts.tolist(), strict=True)]
        width = max(map(len, chains))
        return (
            tensor_on(starts.device, [chain + [0] * (width - len(chain)) for chain in chains]),
            certain + counts,
            state,
        )

    def along(
        self, text: Sequence[int], most: int, grammar: TextGrammar | None, end_ids: Sequence[int]
    ) -> tuple[list[int], Copy]:
        """The certain tokens after a text, and what may be copied after these as far as the grammar allows it."""
        run = [] if grammar is None or most <= 0 else grammar.run(most)
        room = most - len(run)
        if room <= 0 or (run and run[-1] in end_ids):
            return run, NOTHING
        copy = self.lookup([*text, *run], room, end_ids)
        if grammar is not None:
            after = walk.along(grammar, run)[-1]
            valid = 0 if after is None else after.valid(copy.tokens)
            copy = Copy(copy.tokens[:valid], copy.length, copy.occurrences[:valid], copy.agreement[:valid])
        return run, copy

    def _sent(
        self, copies: Sequence[Copy], policy: StoppingPolicy, state: State, starts: Tensor
    ) -> tuple[Tensor, Tensor, State]:
        """The copies as tokens [B, K], how many of them the policy sends [B], and its state after it."""
        device = starts.device
        longest = max(len(copy.tokens) for copy in copies)
        tokens = tensor_on(device, [copy.tokens + [0] * (longest - len(copy.tokens)) for copy in copies])
        available = tensor_on(device, [len(copy.tokens) for copy in copies])
        num_drafted = torch.zeros_like(available)
        if not longest:
            return tokens, num_drafted, state
        matches = _matches(copies, longest, device)
        if policy.plans_copies:
            state, num_drafted = policy.plan(matches, torch.where(starts, available, 0), starts, state)
        else:
            nothing = torch.zeros(len(copies), 0, dtype=torch.float32, device=device)
            drafting = starts & (available > 0)
            for depth in range(1, longest + 1):
                match = Match(
                    *(column[:, depth - 1] for column in (matches.length, matches.occurrences, matches.agreement))
                )
                step = DraftStep(depth, nothing, nothing, nothing, live=drafting, match=match)
                if policy.reads:
                    new_state, go_on = policy.read(step, state)
                    state, drafting = where_active(new_state, state, drafting), drafting & go_on
                num_drafted += drafting
                step.tokens = tokens[:, depth - 1]
                new_state, go_on = policy.step(step, state)
                state = where_active(new_state, state, drafting)
                drafting = drafting & go_on & (available > depth)
        num_drafted = policy.sent(num_drafted, state)
        return tokens[:, : most_of(num_drafted, longest, least=0)], num_drafted, state

    def commit(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, accepted: list[int], lengths: list[int]
    ) -> None:
        """Do nothing: no cache has read the draft."""


def point_masses(tokens: Tensor, vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Distributions [..., V] that have all their mass at tokens [...]."""
    q = torch.zeros(*tokens.shape, vocab_size, dtype=dtype, device=tokens.device)
    return q.scatter_(-1, tokens.unsqueeze(-1), 1.0)


def until_end(tokens: Sequence[int], end_ids: Sequence[int]) -> list[int]:
    """The tokens up to the first that ends a text, this one included."""
    ends = [index for index, token in enumerate(tokens) if token in end_ids]
    return list(tokens[: ends[0] + 1] if ends else tokens)


def _matches(copies: Sequence[Copy], longest: int, device: torch.device) -> Match:
    """The matches [B, K] of all tokens up to the longest copy's; zeros where a row has none."""

    def rows(columns: Sequence[Sequence[float]]) -> Tensor:
        return floats_on(device, [[*map(float, column), *[0.0] * (longest - len(column))] for column in columns])

    lengths = floats_on(device, [[float(copy.length)] for copy in copies]).expand(-1, longest)
    return Match(lengths, rows([copy.occurrences for copy in copies]), rows([copy.agreement for copy in copies]))

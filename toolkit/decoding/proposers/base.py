"""What every proposer is: how drafts are drawn. One file per kind beside this one.

A proposer of a method with one text per row is a `TextProposer`. Forests, for methods with several beams, have their
own kind of context (`forest`). What a method needs to know about either is in `Proposer`.

Shapes: B batch slots, U unread tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from toolkit.decoding.context_window import HistoryWindow
from toolkit.engine import Session
from toolkit.grammar import TextGrammar, Walk
from toolkit.sampling import Sampling
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import DraftStep, Proposal, Verdict


@dataclass
class DraftContext:
    """What a proposer may use in one round.

    texts        per row: the context, prompt and produced tokens
    sessions     one per draft model
    unread       of a draft, by number: tokens [B, U] of the context that its cache lacks before the round, right-aligned. How
                 many per row comes with them. They are collected when first asked for
    limits [B]   the most tokens each row may draft (its length limit, less one for the token after them)
    room         the same on the host; `most` is the largest
    uniforms     [B, M] one per node
    vocab_size   V, the target's; `fit` brings a draft's logits to it, and to the target's device
    seen         tokens of the context [B, V] bool, for the repetition penalty; None if it is off
    end_ids      tokens that end a text: nothing is drafted after them
    grammars     of the rows, after their texts; None: no row has one
    earlier      what the draft showed at the positions before, if the policy looks at them; None: it does not
    """

    sequences: Sequence[Sequence[int]]
    sessions: list[Session]
    unread: Callable[[int], tuple[Tensor, list[int]]]
    limits: Tensor
    room: Sequence[int]
    uniforms: Tensor
    sampling: Sampling
    vocab_size: int
    fit: Callable[[Tensor], Tensor]
    seen: Tensor | None
    end_ids: tuple[int, ...]
    grammars: Sequence[TextGrammar | None] | None = None
    earlier: HistoryWindow | None = None

    def walk(self) -> Walk | None:
        """A fresh walk along the rows' grammars; None: no row has one."""
        return None if self.grammars is None else Walk(self.grammars, self.vocab_size, self.limits.device)

    @property
    def most(self) -> int:
        """The most tokens that any row may draft."""
        return max(0, *self.room)


class Proposer(ABC):
    """What a method needs to know about a proposer.

    name                its choice in the config group `proposer`, declared by each proposer of ours
    scheme              how candidates are drawn (`toolkit.verification.schemes`, "beams" for the most probable of several)
    obeys               hooks of a policy that it calls (`toolkit.stopping.base.HOOKS`); a policy with others is refused
    uses_all_drafts     several draft models take part; else the first one drafts alone
    needs_draft_model   False: tokens come from elsewhere, and policies that look at a draft's distribution or states
                        have nothing to look at
    keeps_history       True: its steps know the positions before them (`Step.history`), for heads that read those
    shows_matches       True: its steps of copied tokens say where these come from (`Step.match`)
    chooses_nodes       True: its nodes are the policy's choice (`StoppingPolicy.choose`)
    shows_live_rows     True: its steps say which rows are drafting (`Step.live`), for policies that decide for a batch
    reads_grammars      True: it drafts along the rows' grammars
    reads_blocks        True: it reads a draft that gives a block per forward pass; False: one that gives a token
    """

    scheme: str = "iid"
    uses_all_drafts: ClassVar[bool] = False
    needs_draft_model: ClassVar[bool] = True
    shows_matches: ClassVar[bool] = False
    chooses_nodes: ClassVar[bool] = False
    shows_live_rows: ClassVar[bool] = False
    reads_blocks: ClassVar[bool] = False
    reads_grammars: ClassVar[bool] = False
    keeps_history: ClassVar[bool] = False

    @property
    @abstractmethod
    def obeys(self) -> tuple[str, ...]:
        """Stated by every proposer, as an attribute of its class."""

    def num_drafts(self, available: int) -> int:
        """How many of a pair's draft models take part."""
        return available if self.uses_all_drafts else min(available, 1)

    def check(self, vocab_size: int) -> None:  # noqa: B027  # most have nothing to check
        """Raises InputError if it would draft tokens that the target has not."""

    @abstractmethod
    def max_nodes(self, limit: int) -> int:
        """The most nodes of a round whose policy asks for at most `limit` tokens (or levels, or layers)."""


class TextProposer(Proposer):
    """A proposer for one text per row."""

    @abstractmethod
    def propose(self, context: DraftContext, policy: StoppingPolicy, state: State) -> tuple[Proposal, State]:
        """Draft one round for every row; returns the policy's state after it. Rows draft up to `context.limits`."""

    @abstractmethod
    def commit(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, accepted: list[int], lengths: list[int]
    ) -> None:
        """Forget in the drafts' caches what was not accepted. `lengths`: tokens of each row's context before the round."""


class Numbers:
    """What the decisions of a round were made from, row by row: is all of it a number?

    Nothing is looked at before the round's end (`valid`), so that this adds next to nothing to a drafted token.
    A policy's estimates are not seen themselves. One that is not a number shows in the policy's state.
    """

    def __init__(self, policy: StoppingPolicy, limits: Tensor):
        self.reads_states, self.num_rows = policy.reads_states, len(limits)
        self.values = [torch.zeros(self.num_rows, 1, dtype=torch.float32, device=limits.device)]
        self.counts = [self.values[0] > 0]

    def add_step(self, step: DraftStep, rows: Tensor) -> None:
        """Add what a policy may see of a step's rows, and the distribution that is drawn from; rows: which ones count."""
        self.add(step.probs[:, 0], rows)  # stands for all of them (`warp`)
        if self.reads_states:
            hidden = step.hidden if step.hidden.dtype == torch.float64 else step.hidden.float()
            self.add(hidden.sum(-1) * 0, rows)  # not a number for infinite states as well

    def add_state(self, new: State, old: State, rows: Tensor) -> None:
        """Add what a policy has changed in its state."""
        for key, value in new.items():
            if value is not old[key] and value.is_floating_point():
                self.add(value, rows)

    def add(self, values: Tensor, rows: Tensor) -> None:
        """Add values [R, ...], of which those of some rows [R] count; R is a multiple of the batch."""
        values = values.reshape(self.num_rows, len(rows) // self.num_rows, -1)
        self.values.append(values.flatten(1))
        self.counts.append(rows.view(*values.shape[:2], 1).expand_as(values).flatten(1))

    def valid(self) -> Tensor:
        """Rows [B] of which all values that count are numbers."""
        return ~(torch.cat(self.values, 1).isnan() & torch.cat(self.counts, 1)).any(1)


def empty_proposal(num_calls: Tensor, valid: Tensor) -> Proposal:
    """A proposal of rows that drafted nothing; num_calls and valid [B]."""
    num_rows, device = len(num_calls), num_calls.device
    nothing = torch.zeros(num_rows, 0, dtype=torch.long, device=device)
    no_probs = torch.zeros(num_rows, 0, 1, dtype=torch.float32, device=device)
    return Proposal(nothing, no_probs, torch.zeros_like(num_calls), num_calls, valid=valid)


def where_active(new: State, old: State, moving: Tensor) -> State:
    """The new state where a row is still drafting [B], the old one elsewhere; what did not change is left as it is."""
    return {
        key: value if value is old[key] else torch.where(moving.view(-1, *[1] * (value.dim() - 1)), value, old[key])
        for key, value in new.items()
    }

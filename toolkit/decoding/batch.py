"""The decoding loop, once: propose, score, verify, commit; for every method, batched.

A batch has B slots. Each slot decodes one prompt at a time and takes the next one from the queue when its row ends. So
rows draft, accept and finish independently of each other. A row's random numbers come from its own generator, one row
of uniforms per round, so that its tokens do not depend on its neighbours.

A row's context is one text or several beams, in the two kinds of batch (`text`, `beams`). Each kind defines what a
proposer sees (ContextT), what goes to the target (ProposalT) and what comes back (VerdictT).

Shapes: B batch slots, N proposed nodes, M the most nodes of a round, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, TypeVar

import torch
from torch import Tensor

from toolkit.decoding.method import Method
from toolkit.engine import Session
from toolkit.engine.device import tensor_on
from toolkit.engine.engine import Sessions
from toolkit.engine.facts import NO_LIMIT, max_positions
from toolkit.errors import NOT_NUMBERS
from toolkit.grammar import TextGrammar
from toolkit.models.pair import ModelPair
from toolkit.sampling import Sampling
from toolkit.stopping.base import State, with_fresh
from toolkit.types import Drafted, Generation, Verified
from toolkit.verification.base import num_uniforms

PREFILL = 8  # rows with at least as many unread tokens join a running batch through forward passes without the others
PADDING = 128  # tokens of padding that another forward pass is worth
TOGETHER = 8192  # tokens that are read together at most, padding included, unless one row has more: memory stays flat

ContextT = TypeVar("ContextT")
ProposalT = TypeVar("ProposalT", bound=Drafted)
VerdictT = TypeVar("VerdictT", bound=Verified)


@dataclass
class Row:
    """One prompt being decoded."""

    generation: Generation
    context: list[int]  # prompt and produced tokens
    generator: torch.Generator
    grammar: TextGrammar | None = None  # of what comes next

    @property
    def num_produced(self) -> int:
        """Tokens produced so far."""
        return len(self.generation.token_ids)


class Clock:
    """Splits a round's seconds: the proposer's are the draft's, all else since the texts' last round is the target's."""

    def __init__(self, now: Callable[[], float]):
        self.now = now
        self.last = now()
        self.draft = self.target = 0.0

    def lap(self) -> float:
        """Seconds since the last call."""
        last, self.last = self.last, self.now()
        return self.last - last

    def seconds(self) -> tuple[float, float]:
        """Seconds of the draft, and of the target up to now; called once per round."""
        return self.draft, self.target + self.lap()


@dataclass(frozen=True)
class Job:
    """What a call of `decode` decodes, and with what: fixed while its rows come and go.

    queue    rows that wait for a slot
    finish   told of every generation that ends
    count    told after every round how many tokens it made
    stream   told after every round of each generation in it, and the tokens that the round added
    timed    True: wait for the device at the seams of a round, so that its draft and target seconds are their own
    """

    pair: ModelPair
    method: Method
    sampling: Sampling
    queue: deque[Row]
    finish: Callable[[Generation], object]
    count: Callable[[int], object]
    timed: bool = False
    stream: Callable[[Generation, list[int]], object] | None = None

    def now(self) -> float:
        """Seconds on the host's clock, once the device has done its work, if `timed`."""
        if self.timed and self.pair.device.type == "cuda":
            torch.cuda.synchronize(self.pair.device)
        return perf_counter()


class Batch(ABC, Generic[ContextT, ProposalT, VerdictT]):
    """The slots of one call, their caches, and the loop over rounds."""

    def __init__(self, job: Job, sessions: Sessions, rows: list[Row]):
        self.job, self.rows = job, rows
        self.pair, self.method, self.sampling = job.pair, job.method, job.sampling
        self.draft_sampling = job.sampling.at(job.method.draft_temperature)
        self.most = job.method.max_nodes
        self.target = sessions.target
        self.drafts = sessions.drafts[: job.method.num_drafts(len(sessions.drafts))]
        self.draft_limit = min(map(max_positions, job.pair.drafts[: len(self.drafts)]), default=NO_LIMIT)
        self.busy = [True] * len(rows)
        self.device = job.pair.device
        self.end_ids = job.pair.ends(job.sampling)
        self.state: State = job.method.policy.init(len(rows), self.device)
        self.drafting = True  # whether the last round read a draft model
        self.peak_bytes = 0  # the most that the caches took

    @torch.inference_mode()
    def run(self) -> int:
        """Run rounds until every row has ended; returns the most bytes that the caches took."""
        clock = Clock(self.job.now)
        while any(self.busy):
            self._prefill()
            uniforms = self._uniforms()
            context = self.context(uniforms)
            clock.target = clock.lap()
            calls = self._draft_calls()
            proposal, state = self.propose(context)
            clock.draft = clock.lap()
            self.drafting = self._draft_calls() > calls
            verdict = self.verify(context, proposal, self.score(context, proposal), uniforms)
            self.state = self.method.policy.observe(*self.observed(proposal, verdict), state)
            decoding = [row.generation for row, busy in zip(self.rows, self.busy, strict=True) if busy]
            lengths = [len(generation.token_ids) for generation in decoding]
            self.commit(context, proposal, verdict, clock)
            if self.job.stream is not None:
                for generation, length in zip(decoding, lengths, strict=True):
                    self.job.stream(generation, generation.token_ids[length:])
            self.job.count(sum(generation.rounds[-1].num_produced for generation in decoding if generation.rounds))
            goes_on = any(self.busy)
            self._refill()
            if not goes_on:
                clock.lap()  # the end of the last texts is no part of the next ones
        self._note_memory()
        return self.peak_bytes

    @property
    def sessions(self) -> list[Session]:
        """The caches in use, the target's first."""
        return [self.target, *self.drafts]

    # -- what kinds of batch differ in ----------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def capacity(method: Method, sampling: Sampling, longest: int) -> int:
        """Slots of a cache for prompts of at most this length."""

    @abstractmethod
    def join(self, slot: int) -> None:
        """Begin the new row that has taken a slot of the running batch."""

    @abstractmethod
    def select(self, slots: list[int]) -> None:
        """Keep these slots only, in this order."""

    @abstractmethod
    def unread(self, session: Session, slot: int) -> list[int]:
        """Tokens of the slot's context that a cache lacks, all but the newest."""

    @abstractmethod
    def context(self, uniforms: Tensor) -> ContextT:
        """What the proposer may use."""

    @abstractmethod
    def propose(self, context: ContextT) -> tuple[ProposalT, State]:
        """The draft, and the policy's state after it."""

    @abstractmethod
    def score(self, context: ContextT, proposal: ProposalT) -> Tensor:
        """What the target says about the proposal, in one forward pass."""

    @abstractmethod
    def verify(self, context: ContextT, proposal: ProposalT, scores: Tensor, uniforms: Tensor) -> VerdictT:
        """The rule's verdict on the proposal."""

    def observed(self, proposal: ProposalT, verdict: VerdictT) -> tuple[Drafted, Verified]:
        """What the policy is told of a round."""
        return proposal, verdict

    @abstractmethod
    def commit(self, context: ContextT, proposal: ProposalT, verdict: VerdictT, clock: Clock) -> None:
        """Take what was accepted into the texts, cut caches back, end rows that are done."""

    def draft_room(self, length: int) -> int:
        """The most tokens that may be drafted after a text, one after another: the drafts read all but the last of them."""
        return self.draft_limit - length + 1

    # -- one round ------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Let rows that join a running batch read their prompts, all but the last token, together and without the others.

        If all rows join and one forward pass would do, it is the round's own; else they are read in groups of similar length
        (`read_together`). A draft model reads nothing while no row drafts with it. If one does again, all rows catch up in
        that forward pass.
        """
        states_first = any(session.reads_states for session in self.drafts)  # the target reads before such a draft does
        for session in self.sessions if self.drafting else [self.target]:
            first = states_first and session is self.target
            unread = {slot: self.unread(session, slot) for slot in range(len(self.rows))}
            slots = [slot for slot, tokens in unread.items() if len(tokens) >= (1 if first else PREFILL)]
            groups = read_together([len(unread[slot]) for slot in slots])
            if len(groups) == 1 and len(slots) == len(self.rows) and not first:
                continue
            for group in groups:
                chosen = [slots[number] for number in group]
                tokens, counts = right_aligned([unread[slot] for slot in chosen], session.index.device)
                session.extend(tokens, counts=counts, rows=chosen)

    def _draft_calls(self) -> int:
        return sum(session.num_calls for session in self.drafts)

    def _uniforms(self) -> Tensor:
        """One row of uniforms per slot, each from its own generator: [B, 3 M + 1]."""
        drawn = torch.stack([
            torch.rand(num_uniforms(self.most), generator=row.generator, dtype=torch.float64, device="cpu") for row in self.rows
        ])  # fmt: skip
        return drawn.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else drawn

    def _note_memory(self) -> None:
        """Note the caches' size: they only grow until slots are dropped, so it is largest just before."""
        self.peak_bytes = max(self.peak_bytes, sum(session.cache_bytes for session in self.sessions))

    # -- the end of a row -----------------------------------------------------------------------------------------

    def end(self, slot: int, reason: str) -> None:
        """End a row: write its text, and call the code that waits for it."""
        self.busy[slot] = False
        generation = self.rows[slot].generation
        generation.finish_reason = reason
        generation.text = self.pair.text(generation.token_ids, generation.prompt_ids)
        if reason == "stop":
            generation.text = generation.text[: self.stop_position(generation, generation.token_ids)]
        self.job.finish(generation)

    def fail(self, slot: int, reason: str = NOT_NUMBERS) -> None:
        """End a row whose models, or whose policy's head, gave what is not a number, or for another reason."""
        generation = self.rows[slot].generation
        generation.error = f"prompt {generation.index}: {reason}"
        self.end(slot, "error")

    @property
    def has_stops(self) -> bool:
        """Whether texts are searched for stop strings."""
        return bool(self.sampling.stop) and self.pair.tokenizer is not None

    def stop_position(self, generation: Generation, token_ids: list[int]) -> int | None:
        """Where the first stop string starts in the text of these tokens after the generation's prompt."""
        return self.pair.stop_position(self.sampling.stop, token_ids, generation.prompt_ids)

    # -- what is not a number -------------------------------------------------------------------------------------

    def spoilt(self) -> Tensor:
        """Slots whose caches have read what is not a number, of the round's text or beside it [B, sessions], 0 or 1."""
        return torch.stack([session.spoilt.to(self.device) for session in self.sessions], 1).long()

    def clear(self, spoilt: list[list[int]]) -> None:
        """Wipe it after the texts that go on: a row that has stopped reads on while its neighbours draft."""
        for slot, of_sessions in enumerate(spoilt):
            for session, is_spoilt in zip(self.sessions, of_sessions, strict=True):
                if is_spoilt:
                    session.clear(slot)

    # -- slots ----------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Give free slots to waiting prompts; without any, drop them once they are half of the batch."""
        for slot in range(len(self.rows)):
            if not self.busy[slot] and self.job.queue:
                self.rows[slot], self.busy[slot] = self.job.queue.popleft(), True
                self.state = with_fresh(self.method.policy, self.state, slot)
                self.join(slot)
        busy = [slot for slot, is_busy in enumerate(self.busy) if is_busy]
        if busy and 2 * len(busy) <= len(self.rows) and not self.target.fixed_rows:
            self._note_memory()
            self.rows, self.busy = [self.rows[slot] for slot in busy], [True] * len(busy)
            self.state = {key: value[busy] for key, value in self.state.items()}
            for session in self.sessions:
                session.select(busy)
            self.select(busy)


def read_together(lengths: Sequence[int]) -> list[list[int]]:
    """Which rows of these many unread tokens are read in one forward pass, padded to its longest: their numbers, in order.

    A longer row joins the shorter ones unless it would pad them by more than PADDING tokens in all, or exceed TOGETHER.
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        group = groups[-1] if groups else []
        padding = len(group) * (lengths[row] - lengths[group[-1]]) if group else 0
        if group and padding <= PADDING and (len(group) + 1) * lengths[row] <= TOGETHER:
            group.append(row)
        else:
            groups.append([row])
    return [sorted(group) for group in groups]


def right_aligned(rows: list[list[int]], device: torch.device) -> tuple[Tensor, list[int]]:
    """Token lists as one block [B, U], padded in front, and their lengths."""
    counts = [len(row) for row in rows]
    width = max(counts)
    return tensor_on(device, [[0] * (width - len(row)) + row for row in rows]), counts

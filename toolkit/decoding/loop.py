"""The decoding loop, once: propose, score, verify, commit; for every method, batched.

A batch has B places. Each place decodes one prompt at a time and takes the next one from the queue when its row ends, so
rows draft, accept and finish independently of each other. A row's random numbers come from its own generator, one row of
uniforms per round, so that its tokens do not depend on its neighbours.

What a row's context is, one text or several beams, is the business of the two kinds of Batch (`trunk`, `beams`).

Shapes: B places, N proposed nodes, M the most nodes of a round, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from toolkit.decoding.method import Method
from toolkit.errors import InputError
from toolkit.pair import ModelPair
from toolkit.sampling import Sampling, row_generator
from toolkit.session import Session
from toolkit.stopping.base import State
from toolkit.transfer import tensor_on
from toolkit.types import Generation
from toolkit.verification.base import num_uniforms

PREFILL = 8  # a row with more unread tokens than this joins a running batch through a forward of its own


@dataclass
class Row:
    """One prompt being decoded."""

    generation: Generation
    context: list[int]  # prompt and produced tokens
    generator: torch.Generator

    @property
    def num_produced(self) -> int:
        """Tokens produced so far."""
        return len(self.generation.token_ids)


def decode(
    pair: ModelPair,
    prompts: Sequence[Any],
    method: Method,
    sampling: Sampling,
    *,
    batch_size: int = 8,
    row_ids: Sequence[int] | None = None,
    on_finish: Callable[[Generation], object] | None = None,
) -> list[Generation]:
    """Decode every prompt; the generations come back in the order of the prompts.

    prompts    strings, lists of token ids or lists of chat messages
    row_ids    what seeds each row beside `sampling.seed` and names it in errors; None: 0, 1, ...
    on_finish  called with each generation when it ends
    A prompt that cannot be decoded (empty, too long, laws that are not numbers) comes back with `.error` set; the
    others finish. Needs torch and transformers only.
    """
    from toolkit.decoding.beams import BeamBatch
    from toolkit.decoding.trunk import TrunkBatch

    if batch_size < 1:
        raise InputError(f"batch_size: expected at least 1, got {batch_size}")
    sampling.check_vocab(pair.vocab_size)
    pair.cache_bytes = 0
    method = method.bind(pair)
    row_ids = range(len(prompts)) if row_ids is None else row_ids
    rows = [_start(pair, prompt, row_id, sampling) for prompt, row_id in zip(prompts, row_ids, strict=True)]
    finish = on_finish or (lambda generation: None)
    queue = deque(row for row in rows if row.generation.error is None)
    for row in rows:
        if row.generation.error is not None:
            finish(row.generation)
    if queue:
        kind = TrunkBatch if method.beams is None else BeamBatch
        kind(pair, method, sampling, queue, batch_size, finish).run()
    return [row.generation for row in rows]


def _start(pair: ModelPair, prompt: Any, row_id: int, sampling: Sampling) -> Row:
    """A row ready to be queued, or one whose error says why it cannot be."""
    generation = Generation(index=row_id, prompt_ids=[], token_ids=[])
    try:
        generation.prompt_ids = ids = pair.encode(prompt)
        if not ids:
            raise InputError(f"prompt {row_id} is empty: expected at least one token")
        if min(ids) < 0 or max(ids) >= pair.vocab_size:
            raise InputError(
                f"prompt {row_id}: expected token ids in [0, {pair.vocab_size}), got {min(ids)}..{max(ids)}"
            )
        if len(ids) + sampling.max_new_tokens > pair.max_length:
            raise InputError(
                f"prompt {row_id}: {len(ids)} tokens and max_new_tokens={sampling.max_new_tokens} exceed the context of "
                f"{pair.max_length}; shorten the prompt or lower max_new_tokens"
            )
    except InputError as error:
        generation.error, generation.finish_reason = str(error), "error"
    return Row(generation, list(generation.prompt_ids), row_generator(sampling.seed, row_id))


class Batch(ABC):
    """The places of one call, their caches, and the loop over rounds."""

    def __init__(
        self,
        pair: ModelPair,
        method: Method,
        sampling: Sampling,
        queue: deque[Row],
        batch_size: int,
        finish: Callable[[Generation], object],
    ):
        self.pair, self.method, self.sampling = pair, method, sampling
        self.queue, self.finish = queue, finish
        self.draft_sampling = sampling.at(method.draft_temperature)
        self.most = method.max_nodes
        places = min(batch_size, len(queue))
        self.sessions = pair.open_sessions(places, self.capacity(max(len(row.context) for row in queue)))
        self.target, self.drafts = self.sessions
        if not method.proposer.takes_turns:
            self.drafts = self.drafts[: int(method.drafts)]
        self.rows = [queue.popleft() for _ in range(places)]
        self.busy = [True] * places
        self.device = pair.device
        self.state: State = method.policy.init(places, self.device)
        for place in range(places):
            self.join(place)

    @torch.inference_mode()
    def run(self) -> None:
        """Rounds until every row has ended."""
        while any(self.busy):
            self._prefill()
            uniforms = self._uniforms()
            started = perf_counter()
            context = self.draft_context(uniforms)
            proposal, state = self.method.proposer.propose(context, self.method.policy, self.state)
            drafted = perf_counter()
            verdict = self.verify(proposal, self.score(proposal), uniforms)
            self.state = self.method.policy.observe(proposal, verdict, state)
            self.commit(context, proposal, verdict, started, drafted)
            self._refill()
        self._note_memory()
        self.pair.close_sessions(self.sessions)

    # -- what kinds of batch differ in ----------------------------------------------------------------------------

    @abstractmethod
    def capacity(self, longest: int) -> int:
        """Slots of a cache for prompts of at most this length."""

    @abstractmethod
    def join(self, place: int) -> None:
        """A new row has taken a place."""

    @abstractmethod
    def drop(self, places: list[int]) -> None:
        """Only these places go on, in this order."""

    @abstractmethod
    def unread(self, session: Session, place: int) -> list[int]:
        """Tokens of the place's trunk that a cache lacks, all but the newest."""

    @abstractmethod
    def draft_context(self, uniforms: Tensor) -> Any:
        """What the proposer may use."""

    @abstractmethod
    def score(self, proposal: Any) -> Tensor:
        """What the target says about the proposal, in one forward."""

    @abstractmethod
    def verify(self, proposal: Any, scores: Tensor, uniforms: Tensor) -> Any:
        """The verdict."""

    @abstractmethod
    def commit(self, context: Any, proposal: Any, verdict: Any, started: float, drafted: float) -> None:
        """Take what was accepted into the texts, cut caches back, end rows that are done."""

    # -- one round ------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Let rows that join a running batch read their prompts, all but the last token, without the others."""
        for session in (self.target, *self.drafts):
            unread = {place: self.unread(session, place) for place in range(len(self.rows))}
            behind = [place for place, tokens in unread.items() if len(tokens) >= PREFILL]
            if behind and len(behind) < len(self.rows):
                tokens, counts = right_aligned([unread[place] for place in behind], session.index.device)
                session.extend(tokens, counts=counts, rows=behind)

    def _uniforms(self) -> Tensor:
        """One row of uniforms per place, each from its own generator: [B, 3 M + 1]."""
        drawn = torch.stack([
            torch.rand(num_uniforms(self.most), generator=row.generator, dtype=torch.float64) for row in self.rows
        ])  # fmt: skip
        return drawn.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else drawn

    def _note_memory(self) -> None:
        """Caches only grow until places are dropped: their size just before is the largest."""
        held = sum(session.cache_bytes for session in (self.target, *self.drafts))
        self.pair.cache_bytes = max(held, self.pair.cache_bytes)

    def end(self, place: int, reason: str) -> None:
        """A row is done: its text, and word to whoever waits for it."""
        self.busy[place] = False
        generation = self.rows[place].generation
        generation.finish_reason = reason
        generation.text = self.pair.text(generation.token_ids, generation.prompt_ids)
        if reason == "stop":
            generation.text = generation.text[: self.stop_position(generation, generation.token_ids)]
        self.finish(generation)

    def stop_position(self, generation: Generation, token_ids: list[int]) -> int | None:
        """Where the first stop string starts in the text of these tokens behind the generation's prompt."""
        text = self.pair.text(token_ids, generation.prompt_ids)
        found = [position for stop in self.sampling.stop if (position := text.find(stop)) >= 0]
        return min(found, default=None)

    # -- places ---------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Give free places to waiting prompts; without any, drop them once they are half of the batch."""
        for place in range(len(self.rows)):
            if not self.busy[place] and self.queue:
                self.rows[place], self.busy[place] = self.queue.popleft(), True
                fresh = self.method.policy.init(1, self.device)
                for key, value in fresh.items():
                    self.state[key][place] = value[0]
                self.join(place)
        busy = [place for place, is_busy in enumerate(self.busy) if is_busy]
        if busy and 2 * len(busy) <= len(self.rows) and not self.target.fixed_rows:
            self._note_memory()
            self.rows, self.busy = [self.rows[place] for place in busy], [True] * len(busy)
            self.state = {key: value[busy] for key, value in self.state.items()}
            for session in (self.target, *self.drafts):
                session.select(busy)
            self.drop(busy)


def right_aligned(rows: list[list[int]], device: torch.device) -> tuple[Tensor, list[int]]:
    """Token lists as one block [B, U], padded in front, and their lengths."""
    counts = [len(row) for row in rows]
    width = max(counts)
    return tensor_on(device, [[0] * (width - len(row)) + row for row in rows]), counts

"""The decoding loop, once: propose, score, verify, commit; for every method, batched.

A batch has B places. Each place decodes one prompt at a time and takes the next one from the queue when its row ends, so
rows draft, accept and finish independently of each other. A row's random numbers come from its own generator, one row of
uniforms per round, so that its tokens do not depend on its neighbours.

Shapes: B places, N proposed nodes, M the most nodes of a round, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from toolkit.decoding.method import Method
from toolkit.decoding.proposers import DraftContext
from toolkit.errors import InputError
from toolkit.pair import ModelPair
from toolkit.sampling import Sampling, row_generator, warp
from toolkit.session import Session
from toolkit.stopping.base import State
from toolkit.transfer import tensor_on
from toolkit.types import Generation, Proposal, Round, Verdict
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
    if batch_size < 1:
        raise InputError(f"batch_size: expected at least 1, got {batch_size}")
    sampling.check_vocab(pair.vocab_size)
    method = method.bind(pair)
    row_ids = range(len(prompts)) if row_ids is None else row_ids
    rows = [_start(pair, prompt, row_id, sampling) for prompt, row_id in zip(prompts, row_ids, strict=True)]
    finish = on_finish or (lambda generation: None)
    queue = deque(row for row in rows if row.generation.error is None)
    for row in rows:
        if row.generation.error is not None:
            finish(row.generation)
    if queue:
        _Batch(pair, method, sampling, queue, batch_size, finish).run()
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


class _Batch:
    """The places of one call, their two caches, and the loop over rounds."""

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
        longest = max(len(row.context) for row in queue)
        capacity = longest + sampling.max_new_tokens + self.most + 1
        self.sessions = pair.open_sessions(places, capacity)
        self.target, self.drafts = self.sessions
        self.rows = [queue.popleft() for _ in range(places)]
        self.busy = [True] * places
        self.device = pair.device
        self.state: State = method.policy.init(places, self.device)
        self.seen = self._seen_at_start() if sampling.repetition_penalty != 1.0 else None

    @torch.inference_mode()
    def run(self) -> None:
        """Rounds until every row has ended."""
        while any(self.busy):
            self._prefill()
            uniforms = self._uniforms()
            started = perf_counter()
            context = self._draft_context(uniforms)
            proposal, state = self.method.proposer.propose(context, self.method.policy, self.state)
            drafted = perf_counter()
            target_probs = self._score(proposal)
            verdict = self.method.rule.verify(proposal, target_probs, uniforms)
            self.state = self.method.policy.observe(proposal, verdict, state)
            self._commit(context, proposal, verdict, started, drafted)
            self._refill()
        self.pair.close_sessions(self.sessions)

    def _uniforms(self) -> Tensor:
        """One row of uniforms per place, each from its own generator: [B, 3 M + 1]."""
        drawn = torch.stack([
            torch.rand(num_uniforms(self.most), generator=row.generator, dtype=torch.float64) for row in self.rows
        ])  # fmt: skip
        return drawn.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else drawn

    # -- one round ------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Let rows that join a running batch read their prompts, all but the last token, without the others."""
        for session in (self.target, *(self.drafts if self.most else ())):
            behind = [place for place, row in enumerate(self.rows) if _unread(session, place, row) > PREFILL]
            if behind and len(behind) < len(self.rows):
                prompts = [self.rows[place].context[session.lengths[place] : -1] for place in behind]
                tokens, counts = _right_aligned(prompts, session.index.device)
                session.extend(tokens, counts=counts, rows=behind)

    def _draft_context(self, uniforms: Tensor) -> DraftContext:
        room = [self.sampling.max_new_tokens - row.num_produced - 1 for row in self.rows]
        return DraftContext(
            sessions=self.drafts,
            unread=[self._unread(session) for session in self.drafts] if self.most else [],
            limits=tensor_on(self.device, [min(r, self.most) for r in room]),
            most=max(0, *(min(r, self.most) for r in room)),
            uniforms=uniforms[:, : self.most],
            sampling=self.draft_sampling,
            fit=self.pair.fit,
            seen=self.seen,
            end_ids=self.pair.end_ids or (),
        )

    def _unread(self, session: Session) -> tuple[Tensor, list[int]]:
        pending = [row.context[session.lengths[place] :] for place, row in enumerate(self.rows)]
        return _right_aligned(pending, session.index.device)

    def _score(self, proposal: Proposal) -> Tensor:
        """p after the context and after every node: [B, N + 1, V], one forward."""
        unread, counts = self._unread(self.target)
        tokens = torch.cat([unread, proposal.tokens.to(unread.device)], 1)
        if proposal.parents is None:
            counts = [count + proposal.num_nodes for count in counts]
        reading = self.target.extend(tokens, counts=counts, parents=proposal.parents, last=proposal.num_nodes + 1)
        return warp(reading.logits, self.sampling, self._seen_at_nodes(proposal))

    def _commit(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, started: float, drafted: float
    ) -> None:
        """Take the accepted tokens into the texts, cut caches back, end rows that are done."""
        tokens, path, extra = proposal.tokens.tolist(), verdict.path.tolist(), verdict.extra.tolist()
        facts = torch.stack([
            verdict.length, proposal.num_drafted, proposal.num_calls, verdict.bonus.long(), verdict.valid.long()
        ], 1).tolist()  # fmt: skip
        now = perf_counter()
        accepted, lengths = [], [len(row.context) for row in self.rows]
        for place, row in enumerate(self.rows):
            length, num_drafted, num_calls, bonus, valid = facts[place]
            accepted.append(length)
            if not self.busy[place]:
                continue
            new = [tokens[place][node] for node in path[place][:length]] + [extra[place]]
            kept, reason = self._cut(row, new) if valid else ([], "error")
            row.generation.token_ids += kept
            row.context += kept
            if valid:
                seconds = (drafted - started, now - drafted)
                row.generation.rounds.append(Round(num_drafted, num_calls, length, len(kept), bool(bonus), *seconds))
            else:
                row.generation.error = (
                    f"prompt {row.generation.index}: the models' laws hold values that are not numbers"
                )
            if reason:
                self._end(place, row, reason)
        self._forget(context, proposal, verdict, accepted, lengths)
        if self.seen is not None:
            self.seen = self._seen_at_start()

    def _cut(self, row: Row, new: list[int]) -> tuple[list[int], str]:
        """The produced part of a round's tokens, and why the row ends there, if it does."""
        room = self.sampling.max_new_tokens - row.num_produced
        kept, reason = new[:room], "length" if len(new) >= room else ""
        ends = [i for i, token in enumerate(kept) if token in (self.pair.end_ids or ())]
        if ends:
            kept, reason = kept[: ends[0] + 1], "end"
        if self.sampling.stop and self.pair.tokenizer is not None:
            produced = row.generation.token_ids
            if self._stop_position(produced + kept) is not None:
                first = next(i for i in range(len(kept)) if self._stop_position(produced + kept[: i + 1]) is not None)
                kept, reason = kept[: first + 1], "stop"
        return kept, reason

    def _stop_position(self, token_ids: list[int]) -> int | None:
        text = self.pair.text(token_ids)
        found = [position for stop in self.sampling.stop if (position := text.find(stop)) >= 0]
        return min(found, default=None)

    def _end(self, place: int, row: Row, reason: str) -> None:
        self.busy[place] = False
        generation = row.generation
        generation.finish_reason = reason
        generation.text = self.pair.text(generation.token_ids)
        if reason == "stop":
            generation.text = generation.text[: self._stop_position(generation.token_ids)]
        self.finish(generation)

    def _forget(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, accepted: list[int], lengths: list[int]
    ) -> None:
        """Leave in the caches what the texts hold, less their newest token."""
        if proposal.parents is None:
            self.target.truncate([length + count for length, count in zip(lengths, accepted, strict=True)])
        else:
            last = verdict.path.gather(1, (verdict.length - 1).clamp(min=0).unsqueeze(1))
            self.target.keep(torch.where(verdict.length.unsqueeze(1) > 0, last, -1))
        if self.most:
            self.method.proposer.commit(context, proposal, verdict, accepted, lengths)
        for place, row in enumerate(self.rows):
            if not self.busy[place]:  # a place without a text goes on as a text of one token that nobody reads
                row.context = row.context[:1]
                for session in (self.target, *self.drafts):
                    session.reset(place)

    # -- places ---------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Give free places to waiting prompts; without any, drop them once they are half of the batch."""
        for place in range(len(self.rows)):
            if not self.busy[place] and self.queue:
                self.rows[place], self.busy[place] = self.queue.popleft(), True
                fresh = self.method.policy.init(1, self.device)
                for key, value in fresh.items():
                    self.state[key][place] = value[0]
                if self.seen is not None:
                    self.seen = self._seen_at_start()
        busy = [place for place, is_busy in enumerate(self.busy) if is_busy]
        if busy and 2 * len(busy) <= len(self.rows) and not self.target.fixed_rows:
            self.rows, self.busy = [self.rows[place] for place in busy], [True] * len(busy)
            self.state = {key: value[busy] for key, value in self.state.items()}
            self.seen = None if self.seen is None else self.seen[busy]
            for session in (self.target, *self.drafts):
                session.select(busy)

    # -- repetition penalty ---------------------------------------------------------------------------------------

    def _seen_at_start(self) -> Tensor:
        """Tokens of each context [B, V] bool."""
        seen = torch.zeros(len(self.rows), self.pair.vocab_size, dtype=torch.bool, device=self.device)
        for place, row in enumerate(self.rows):
            seen[place, row.context] = True
        return seen

    def _seen_at_nodes(self, proposal: Proposal) -> Tensor | None:
        """Tokens of the text up to each node [B, N + 1, V] bool."""
        if self.seen is None:
            return None
        seen = [self.seen]
        batch = torch.arange(len(self.rows), device=self.device)
        for node in range(proposal.num_nodes):
            before = seen[-1]
            if proposal.parents is not None:
                before = torch.stack(seen, 1)[batch, proposal.parents[:, node] + 1]
            seen.append(before.scatter(1, proposal.tokens[:, node : node + 1], True))
        return torch.stack(seen, 1)


def _unread(session: Session, place: int, row: Row) -> int:
    return len(row.context) - session.lengths[place]


def _right_aligned(rows: list[list[int]], device: torch.device) -> tuple[Tensor, list[int]]:
    """Token lists as one block [B, U], padded in front, and their lengths."""
    counts = [len(row) for row in rows]
    width = max(counts)
    return tensor_on(device, [[0] * (width - len(row)) + row for row in rows]), counts

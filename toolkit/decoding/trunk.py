"""One text per row: chains and trees of drafted tokens behind it, of which one path is accepted.

Shapes: B places, N proposed nodes, V vocabulary.
"""

from __future__ import annotations

from time import perf_counter
from typing import cast

import torch
from torch import Tensor

from toolkit.decoding.loop import Batch, Row, right_aligned
from toolkit.decoding.proposers import DraftContext
from toolkit.sampling import warp
from toolkit.session import Session
from toolkit.transfer import tensor_on
from toolkit.types import Proposal, Round, Verdict
from toolkit.verification import TextRule


class TrunkBatch(Batch):
    """Rows whose context is one text."""

    seen: Tensor | None = None  # tokens of each context [B, V], for the repetition penalty

    def capacity(self, longest: int) -> int:
        return longest + self.sampling.max_new_tokens + self.most + 1

    def join(self, place: int) -> None:
        self.seen = self._seen_at_start() if self.sampling.repetition_penalty != 1.0 else None

    def drop(self, places: list[int]) -> None:
        self.seen = None if self.seen is None else self.seen[places]

    def unread(self, session: Session, place: int) -> list[int]:
        return self.rows[place].context[session.lengths[place] : -1]

    def draft_context(self, uniforms: Tensor) -> DraftContext:
        room = [  # places without a text draft nothing
            self.sampling.max_new_tokens - row.num_produced - 1 if busy else 0
            for row, busy in zip(self.rows, self.busy, strict=True)
        ]
        return DraftContext(
            sessions=self.drafts,
            unread=[self._unread(session) for session in self.drafts],
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
        return right_aligned(pending, session.index.device)

    def score(self, proposal: Proposal) -> Tensor:
        """p after the context and after every node: [B, N + 1, V], one forward."""
        unread, counts = self._unread(self.target)
        tokens = torch.cat([unread, proposal.tokens.to(unread.device)], 1)
        if proposal.parents is None:
            counts = [count + proposal.num_nodes for count in counts]
        reading = self.target.extend(tokens, counts=counts, parents=proposal.parents, last=proposal.num_nodes + 1)
        return warp(reading.logits, self.sampling, self._seen_at_nodes(proposal))

    def verify(self, proposal: Proposal, scores: Tensor, uniforms: Tensor) -> Verdict:
        return cast(TextRule, self.method.rule).verify(proposal, scores, uniforms)

    def commit(
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
                self.end(place, reason)
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
            if self.stop_position(row.generation, produced + kept) is not None:
                starts = (self.stop_position(row.generation, produced + kept[: i + 1]) for i in range(len(kept)))
                first = next(i for i, start in enumerate(starts) if start is not None)
                kept, reason = kept[: first + 1], "stop"
        return kept, reason

    def _forget(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, accepted: list[int], lengths: list[int]
    ) -> None:
        """Leave in the caches what the texts hold, less their newest token."""
        if proposal.parents is None:
            self.target.truncate([length + count for length, count in zip(lengths, accepted, strict=True)])
        else:
            last = verdict.path.gather(1, (verdict.length - 1).clamp(min=0).unsqueeze(1))
            self.target.keep(torch.where(verdict.length.unsqueeze(1) > 0, last, -1))
        if self.drafts:
            self.method.proposer.commit(context, proposal, verdict, accepted, lengths)
        for place, row in enumerate(self.rows):
            if not self.busy[place]:  # a place without a text goes on as a text of one token that nobody reads
                row.context = row.context[:1]
                for session in (self.target, *self.drafts):
                    session.reset(place)

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

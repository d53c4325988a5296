"""Live decoding against a replay, round by round: for temperature 0, where texts and drafts are certain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.decoding import Method, Sampling, decode
from toolkit.stopping import Bounded
from toolkit.trace.replay import replay_rounds
from toolkit.types import Generation
from toolkit.verification.rules.rejection import Rejection


def lengths_alike(
    pair: Any,
    asked: Sequence[Any],
    plain: Sequence[Generation],
    trace: Any,
    policy: Bounded,
    sampling: Sampling,
    batch_size: int,
) -> set[int]:
    """Asserts that tokens, drafted tokens, draft forwards and produced tokens are equal in every round; the draft lengths.

    plain  plain decoding's generations of `asked`, which the trace records, with the policy's head
    """
    method = Method("m", policy, Rejection(), max_drafted=policy.max_drafted)
    live = decode(pair, asked, method, sampling, batch_size=batch_size)
    replayed: list[list[tuple[int, ...]]] = [[] for _ in asked]
    for text, _, drafted, calls, _, produced in replay_rounds(trace, policy.bind(pair)):
        for number, *counts in zip(*(v.tolist() for v in (text, drafted, calls, produced)), strict=True):
            replayed[number].append(tuple(counts))
    for generation, other, rounds in zip(live, plain, replayed, strict=True):
        assert generation.token_ids == other.token_ids
        assert [(r.num_drafted, r.num_draft_calls, r.num_produced) for r in generation.rounds] == rounds
    return {one[0] for rounds in replayed for one in rounds}

"""The seconds of rounds: together they are those of the loop, and only the proposer's count for the draft."""

from __future__ import annotations

import pytest

from toolkit import config
from toolkit.decoding import Sampling, decode
from toolkit.decoding.text import TextBatch

SECONDS = {"_prefill": 1, "_uniforms": 2, "context": 4, "propose": 8, "score": 16, "verify": 32, "_refill": 64}


@pytest.fixture
def steps(monkeypatch):
    """A clock that only the loop's steps move, each by its seconds; the steps that were taken."""
    taken: list[str] = []

    def slowed(name, step):
        return lambda self, *arguments: taken.append(name) or step(self, *arguments)

    for name in SECONDS:
        monkeypatch.setattr(TextBatch, name, slowed(name, getattr(TextBatch, name)))
    monkeypatch.setattr("toolkit.decoding.batch.perf_counter", lambda: float(sum(SECONDS[name] for name in taken)))
    return taken


@pytest.mark.parametrize("method", ["autoregressive", "speculative"])
def test_what_the_loop_does_between_two_rounds_counts_for_the_target(method, table_pair, steps):
    found = decode(table_pair, [[0], [1]], config.method(method), Sampling(max_new_tokens=12), batch_size=1)
    rounds = [one for generation in found for one in generation.rounds]
    assert len(rounds) > 4 and steps.count("propose") == len(rounds)
    assert {one.draft_seconds for one in rounds} == {8.0}
    assert rounds[0].target_seconds == 1 + 2 + 4 + 16 + 32, "nothing came before the first round"
    assert {one.target_seconds for one in rounds[1:]} == {1 + 2 + 4 + 16 + 32 + 64.0}

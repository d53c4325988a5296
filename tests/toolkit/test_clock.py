"""The seconds of rounds: the proposer's count for the draft, all else for the target, but for the end of the last text."""

from __future__ import annotations

import pytest

from toolkit import config
from toolkit.decoding import Sampling
from toolkit.decoding.beams import BeamBatch
from toolkit.decoding.decode import decode_measured
from toolkit.decoding.text import TextBatch

SECONDS = {"_prefill": 1, "_uniforms": 2, "context": 4, "propose": 8, "score": 16, "verify": 32, "_refill": 64}


@pytest.fixture
def steps(monkeypatch):
    """A clock that only the loop's steps move, each by its seconds; the steps that were taken."""
    taken: list[str] = []

    def slowed(name, step):
        return lambda self, *arguments: taken.append(name) or step(self, *arguments)

    for kind in (TextBatch, BeamBatch):
        slow = {name: slowed(name, getattr(kind, name)) for name in SECONDS}
        for name, step in slow.items():
            monkeypatch.setattr(kind, name, step)
    monkeypatch.setattr("toolkit.decoding.batch.perf_counter", lambda: float(sum(SECONDS[name] for name in taken)))
    return taken


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("method", ["autoregressive", "speculative", "mtad"])
def test_what_the_loop_does_between_two_rounds_counts_for_the_target(method, timed, exact_pair, steps):
    sampling = Sampling(max_new_tokens=12)
    found = decode_measured(
        exact_pair, [[1], [2]], config.method(method), sampling, batch_size=1, timed=timed
    ).generations
    assert [len(generation.rounds) > 1 for generation in found] == [True, True]
    assert steps.count("propose") == sum(len(generation.rounds) for generation in found)
    for generation in found:
        seconds = [(one.draft_seconds, one.target_seconds) for one in generation.rounds]
        assert seconds[0] == (8, 1 + 2 + 4 + 16 + 32), "neither the texts before nor their ends"
        assert set(seconds[1:]) == {(8, 1 + 2 + 4 + 16 + 32 + 64)}

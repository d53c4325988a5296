"""Recording takes no more memory for more texts."""

from __future__ import annotations

import gc
import random
import resource
from pathlib import Path
from statistics import median

import pytest
import torch

from data_gen.recording import Recorder
from toolkit import ModelPair
from toolkit.engine import Session
from toolkit.engine.capture import StaticForward
from toolkit.engine.engine import engine_of
from toolkit.sampling import Sampling

LONGEST = 32


def texts(pair: ModelPair, rng: random.Random, count: int) -> list[tuple[list[int], list[int]]]:
    """Any tokens will do at temperature 1; lengths vary, as forwards' shapes do then."""
    ends = set(pair.end_ids)
    words = [token for token in range(10, 1000) if token not in ends]
    return [
        (
            rng.choices(words, k=rng.randint(4, 60)),
            [*rng.choices(words, k=rng.randint(4, LONGEST - 1)), min(ends)],
        )
        for _ in range(count)
    ]


def resident() -> int:
    """Resident bytes of this process now (Linux); elsewhere the most it ever had."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_recording_captures_no_forwards():
    """Shapes of recordings hardly recur."""
    made = []

    class Noted(StaticForward):
        after = 1

        def __init__(self, *arguments):
            made.append(arguments)
            super().__init__(*arguments)

    pair = ModelPair.toy()
    engine_of(pair).capture_kind = Noted
    recorder, rng = Recorder(pair, Sampling(max_new_tokens=LONGEST), 4), random.Random(0)
    recorder.record_all(texts(pair, rng, 4), range(4), 4)
    assert engine_of(pair).captures and not made


@pytest.mark.slow
def test_resident_memory_is_flat_over_texts():
    """Before: 83 kB for every text, 66 MB between the halves compared; the allocator itself swings by some 20 MB."""
    pair, rng = ModelPair.toy(), random.Random(0)
    recorder = Recorder(pair, Sampling(max_new_tokens=LONGEST), 8)
    seen = []
    for shard in range(80):
        recorder.record_all(texts(pair, rng, 16), range(16), 4)
        if shard % 4 == 3:
            gc.collect()
            seen.append(resident())
    assert median(seen[-6:]) - median(seen[2:8]) < 32 * 2**20, [round(value / 2**20) for value in seen]


@pytest.mark.parametrize("upper_bound", [False, True])
def test_long_texts_are_read_a_part_at_a_time_and_record_the_same(monkeypatch, upper_bound):
    """Sixteen positions of logits are held instead of 256, and the recording is the same."""
    pair, rng = ModelPair.toy(), random.Random(1)
    many = texts(pair, rng, 8)
    widest = []
    extend = Session.extend

    def noted(session, tokens, **options):
        reading = extend(session, tokens, **options)
        widest.append(reading.logits.numel())
        return reading

    monkeypatch.setattr(Session, "extend", noted)

    def record():
        widest.clear()
        recorder = Recorder(pair, Sampling(max_new_tokens=LONGEST, repetition_penalty=1.1), 4, upper_bound=upper_bound)
        return recorder.record(many, range(8)), max(widest)

    whole, most = record()
    monkeypatch.setattr("data_gen.recording.LOGITS", 16 * pair.vocab_size)
    parts, fewer = record()
    assert fewer == 16 * pair.vocab_size < most / 8
    for name, column in vars(whole).items():
        other = getattr(parts, name)
        if isinstance(column, torch.Tensor):
            torch.testing.assert_close(other, column, rtol=2e-3, atol=1e-5, equal_nan=True, msg=name)

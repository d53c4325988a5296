"""Jobs in a relay: one at a time, in turn, each with its own watch. An error of one does not stop the others."""

from __future__ import annotations

import pytest

from benchmarks import relay as module
from benchmarks.relay import Watch, relay


def counting(name, steps, seen):
    def run(watch: Watch) -> int:
        for step in range(steps):
            seen.append((name, step))
            watch.pass_on()
        return steps

    return run


def test_jobs_take_turns_until_each_has_ended():
    seen: list[tuple[str, int]] = []
    assert relay({name: counting(name, steps, seen) for name, steps in (("a", 3), ("b", 1), ("c", 2))}) == {
        "a": 3,
        "b": 1,
        "c": 2,
    }
    assert seen == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("c", 1), ("a", 2)]
    assert relay({}) == {}


def test_a_watch_stands_still_while_its_job_waits(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    def working(seconds):
        def run(watch: Watch) -> list[float]:
            found = []
            for _ in range(3):
                now[0] += seconds
                found.append(watch.seconds)
                watch.pass_on()
            return found

        return run

    assert relay({"a": working(1.0), "b": working(10.0)}) == {"a": [1.0, 2.0, 3.0], "b": [10.0, 20.0, 30.0]}


def test_an_error_is_raised_when_the_others_have_ended():
    seen: list[tuple[str, int]] = []

    def failing(watch: Watch) -> int:
        watch.pass_on()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        relay({"a": failing, "b": counting("b", 4, seen)})
    assert seen == [("b", step) for step in range(4)]

"""Jobs that take turns on one machine: each goes on for a short time, then hands over to the next.

A machine that others share changes its speed from second to second. Jobs that run one behind the other then differ by
chance. Jobs that take turns every few milliseconds are slowed down alike. Each job runs in a thread of its own, one at a
time, and has a watch that stands still while it waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from time import perf_counter
from typing import TypeVar

import torch

T = TypeVar("T")


class Watch:
    """What a job is given: the seconds that it has run for, and a way to let the others go on."""

    def __init__(self, line: deque[Watch]):
        self.line, self.turn = line, Semaphore(0)
        self.before, self.started = 0.0, 0.0

    @property
    def seconds(self) -> float:
        """For which the job has run so far. Only the job itself may ask."""
        return self.before + perf_counter() - self.started

    def wait(self) -> None:
        """Go on when it is this job's turn."""
        self.turn.acquire()
        self.started = perf_counter()

    def pass_on(self) -> None:
        """The others' turns, until it is this job's again."""
        self.before = self.seconds
        self.line.append(self)
        self.line.popleft().turn.release()
        self.wait()

    def leave(self) -> None:
        """The job has ended."""
        if self.line:
            self.line.popleft().turn.release()


def relay(jobs: Mapping[str, Callable[[Watch], T]]) -> dict[str, T]:
    """The jobs' values. They go on in this order, whenever one calls `pass_on`.

    Raises what a job raised, when all have ended.
    """
    if not jobs:
        return {}
    line: deque[Watch] = deque()
    watches = {name: Watch(line) for name in jobs}
    threads = torch.get_num_threads()

    def run(name: str) -> T:
        torch.set_num_threads(threads)  # of this thread
        watches[name].wait()
        try:
            return jobs[name](watches[name])
        finally:
            watches[name].leave()

    with ThreadPoolExecutor(len(jobs)) as pool:
        line.extend(watches.values())
        futures = {name: pool.submit(run, name) for name in jobs}
        line.popleft().turn.release()
    return {name: future.result() for name, future in futures.items()}

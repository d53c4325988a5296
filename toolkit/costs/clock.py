"""Clocks: seconds of single calls, and of whole windows, on a device that works while the host goes on."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter, thread_time
from typing import Any

import torch


def now(devices: Iterable[torch.device | str]) -> float:
    """Seconds on the host's clock, once these devices have done what was queued."""
    for device in map(torch.device, devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return perf_counter()


class Stopwatch:
    """Context manager around single calls on one device; every `with` adds a measurement.

    On CUDA the device itself measures, between two events: calls are launched back to back, and nobody waits in between.
    With one thread on a CPU it counts that thread's CPU seconds, so that other programs on the machine do not lengthen a call.
    """

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self._clock = thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter
        self._measured: list[tuple[Any, Any]] = []

    @property
    def seconds(self) -> list[float]:
        """Seconds of every call so far."""
        if self.on_gpu:
            torch.cuda.synchronize()
            return [start.elapsed_time(end) / 1e3 for start, end in self._measured]
        return [end - start for start, end in self._measured]

    def __enter__(self) -> Stopwatch:
        self._started = self._moment()
        return self

    def __exit__(self, *_: object) -> None:
        self._measured.append((self._started, self._moment()))

    def _moment(self) -> Any:
        if not self.on_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

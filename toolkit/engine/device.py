"""Between host and device without making one wait for the other."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.files.text import first_line


def check_device(name: str) -> None:
    """Raises InputError unless numbers can be kept on this device, and read from it."""
    try:
        torch.ones(1, device=name).item()
    except Exception as error:  # of whatever stands between torch and the device
        names = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        names += ["mps"] if torch.backends.mps.is_available() else []
        raise InputError(
            f"device: expected one that is here ({', '.join(names)}), got {name}: {first_line(error)}"
        ) from None


def tensor_on(device: torch.device, values: Any) -> Tensor:
    """Whole numbers as a tensor on a device; to a GPU they are copied after the work already launched there."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.long, device=device)
    return torch.tensor(values, dtype=torch.long, device="cpu").pin_memory().to(device, non_blocking=True)


def floats_on(device: torch.device, values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Real numbers as a tensor on a device; to a GPU they are copied as in `tensor_on`."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return copied_to(device, torch.tensor(values, dtype=dtype, device="cpu"))


def copied_to(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor of the host on a device; a GPU copies it while the host goes on."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Gate:
    """Asks, step by step, whether any row goes on, and waits for old answers only.

    On a GPU the answer to the newest question is still being computed when the next step could be launched. Waiting for
    it would leave the device idle once per step. Instead the answer of `ahead` steps before decides. At most that many
    steps per round are launched and not used. On CPUs `ahead` is 0: every answer is there at once.
    """

    def __init__(self, device: torch.device, ahead: int | None = None):
        self.on_gpu = device.type == "cuda"
        self.ahead = ahead if ahead is not None else int(self.on_gpu)
        self.pending: deque[tuple[Tensor, Any]] = deque()
        self.num_open = 0  # leading questions that were answered with yes

    def passes(self, going: Tensor, now: bool = False) -> bool:
        """Add the question whether any of `going` (bool) is true; False once a question was answered with no.

        now  wait for the answer to this question, too
        """
        self.pending.append(self._on_its_way(going.any()))
        if now:
            return all(self._goes_on() for _ in range(len(self.pending)))
        return len(self.pending) <= self.ahead or self._goes_on()

    def settle(self) -> int:
        """Wait for all answers; how many of the questions, from the first on, were answered with yes."""
        while self.pending and self._goes_on():
            pass
        return self.num_open

    def largest(self, counts: Tensor) -> int:
        """Wait for the largest of some counts: the last question of a round, after which no other answer is needed."""
        self.pending.clear()
        return self._answer(*self._on_its_way(counts.max()))

    def _on_its_way(self, value: Tensor) -> tuple[Tensor, Any]:
        """A value [] on the host, and the event after which it is there."""
        if not self.on_gpu:
            return value, None
        copy = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return copy, event

    def _goes_on(self) -> bool:
        if self._answer(*self.pending.popleft()):
            self.num_open += 1
            return True
        self.pending.clear()
        return False

    @staticmethod
    def _answer(value: Tensor, event: Any) -> int:
        if event is not None:
            event.synchronize()
        return int(value)


def most_of(counts: Tensor, bound: int, least: int = 1) -> int:
    """The largest of some counts, or `least`, where the host knows it without waiting; on a GPU their upper bound."""
    return bound if counts.device.type == "cuda" else max(int(counts.max()), least)

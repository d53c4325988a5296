"""How often a model's forward runs, on how many tokens, and how long it takes. For any code that calls the model."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import Any

import torch


class ForwardMeter:
    """Context manager around a transformers model.

    calls    forwards so far
    tokens   positions they computed, padding included
    seconds  wall-clock seconds inside them; on CUDA only with `synchronize`, which slows what it measures
    """

    def __init__(self, model: Any, synchronize: bool = False):
        self.model, self.synchronize = model, synchronize and model.device.type == "cuda"
        self.calls = self.tokens = 0
        self.seconds = 0.0

    def __enter__(self) -> ForwardMeter:
        self._hooks = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        self.calls += 1
        self.tokens += ids.numel()
        self._started = self._now()

    def _after(self, module: Any, args: Any, output: Any) -> None:
        self.seconds += self._now() - self._started

    def _now(self) -> float:
        if self.synchronize:
            torch.cuda.synchronize()
        return perf_counter()

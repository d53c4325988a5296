"""How often a model's forward runs, on how many tokens, and how long it takes. For any code that calls the model."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import Any

import torch

from toolkit.session.hf import HFSession


class ForwardMeter:
    """Context manager around a transformers model. Replays of its captured forwards count as forwards.

    calls    forwards so far
    tokens   positions they computed, padding included
    seconds  wall-clock seconds inside them; on CUDA only with `synchronize`, which slows what it measures
    """

    def __init__(self, model: Any, synchronize: bool = False):
        self.model, self.synchronize = model, synchronize and model.device.type == "cuda"
        self.calls = self.tokens = 0
        self.seconds = 0.0
        self._replaying = False

    def __enter__(self) -> ForwardMeter:
        self._replay = replay = HFSession.replay

        def metered(session: HFSession, inputs: Any, *args: Any) -> Any:
            if session.model is not self.model:
                return replay(session, inputs, *args)
            self._before(None, inputs, {})
            self._replaying = True
            try:
                return replay(session, inputs, *args)
            finally:
                self._replaying = False
                self._after(None, None, None)

        HFSession.replay = metered  # type: ignore[method-assign]
        self._hooks = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        HFSession.replay = self._replay  # type: ignore[method-assign]
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if self._replaying:  # the model's own forward, called by a replay that is counted already
            return
        ids = args[0] if args else kwargs["input_ids"]
        self.calls += 1
        self.tokens += ids.numel()
        self._started = self._now()

    def _after(self, module: Any, args: Any, output: Any) -> None:
        if self._replaying:
            return
        self.seconds += self._now() - self._started

    def _now(self) -> float:
        if self.synchronize:
            torch.cuda.synchronize()
        return perf_counter()

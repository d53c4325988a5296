"""Ways to decode that benchmarks compare, `transformers`' own `generate` among them, and a meter of their forwards.

Needs torch and transformers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from toolkit.api import generate
from toolkit.costs.clock import now
from toolkit.decoding import Method
from toolkit.engine.capture import Captures, GraphForward, StaticForward
from toolkit.engine.engine import engine_of
from toolkit.engine.hf import HFSession
from toolkit.models.pair import ModelPair

UNCAPTURED = {"cuda_graphs": "off"}
# pair, prompts, max_new_tokens, seed, temperature -> new tokens of each prompt
Run = Callable[[ModelPair, list[list[int]], int, int, float], list[list[int]]]


@dataclass(frozen=True)
class Decoder:
    """A way to decode. batched: whether it takes several prompts at once."""

    name: str
    run: Run
    batched: bool = True


def engine(name: str, method: Callable[[ModelPair], Method]) -> Decoder:
    """A method of this engine through the public entry; built once per pair, as one who decodes a lot would."""
    built: dict[int, Method] = {}

    def run(
        pair: ModelPair, prompts: list[list[int]], max_new_tokens: int, seed: int, temperature: float
    ) -> list[list[int]]:
        if id(pair) not in built:
            built[id(pair)] = method(pair)
        limits = {"max_new_tokens": max_new_tokens, "batch_size": len(prompts)}
        generations = generate(pair, prompts, built[id(pair)], seed=seed, temperature=temperature, **limits)
        return [list(generation.token_ids) for generation in generations]

    return Decoder(name, run)


def with_options(pair: ModelPair, **options: str) -> ModelPair:
    """The same models in a pair with captures and caches of its own, and other options."""
    return replace(pair, draft=None, options=replace(pair.options, **options))


def theirs(
    name: str, assistant: Callable[[ModelPair], Any] | None = None, lookup: int | None = None, **settings: Any
) -> Decoder:
    """`transformers` generate: alone, assisted if there is an assistant or a setting of one, or with prompt lookup.

    assistant  makes what is passed as `assistant_model`; the draft if there are only settings
    lookup     tokens that prompt lookup copies
    settings   of the draft's generation config: `num_assistant_tokens`, ...
    """
    helpers: dict[int, Any] = {}

    def run(
        pair: ModelPair, prompts: list[list[int]], max_new_tokens: int, seed: int, temperature: float
    ) -> list[list[int]]:
        torch.manual_seed(seed)
        options: dict[str, Any] = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}
        if assistant or settings:
            if id(pair) not in helpers:
                helpers[id(pair)] = assistant(pair) if assistant else pair.draft
            options["assistant_model"] = helpers[id(pair)]
            for key, value in settings.items():
                setattr(pair.draft.generation_config, key, value)
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=pair.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=pair.device)
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        sampled = sampled if temperature else {"do_sample": False}
        output = pair.target.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, **sampled, **options
        )
        return [_until_end(row[width:].tolist(), pair.end_ids or ()) for row in output]

    return Decoder(name, run, batched=not (assistant or settings or lookup))


def constant(num_tokens: int) -> dict[str, Any]:
    """What makes an assistant of `transformers` draft the same number of tokens in every round."""
    return {
        "num_assistant_tokens": num_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))]


# -- captures of forwards ----------------------------------------------------------------------------------------------


def capture_kind(device: torch.device) -> type[StaticForward]:
    """CUDA graphs; elsewhere all of them but the graph: static inputs and buffers."""
    return GraphForward if device.type == "cuda" else StaticForward


def captures(device: torch.device) -> Captures:
    """Empty captures of that kind."""
    return Captures(capture_kind(device))


def capturing(pair: ModelPair) -> ModelPair:
    """The same models, with captures of their own."""
    again = with_options(pair)
    engine_of(again).capture_kind = capture_kind(pair.device)
    return again


def eager(pair: ModelPair) -> ModelPair:
    """The same models, every forward run as it is."""
    return with_options(pair, **UNCAPTURED)


def held_sessions(pair: ModelPair) -> list[Any]:
    """The sessions that the pair's engine keeps for calls to come: the target's first."""
    return [session for sessions in engine_of(pair).idle for session in sessions.every]


def refusals(pair: ModelPair) -> list[str]:
    """Why forwards could not be captured in the calls so far; empty if they could."""
    captures = [session.captures for session in held_sessions(pair) if session.captures is not None]
    return [reason for held in captures for reason in held.refusals]


# -- the meter -----------------------------------------------------------------------------------------------------------


class ForwardMeter:
    """Context manager around a transformers model. Replays of its captured forwards count as forwards.

    calls    forwards so far
    tokens   positions they computed, padding included
    widths   tokens per row of each, padding included
    seconds  wall-clock seconds inside them; on CUDA only with `synchronize`, which slows what it measures
    on_forward  called after each
    """

    def __init__(self, model: Any, synchronize: bool = False, on_forward: Callable[[], object] = lambda: None):
        self.on_forward = on_forward
        self.model, self.synchronized = model, [model.device] if synchronize else []
        self.calls = self.tokens = 0
        self.widths: list[int] = []
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
        self.widths.append(ids.shape[1])
        self._started = now(self.synchronized)

    def _after(self, module: Any, args: Any, output: Any) -> None:
        if self._replaying:
            return
        self.seconds += now(self.synchronized) - self._started
        self.on_forward()

"""Ways to decode that benchmarks let run against each other, and `transformers`' own `generate` among them.

Needs torch and transformers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from toolkit.api import generate
from toolkit.decoding import Method
from toolkit.pair import ModelPair
from toolkit.session.packing import PackedLinears

UNCAPTURED = {"cuda_graphs": "off"}
Run = Callable[[ModelPair, list[list[int]], int, int], int]  # pair, prompts, max_new_tokens, seed -> new tokens


@dataclass(frozen=True)
class Contender:
    """A way to decode. batched: whether it takes several prompts at once."""

    name: str
    run: Run
    batched: bool = True


def engine(name: str, method: Callable[[ModelPair], Method], **options: str) -> Contender:
    """A method of this engine through the public entry; built once per pair, as one who decodes a lot would.

    options  of the pair that differ from the given one's: cuda_graphs="off", cpu_packing="off", ...
    """
    built: dict[int, tuple[ModelPair, Method]] = {}

    def run(pair: ModelPair, prompts: list[list[int]], max_new_tokens: int, seed: int) -> int:
        if id(pair) not in built:
            built[id(pair)] = (with_options(pair, **options) if options else pair, method(pair))
        used, chosen = built[id(pair)]
        generations = generate(used, prompts, chosen, max_new_tokens=max_new_tokens, seed=seed, batch_size=len(prompts))
        return sum(len(generation.token_ids) for generation in generations)

    return Contender(name, run)


def with_options(pair: ModelPair, **options: str) -> ModelPair:
    """The same models in a pair with captures and caches of its own, and other options."""
    return replace(pair, draft=None, options=replace(pair.options, **options))


def theirs(name: str, packed: bool = False, **assistant: Any) -> Contender:
    """`transformers` generate; with keyword arguments: assisted by the draft, whose generation config takes them.

    packed  both models' large layers multiply by packed weights, as this engine's do: not what transformers offers
    """
    packings: dict[int, list[PackedLinears]] = {}

    def run(pair: ModelPair, prompts: list[list[int]], max_new_tokens: int, seed: int) -> int:
        torch.manual_seed(seed)
        options: dict[str, Any] = {}
        if assistant:
            options["assistant_model"] = pair.draft
            for key, value in assistant.items():
                setattr(pair.draft.generation_config, key, value)
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=pair.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=pair.device)
        if packed and id(pair) not in packings:
            packings[id(pair)] = [PackedLinears(model) for model in (pair.target, pair.draft)]
        with ExitStack() as stack:
            for packing in packings.get(id(pair), []):
                stack.enter_context(packing)
            output = pair.target.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max_new_tokens,
                **options,
            )
        return sum(_num_new(row[width:].tolist(), pair.end_ids or ()) for row in output)

    return Contender(name, run, batched=not assistant)


def constant(num_tokens: int) -> dict[str, Any]:
    """What makes an assistant of `transformers` draft the same number of tokens in every round."""
    return {
        "num_assistant_tokens": num_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def _num_new(tokens: list[int], ends: Sequence[int]) -> int:
    return next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))

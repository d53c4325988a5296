"""Pairs and captures for the checks on a device."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.contenders import UNCAPTURED, with_options
from tests.tiny_models import tiny_llama
from toolkit.pair import ModelPair
from toolkit.session import TabularModel
from toolkit.session.capture import Captures, GraphForward, StaticForward


def captures(device: torch.device) -> Captures:
    """CUDA graphs; elsewhere all of them but the graph: static inputs and buffers."""
    return Captures(GraphForward if device.type == "cuda" else StaticForward)


def capturing(pair: ModelPair) -> ModelPair:
    """The same models, with captures of their own."""
    again = with_options(pair)
    again.captures = [captures(pair.device) for _ in (again.target, *again.drafts)]
    return again


def eager(pair: ModelPair) -> ModelPair:
    """The same models, every forward run as it is."""
    return with_options(pair, **UNCAPTURED)


def held_sessions(pair: ModelPair) -> list[Any]:
    """The sessions that the pair keeps for calls to come: the target's first."""
    return [session for target, drafts in pair.idle for session in (target, *drafts)]


def refusals(pair: ModelPair) -> list[str]:
    """Why forwards could not be captured in the calls so far; empty if they could."""
    return [session.captures.refused for session in held_sessions(pair) if session.captures.refused]


def tiny_pair(device: torch.device, dtype: torch.dtype = torch.float64) -> ModelPair:
    """Random Llamas, the same numbers on every device."""
    target, draft = tiny_llama(32, 3, 0, dtype), tiny_llama(16, 2, 1, dtype)
    return eager(ModelPair(target=target.to(device), draft=draft.to(device)))


def table_pair(device: torch.device) -> ModelPair:
    """Tables over three tokens in float64; token 2 ends a text."""
    generator = torch.Generator().manual_seed(3)
    tables = [TabularModel.random(3, 2, generator, sharpness=1.2) for _ in range(2)]
    target, draft = (TabularModel(model.probs.to(device), device) for model in tables)
    return ModelPair(target=target, draft=draft, end_ids=(2,))


def ragged_prompts(count: int, vocab_size: int = 97) -> list[list[int]]:
    """Token ids of very different lengths."""
    generator = torch.Generator().manual_seed(7)
    lengths = [(3, 9, 1, 12, 22, 4, 6)[i % 7] for i in range(count)]
    return [torch.randint(6, vocab_size, (n,), generator=generator).tolist() for n in lengths]

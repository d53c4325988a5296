"""Pairs and captures for the checks on a device."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.decoders import UNCAPTURED, with_options
from toolkit.engine import engine_of
from toolkit.pair import ModelPair
from toolkit.session.capture import Captures, GraphForward, StaticForward
from toolkit.testing import llama_pair


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
    return [session.captures.refused for session in held_sessions(pair) if session.captures.refused]


def tiny_pair(device: torch.device) -> ModelPair:
    """Random Llamas in float64, the same numbers on every device."""
    return eager(llama_pair(device))

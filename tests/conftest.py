"""Small models and pairs that many tests share."""

from __future__ import annotations

import os

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import pytest
import torch

from tests.tiny_checkpoints import checkpoints  # noqa: F401
from tests.tiny_models import tiny_llama
from tests.tiny_stages import tiny_mix, tiny_overrides, tiny_pair, tiny_responses  # noqa: F401
from toolkit import ModelPair
from toolkit.acceptance import AcceptanceHead, PrereadHead
from toolkit.session import TabularModel


@pytest.fixture(scope="session")
def exact_pair(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    """Random Llamas in float64 (equal computations are equal), with a random acceptance head and a pre-read head."""
    pair = ModelPair(target=tiny_llama(32, 3, 0, torch.float64), draft=tiny_llama(16, 2, 1, torch.float64))
    folder = tmp_path_factory.mktemp("exact") / "head"
    torch.manual_seed(0)
    AcceptanceHead(16).save(folder)
    PrereadHead(16, 16, width=8).save(folder)
    pair.head = str(folder)
    return pair


@pytest.fixture(scope="session")
def table_pair(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    """Tables over 3 tokens in float64, with a random acceptance head of their own; token 2 ends a text."""
    generator = torch.Generator().manual_seed(3)
    target, draft = (TabularModel.random(3, 2, generator, sharpness=1.2) for _ in range(2))
    torch.manual_seed(1)
    folder = AcceptanceHead(3**2).save(tmp_path_factory.mktemp("table") / "head")
    return ModelPair(target=target, draft=draft, end_ids=(2,), head=str(folder))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids of very different lengths."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(6, 97, (n,), generator=generator).tolist() for n in (3, 9, 1, 12, 22, 4, 6)]


@pytest.fixture(scope="session")
def toy_prompt() -> tuple[ModelPair, str]:
    """The embedded pair and a prompt of its own."""
    return ModelPair.toy(), "Q: Repeat coral 5 times.\nA:"

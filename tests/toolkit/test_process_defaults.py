"""Tokens do not depend on where, and in which number format, the process makes tensors by default."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from tests.methods import others_slow
from toolkit import ModelPair, config, generate
from toolkit.engine import selfcheck
from toolkit.models.fingerprint import Weights
from toolkit.stopping.adaedl import AdaEdl
from toolkit.testing import llama_pair, ragged_prompts, random_heads, tiny_model
from toolkit.verification import get

METHODS = config.choices("method")
DEFAULTS = ("meta", torch.bfloat16)  # what is made on no device of its own fails at once


@contextmanager
def defaults(device, dtype):
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    pair, heads = llama_pair(dtype=torch.float32), random_heads(tmp_path_factory.mktemp("heads") / "head", 16, 16)
    return {"target": pair.target, "draft": pair.draft, "head": str(heads)}


@pytest.mark.parametrize("method", others_slow(METHODS))
def test_every_method_gives_the_same_tokens(method, models):
    prompts = ragged_prompts(3)

    def tokens():
        """Heads are loaded again: the pair is another one. More prompts than slots: rows are refilled."""
        generations = generate(ModelPair(**models), prompts, method, max_new_tokens=5, batch_size=2)
        assert all(generation.error is None for generation in generations)
        return [(generation.token_ids, generation.scores) for generation in generations]

    expected = tokens()
    with defaults(*DEFAULTS):
        assert tokens() == expected


def test_architectures_are_tried_and_weights_are_identified(monkeypatch, tmp_path):
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny_model("llama")
    expected = Weights.of(model)
    with defaults(*DEFAULTS):
        selfcheck.check_architecture(model)
        copy = type(model)(model.config).to_empty(device="cpu").float()  # a model that nothing is remembered of
        copy.load_state_dict(model.state_dict())
        assert Weights.of(copy) == expected


def test_shares_of_whole_numbers_keep_their_precision():
    p, q = torch.rand(2, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    drafted, length = torch.tensor([7]), torch.tensor([3])
    policy = AdaEdl()

    def results():
        verdict = type("Verdict", (), {"length": length, "num_drafted": drafted})
        rate = policy.observe(verdict, verdict, policy.init(1, torch.device("cpu")))["rate"]
        _, residual = get("spectr").distribution(p, q.expand(3, -1), length.expand(3))
        return rate, residual

    expected = results()
    with defaults(*DEFAULTS):
        for value, other in zip(results(), expected, strict=True):
            assert torch.equal(value, other)

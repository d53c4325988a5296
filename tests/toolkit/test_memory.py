"""Memory: distributions over a large vocabulary are never there for all positions, and what does not fit is refused first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from analysis.quality.perplexity import negative_log_likelihoods
from data_gen.mix import mix_batch
from toolkit import ModelPair
from toolkit.drafts.separate import costs
from toolkit.errors import InputError
from toolkit.files import machine
from toolkit.models import gguf, teacher
from toolkit.models.pair import load_draft
from toolkit.sampling import Sampling
from toolkit.testing import VOCAB, tiny_model
from toolkit.trace.bounds import acceptance_probs
from toolkit.types import Generation

LENGTHS = (9, 3, 14, 5, 8, 2)
MOST = 16 * VOCAB  # logits; one text has 14


class OverVocabulary(TorchDispatchMode):
    """Notes the most numbers over the vocabulary that an operation writes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and result.dim() > 1 and result.shape[-1] == VOCAB:
            self.most = max(self.most, result.numel())
        return result


@pytest.fixture(scope="module")
def pair():
    return ModelPair(target=tiny_model("llama"), draft=tiny_model("qwen2"), end_ids=())


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(0)
    return [([1, 2, 3], torch.randint(VOCAB, (n,), generator=generator).tolist()) for n in LENGTHS]


def generations(texts):
    return [Generation(i, prompt, produced) for i, (prompt, produced) in enumerate(texts)]


CONSUMERS = {
    "readings": lambda pair, texts: [
        reading.draft_probs() for reading in teacher.readings_along(pair, texts, Sampling(), num_drafts=1)
    ],
    "oracle": lambda pair, texts: acceptance_probs(pair, texts, Sampling()),
    "mix": lambda pair, texts: [
        each.labels
        for each in mix_batch(
            pair, [{"row": i, "prompt_ids": a, "token_ids": b} for i, (a, b) in enumerate(texts)], Sampling(), 0.2, 0
        )
    ],
    "perplexity": lambda pair, texts: negative_log_likelihoods(pair, generations(texts)),
    "layers": lambda pair, texts: list(costs.absence_costs(pair.target, texts)),
}


@pytest.mark.parametrize("name", CONSUMERS)
def test_a_bound_in_tokens_changes_no_figure(name, pair, texts, monkeypatch):
    expected = CONSUMERS[name](pair, texts)
    for module in (teacher, costs):
        monkeypatch.setattr(module, "LOGITS", MOST)
    with OverVocabulary() as written:
        figures = CONSUMERS[name](pair, texts)
    assert 0 < written.most <= MOST < sum(LENGTHS) * VOCAB
    for ours, theirs in zip(figures, expected, strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-6)


def test_texts_are_taken_together_as_far_as_the_bound_goes(monkeypatch):
    monkeypatch.setattr(teacher, "LOGITS", 100)
    parts = [(part.start, part.stop) for part in teacher.bounded([4, 5, 1, 12, 3, 7], 10)]
    assert parts == [(0, 3), (3, 4), (4, 6)]
    assert list(teacher.bounded([], 10)) == []


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(tmp_path, monkeypatch):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(machine, "available_memory", lambda: 1000)
    with pytest.raises(InputError, match=r"model in float32 takes .* GB of memory, .* free: .*pair.dtype=bfloat16"):
        load_draft(tmp_path / "model")
    with pytest.raises(InputError, match=r"model in bfloat16 takes .*: expected a smaller model"):
        load_draft(tmp_path / "model", dtype="bfloat16")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell what is mapped")
def test_a_checkpoint_that_is_mapped_is_not_free(tmp_path, monkeypatch):
    save_file({"weight": torch.zeros(10**6)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(machine, "_facts", lambda path: {"MemAvailable": "1000000 kB"})
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    before = machine.available_memory()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        weight = file.get_tensor("weight")
        assert before - machine.available_memory() == pytest.approx(weight.nbytes, abs=2**16)


@pytest.mark.parametrize("lacking", ["memory", "disk"])
def test_a_conversion_without_room_is_refused_before_it_begins(lacking, tmp_path, monkeypatch):
    path = gguf.write(tmp_path / "toy.gguf", *(getattr(ModelPair.toy(), name) for name in ("draft", "tokenizer")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if lacking == "memory":
        monkeypatch.setattr(machine, "available_memory", lambda: 1000)
    else:
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match=r"float32 takes .* GB"):
        gguf.folder_of(path)

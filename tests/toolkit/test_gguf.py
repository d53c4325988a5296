"""GGUF files: written and read again they give the same logits; what cannot be read is one line."""

from __future__ import annotations

import sys

import pytest
import torch

from toolkit import ModelPair, generate
from toolkit.config.identity import contents_of
from toolkit.errors import InputError
from toolkit.models import gguf
from toolkit.testing import tiny_llama, tiny_model

pytest.importorskip("gguf")


@pytest.fixture
def toy_file(tmp_path, monkeypatch):
    """The toy target (grouped heads) as GGUF, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pair = ModelPair.toy()
    return gguf.write(tmp_path / "toy.gguf", pair.target, pair.tokenizer)


def test_what_was_written_is_read_with_the_same_logits_and_tokens(toy_file):
    pair, toy = ModelPair.from_pretrained(toy_file), ModelPair.toy()
    ids = torch.randint(3, 1000, (2, 30), generator=torch.Generator().manual_seed(0))
    assert torch.equal(pair.target(ids).logits, toy.target(ids).logits)
    assert (pair.name, pair.end_ids, pair.max_length) == ("toy", toy.end_ids, toy.max_length)
    assert pair.tokenizer.get_vocab() == toy.tokenizer.get_vocab()
    text = "Tom has a red ball."
    assert pair.tokenizer(text).input_ids == toy.tokenizer(text).input_ids
    (ours,), (theirs,) = (generate(p, [text], "autoregressive", max_new_tokens=12, temperature=0) for p in (pair, toy))
    assert ours.token_ids == theirs.token_ids


def test_a_file_is_converted_once_and_named_by_its_content(toy_file, tmp_path, capsys):
    first = gguf.folder_of(toy_file)
    moved = toy_file.rename(tmp_path / "moved.gguf")
    assert gguf.folder_of(moved) == first
    assert capsys.readouterr().err.count("float32 weights in") == 1
    identity = [contents_of({"pair": {"target": str(moved)}}, "decode").identity["pair"]["target"]]
    moved.write_bytes(moved.read_bytes() + b"\0")
    identity.append(contents_of({"pair": {"target": str(moved)}}, "decode").identity["pair"]["target"])
    assert all(content.startswith("sha256:") for content in identity) and identity[0] != identity[1]


def test_the_description_of_a_tokenizer_is_copied_from_another_file(toy_file, tmp_path):
    from gguf import GGUFReader

    small = tiny_llama(32, 1, 0, torch.float32, vocab_size=1024)
    path = gguf.write(tmp_path / "small.gguf", small, None, like=toy_file)
    ours, theirs = (
        {k: f.contents() for k, f in GGUFReader(p).fields.items() if k[:9] == "tokenizer"} for p in (path, toy_file)
    )
    assert ours == theirs


def test_what_cannot_be_read_or_written_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(InputError, match="transformers could not read") as error:
        ModelPair.from_pretrained(damaged)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").rglob("config.json"))
    with pytest.raises(InputError, match="found none"):
        ModelPair.from_pretrained(tmp_path / "absent.gguf")
    with pytest.raises(InputError, match="of a LlamaForCausalLM, got GPT2LMHeadModel"):
        gguf.write(tmp_path / "words.gguf", tiny_model("gpt2"), None)
    assert not (tmp_path / "words.gguf").exists()
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs gguf and accelerate: pip install 'acceptance-toolkit\[gguf\]'"):
        ModelPair.from_pretrained(damaged)

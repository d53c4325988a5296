"""Tiny models and tokenizers as local checkpoint folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_models import tiny_llama


def tiny_tokenizer(words: str = "the cat sat on a mat and the dog ran to it"):
    """A byte-level tokenizer with a few merges, and the special tokens of the toy pair."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<|pad|>", "<|begin|>", "<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([words] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")


def save_checkpoint(folder: Path, hidden_size: int, seed: int, words: str | None = None) -> Path:
    """A tiny model with its tokenizer, as a local folder."""
    tokenizer = tiny_tokenizer() if words is None else tiny_tokenizer(words)
    model = tiny_llama(hidden_size, 2, seed, torch.float32, vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = model.config.eos_token_id = 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny target and a tiny draft over one tokenizer."""
    root = tmp_path_factory.mktemp("pair")
    return save_checkpoint(root / "target", 32, 0), save_checkpoint(root / "draft", 16, 1)

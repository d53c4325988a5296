"""A tiny random pair on disk with its tokenizer, and what responses and mix make of it: fixtures for the stages."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 53
SPECIAL = ["<pad>", "<begin>", "<end>", "<unk>"]


def tiny_model(hidden_size, seed, vocab_size=VOCAB_SIZE):
    """A random Llama whose laws are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.6,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def tiny_tokenizer():
    """Words w0, w1, ... as tokens."""
    words = [*SPECIAL, *(f"w{i}" for i in range(VOCAB_SIZE - len(SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<begin>", "eos_token": "<end>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory):
    """Folder with target/ and draft/: random Llamas of hidden sizes 24 and 16."""
    folder = tmp_path_factory.mktemp("pair")
    for name, hidden_size, seed in (("target", 24, 1), ("draft", 16, 2)):
        tiny_model(hidden_size, seed).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def tiny_overrides(tiny_pair):
    """Hydra overrides that choose the tiny pair."""
    return [f"pair.target={tiny_pair}/target", f"pair.draft={tiny_pair}/draft"]


@pytest.fixture(scope="session")
def tiny_responses(tiny_overrides, tmp_path_factory):
    """A responses folder: 60 prompts of 3 to 7 tokens, responses of at most 17, warped."""
    from data_gen.responses import run
    from toolkit.config import compose

    folder = tmp_path_factory.mktemp("responses")
    prompts = [" ".join(f"w{(7 * i + 3 * j) % 40}" for j in range(3 + i % 5)) for i in range(60)]
    lines = [json.dumps({"id": i, "prompt": prompt}) + "\n" for i, prompt in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    overrides = [
        *tiny_overrides, "prompts=jsonl", f"prompts.path={folder}/prompts.jsonl", "sampling.max_new_tokens=17",
        "sampling.temperature=0.9", "sampling.top_k=20", f"paths.output_dir={folder}/responses",
    ]  # fmt: skip
    return run(compose("responses", overrides))


@pytest.fixture(scope="session")
def tiny_mix(tiny_overrides, tiny_responses, tmp_path_factory):
    """A data_gen.mix folder of the tiny responses: 47 training and 13 validation rows (some prompts occur twice)."""
    from data_gen.mix import run
    from toolkit.config import compose

    folder = tmp_path_factory.mktemp("mix")
    overrides = [
        *tiny_overrides, f"responses={tiny_responses}", "validation_fraction=0.2", f"paths.output_dir={folder}/mix",
    ]  # fmt: skip
    return run(compose("mix", overrides))

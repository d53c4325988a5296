"""Tiny random models of many families, and the slow and obvious ways to say what a session should hold.

Needs torch and transformers only: `benchmarks.gpu_check` runs them on machines without pytest.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor

VOCAB = 61
COMMON = {"vocab_size": VOCAB, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {**COMMON, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 3}  # fmt: skip
WINDOW = 7  # smaller than the texts of the tests, so that it shows
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, LLAMA),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, LLAMA),
    "qwen2_window": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {**LLAMA, "use_sliding_window": True,
                     "sliding_window": WINDOW, "layer_types": MIXED}),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {**LLAMA, "head_dim": 8}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {**LLAMA, "sliding_window": WINDOW}),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig, {**LLAMA, "head_dim": 8}),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {**LLAMA, "head_dim": 8, "sliding_window": WINDOW,
               "layer_types": MIXED}),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, {**LLAMA, "head_dim": 8, "sliding_window": WINDOW,
               "layer_types": MIXED}),
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config, {**LLAMA, "sliding_window": WINDOW}),
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, {k: v for k, v in LLAMA.items() if "key_value" not in k}),
    "opt": (hf.OPTForCausalLM, hf.OPTConfig, {**COMMON, "hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4,
            "num_hidden_layers": 3, "word_embed_proj_dim": 32}),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, {"vocab_size": VOCAB, "n_positions": 128, "n_embd": 32, "n_layer": 3,
             "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config, LLAMA),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": WINDOW}),
    "qwen3_moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, {**LLAMA, "head_dim": 8, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}  # fmt: skip


def build(family: str) -> Any:
    """A tiny random model of a family, its weights large enough that mistakes show."""
    torch.manual_seed(0)
    model_class, config_class, settings = FAMILIES[family]
    model = model_class(config_class(**settings)).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4)
    return model


def tiny_llama(hidden_size: int, num_layers: int, seed: int, dtype: torch.dtype, vocab_size: int = 97) -> Any:
    """A random Llama whose laws are neither flat nor one-hot."""
    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_hidden_layers=num_layers,
        num_attention_heads=4, max_position_embeddings=256, initializer_range=0.3, bos_token_id=1, eos_token_id=5,
        pad_token_id=0,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).eval().requires_grad_(False).to(dtype)


def plain_logits(model: Any, tokens: list[int]) -> Tensor:
    """Logits [V] after the last token, by one uncached run of the model's own."""
    logits: Tensor = model(torch.tensor([tokens], device=model.device), use_cache=False).logits
    return logits[0, -1]


Known = dict[tuple[int, ...], Tensor]  # plain logits by text


def difference(model: Any, logits: Tensor, texts: list[list[int]], known: Known | None = None) -> float:
    """Largest difference of logits [B, V] to plain runs of the texts, relative to the size of the logits.

    known  plain logits of earlier calls, and of this one when it returns
    """
    known = {} if known is None else known
    for text in map(tuple, texts):
        if text not in known:
            known[text] = plain_logits(model, list(text))
    reference = torch.stack([known[tuple(text)] for text in texts])
    return float((logits - reference).abs().max() / reference.abs().max().clamp(min=1))


class Tree:
    """What a session should hold, the slow and obvious way: per row a trunk and nodes (token, parent)."""

    def __init__(self, trunks: list[list[int]]):
        self.trunks = [list(trunk) for trunk in trunks]
        self.nodes: list[list[tuple[int, int]]] = [[] for _ in trunks]

    def add(self, tokens: Tensor, parents: Tensor) -> None:
        """New nodes: tokens and parents [B, N]."""
        for nodes, row_tokens, row_parents in zip(self.nodes, tokens.tolist(), parents.tolist(), strict=True):
            nodes += zip(row_tokens, row_parents, strict=True)

    def path(self, row: int, node: int) -> list[int]:
        """Node ids from the root to a node."""
        ids = []
        while node >= 0:
            ids.append(node)
            node = self.nodes[row][node][1]
        return ids[::-1]

    def text(self, row: int, node: int) -> list[int]:
        """The tokens up to a node."""
        return self.trunks[row] + [self.nodes[row][i][0] for i in self.path(row, node)]

    def keep(self, row: int, nodes: list[int]) -> list[int]:
        """Forget all but these nodes and their ancestors; what they share becomes trunk. Returns their new ids."""
        paths = [set(self.path(row, node)) for node in nodes]
        kept, shared = sorted(set.union(*paths)), sorted(set.intersection(*paths))
        new = {-1: -1} | {old: max(i - len(shared), -1) for i, old in enumerate(kept)}
        self.trunks[row] += [self.nodes[row][i][0] for i in shared]
        self.nodes[row] = [(self.nodes[row][i][0], new[self.nodes[row][i][1]]) for i in kept if i not in shared]
        return [new[node] for node in nodes]

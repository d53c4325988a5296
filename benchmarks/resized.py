"""Drafts of other widths: padded (toolkit.padding) or sliced, as local checkpoint folders.

Slicing follows SliceGPT (arXiv:2401.15024): norm weights move into the matrices that read behind them, after which the
residual stream may be rotated. Its principal directions over some texts are kept, and the rest is cut off. Unlike
padding that changes what the draft predicts: it is another, weaker draft.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.errors import InputError
from toolkit.padding import pad_model


@torch.no_grad()
def resized(model: Any, hidden_size: int, texts: Sequence[list[int]]) -> Any:
    """The Llama with states of `hidden_size`: sliced if that is smaller, padded if it is larger, itself if it is the same."""
    config = model.config
    if hidden_size == config.hidden_size:
        return model
    if hidden_size > config.hidden_size:
        inner, layers = config.intermediate_size, config.num_hidden_layers
        return pad_model(model, hidden_size=hidden_size, intermediate_size=inner, num_layers=layers)
    folded = _folded(model)
    directions = _principal(folded, texts)[:, :hidden_size]
    sliced = type(model)(_narrower(folded.config, hidden_size))
    sliced.to(model.dtype).requires_grad_(False)
    _fill(sliced, folded, directions, math.sqrt(config.hidden_size / hidden_size))
    sliced.generation_config = model.generation_config
    return sliced.eval().requires_grad_(False)


def save(model: Any, tokenizer: Any, folder: Path) -> Path:
    """The model and its tokenizer as a checkpoint folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _narrower(config: Any, hidden_size: int) -> Any:
    """The config with states of `hidden_size`, and so many heads that they divide it: those that are new are dead."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    number = next(n for n in range(heads, hidden_size + 1) if hidden_size % n == 0)
    if groups != heads and number != heads:
        raise InputError(f"expected a hidden size that {heads} grouped heads divide, got {hidden_size}")
    sizes = {
        "hidden_size": hidden_size,
        "head_dim": config.head_dim,
        "num_attention_heads": number,
        "num_key_value_heads": number if groups == heads else groups,
    }
    return type(config).from_dict({**config.to_dict(), **sizes})


def _folded(model: Any) -> Any:
    """The same function with norms of weight 1 and an output layer of its own."""
    if model.config.model_type != "llama":
        raise InputError(f"only Llama models can be sliced, got {model.config.model_type}")
    plain = {**model.config.to_dict(), "tie_word_embeddings": False}
    folded = copy.deepcopy(model)
    folded.config = type(model.config).from_dict(plain)
    folded.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False, dtype=model.dtype)
    folded.requires_grad_(False).lm_head.weight.copy_(model.lm_head.weight * model.model.norm.weight)
    folded.model.norm.weight.fill_(1)
    for layer in folded.model.layers:
        for norm, readers in _norms_and_readers(layer):
            for reader in readers:
                reader.weight.mul_(norm.weight)
            norm.weight.fill_(1)
    return folded


def _norms_and_readers(layer: Any) -> list[tuple[Any, list[Any]]]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        (layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]),
        (layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]),
    ]


def _principal(folded: Any, texts: Sequence[list[int]]) -> Tensor:
    """Directions [D, D] of the residual stream, by decreasing second moment over all norms' inputs."""
    total = torch.zeros(folded.config.hidden_size, folded.config.hidden_size, dtype=torch.float64)

    def add(module: Any, args: tuple[Tensor, ...]) -> None:
        states = nn.functional.normalize(args[0].flatten(0, 1).double(), dim=-1)
        total.add_(states.T @ states)

    norms = [folded.model.norm, *(norm for layer in folded.model.layers for norm, _ in _norms_and_readers(layer))]
    hooks = [norm.register_forward_pre_hook(add) for norm in norms]
    for text in texts:
        folded(input_ids=torch.tensor([text]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.linalg.eigh(total).eigenvectors.flip(-1)


def _fill(sliced: Any, folded: Any, directions: Tensor, scale: float) -> None:
    """Readers read, and writers write, the kept directions. scale: of the norms, whose mean is over fewer numbers now."""

    def put(new: Any, weight: Tensor) -> None:
        rows, columns = weight.shape
        new.weight.zero_()
        new.weight[:rows, :columns] = weight.to(new.weight.dtype)

    put(sliced.model.embed_tokens, folded.model.embed_tokens.weight.double() @ directions)
    put(sliced.lm_head, folded.lm_head.weight.double() @ directions)
    sliced.model.norm.weight.fill_(scale)
    for new, old in zip(sliced.model.layers, folded.model.layers, strict=True):
        for (norm, readers), (_, sources) in zip(_norms_and_readers(new), _norms_and_readers(old), strict=True):
            norm.weight.fill_(scale)
            for reader, source in zip(readers, sources, strict=True):
                put(reader, source.weight.double() @ directions)
        put(new.self_attn.o_proj, directions.T @ old.self_attn.o_proj.weight.double())
        put(new.mlp.down_proj, directions.T @ old.mlp.down_proj.weight.double())

"""A tiny copy of a model: its own class and config, with few and small layers and random weights.

What decides how a model attends is kept: the kinds of its layers, rope, windows and chunks. Windows and chunks are made
so short that a text of sixteen tokens passes them. Sizes are known by their names in transformers' configs.
"""

from __future__ import annotations

import copy
import re
from contextlib import suppress
from typing import Any

import torch

WINDOW = 8  # tokens: windows, chunks, and the positions a stretched rope was trained on
LONGEST = 16  # tokens a copy reads: twice the window
POSITIONS = 64  # longest text a copy could read
MOST_PARAMETERS = 8_000_000
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "depth")
SIZES: tuple[
    tuple[str, int], ...
] = (  # pattern of a name -> the size it gets, if it was larger; the first match counts
    (r"(.*_)?vocab(_size)?(_.*)?", 64),
    (r"(text_)?(max_(sequence|position|target)_\w+|n_positions|n_ctx|max_seq_len|max_sequence_length)", POSITIONS),
    (r"original_max_position_embeddings", WINDOW),
    (r"(.*_)?(sliding_window|chunk_size|window_size|attention_window|local_window)(_size)?", WINDOW),
    (r"(q|kv|o|v|k)_lora_rank|.*_rank", 16),
    (r"qk_head_dim", 16),
    (r"rotary_(dim|ndims)", 8),
    (r"(.*_)?(head_dim|head_size|d_kv|attention_key_dim)", 8),
    (r"(.*_)?(num_key_value_heads|num_kv_heads|n_kv_heads|num_k_heads)", 2),
    (r"(.*_)?(num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|moe_top_k|num_experts_per_group)", 2),
    (r"(n_group|topk_group|num_expert_groups)", 1),
    (r"(.*_)?(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_expert_group|zero_expert_num)", 4),
    (r"(.*_)?(first_k_dense_replace|num_dense_layers|first_dense_layers)", 1),
    (r"(.*_)?(intermediate|ffn|mlp)_(\w+_)?(size|dim)(_\w+)?|d_ff|n_inner|d_inner", 32),
    (r"hidden_size_per_layer_input", 8),
    (r"(.*_)?(hidden_size|hidden_dim|n_embd|d_model|word_embed_proj_dim|embedding_size|embed_dim|dim)", 32),
    (r"image_size", 32),
)


HEADS = (
    r"(.*_)?(n_head|n_heads|num_heads|num_attention_heads|attention_heads)"  # always four, so that all fits together
)


class UnknownSizes(Exception):
    """A model that could not be made tiny: the message says why."""


def tiny_config(config: Any) -> Any:
    """A config of the same kind with small sizes, by names, in nested configs too. The original stays as it is."""
    config = copy.deepcopy(config)
    for part in _parts(config):
        overrides = _take_overrides(part)
        sizes = {key: getattr(part, key, None) for layer in overrides.values() for key in layer}
        chosen = _shrink(part)
        _put_overrides(part, overrides, sizes, chosen)
    for name in ("quantization_config", "_name_or_path", "name_or_path"):
        if hasattr(config, name):
            with suppress(AttributeError):
                delattr(config, name)
    return config


def build(model_class: Any, config: Any, attention: str | None = None) -> Any:
    """A model of a small config in float64. Raises UnknownSizes if it cannot be built, or would not be small.

    Its weights are random, the same on every call, and on the CPU; the generators of torch are left as they were.
    """
    config._attn_implementation = attention
    config._experts_implementation = "eager"  # the others know no float64
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(config).parameters())
        if size > MOST_PARAMETERS:
            raise UnknownSizes(f"its smallest copy would have {size / 1e6:.0f} million parameters")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = model_class(config).eval().requires_grad_(False).double()
            _roughen(model)
    except UnknownSizes:
        raise
    except Exception as error:  # whatever a model's code says to sizes it did not expect
        raise UnknownSizes(str(error).strip().split("\n")[0][:160] or type(error).__name__) from error
    return model


@torch.no_grad()
def _roughen(model: Any) -> None:
    """Add noise to all weights, so that none is zero or equal to its neighbours and mistakes show."""
    for name, parameter in model.named_parameters():
        scale = 0.3 if parameter.dim() > 1 else 0.1
        if parameter.is_floating_point() and "A_log" not in name:
            parameter.add_(torch.randn_like(parameter), alpha=scale)


def _parts(config: Any) -> list[Any]:
    """A config and those inside it."""
    inner = [value for value in vars(config).values() if hasattr(value, "to_dict") and hasattr(value, "model_type")]
    return [config, *(part for value in inner for part in _parts(value))]


def _take_overrides(config: Any) -> dict[int, dict[str, Any]]:
    """Take the sizes that single layers have for themselves out of a config, and return them."""
    spec = vars(config).get("_heterogeneity_spec")
    if spec is None:
        return {}
    config.per_layer_config = None
    return dict(spec.per_layer_overrides)


def _put_overrides(config: Any, overrides: dict[int, dict[str, Any]], sizes: dict[str, Any], chosen: list[int]) -> None:
    """Give the chosen layers their own sizes again. A size that was another than the config's stays another, twice as large."""
    small: dict[int, dict[str, Any]] = {}
    for new, old in enumerate(chosen):
        for key, value in overrides.get(old, {}).items():
            less = _small(key, value) if type(value) is int else value
            if type(less) is int and less == getattr(config, key, None) and value != sizes[key]:
                less *= 2
            small.setdefault(new, {})[key] = less
    if small:
        config.per_layer_config = small


def _shrink(config: Any) -> list[int]:
    """Shrink entry config in place; returns the layers that were chosen."""
    old_heads, old_kv = _first(config, "num_attention_heads", "n_head"), _first(config, "num_key_value_heads")
    chosen = _choose_layers(config)
    for name, value in list(vars(config).items()):
        if type(value) is int:
            _set(config, name, _small(name, value))
        elif isinstance(value, list) and value and all(type(entry) is int for entry in value):
            _set(config, name, [_small(name, entry) for entry in value])
        elif isinstance(value, dict):
            _set(
                config, name, {key: _small(key, inner) if type(inner) is int else inner for key, inner in value.items()}
            )
    if old_kv is not None and old_heads is not None and hasattr(config, "num_key_value_heads"):
        _set(config, "num_key_value_heads", 4 if old_kv == old_heads else min(old_kv, 2))
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := vars(config).get(name), dict):  # getattr warns of the old name
            _set(config, name, _small_rope(rope, config))
    return chosen


def _small(name: str, value: int) -> int:
    if name.endswith("token_id") or name.endswith("token_index"):
        return value if value < 64 else 63
    if re.fullmatch(HEADS, name):
        return 4
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return min(value, size)
    return value


def _choose_layers(config: Any) -> list[int]:
    """The first layer of each kind, at least two; lists with one entry per layer follow. Returns the layers."""
    name = next((name for name in LAYERS if type(getattr(config, name, None)) is int), None)
    if name is None:
        return []
    count = getattr(config, name)
    kinds = getattr(config, "layer_types", None)
    kinds = list(kinds) if kinds is not None and len(kinds) == count else [""] * count
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:4]
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    if shared:  # the last layers read the keys of the last ones before them, of their kind
        chosen = [*chosen[:2], *chosen[:2]]
        _set(config, "num_kv_shared_layers", len(chosen) // 2)
    while len(chosen) < min(2, count):
        chosen.append(next(i for i in range(count) if i not in chosen))
    chosen = chosen if shared else sorted(chosen)
    for key, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == count and count > 2:
            _set(config, key, type(value)(value[i] for i in chosen))
    for other in LAYERS:
        if type(getattr(config, other, None)) is int:
            _set(config, other, len(chosen))
    return chosen


def _small_rope(rope: dict[str, Any], config: Any) -> dict[str, Any]:
    """Rope parameters for small heads: factors per frequency and sections per axis are cut to the number there is."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {key: _small_rope(value, config) if isinstance(value, dict) else value for key, value in rope.items()}
    rope = dict(rope)
    heads = _first(config, "num_attention_heads", "n_head") or 1
    size = _first(config, "qk_rope_head_dim", "head_dim") or (_first(config, "hidden_size", "n_embd") or heads) // heads
    part = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    frequencies = int(size * part) // 2
    for name in ("short_factor", "long_factor"):
        if isinstance(rope.get(name), list):
            factors = rope[name]
            rope[name] = [factors[i * len(factors) // frequencies] for i in range(frequencies)]
    if isinstance(rope.get("mrope_section"), list):
        rope["mrope_section"] = [frequencies - 2 * (frequencies // 3), *[frequencies // 3] * 2]
    if rope.get("rope_type") == "longrope":  # sessions read no further (`toolkit.engine.facts.max_positions`)
        rope["original_max_position_embeddings"] = LONGEST
        if hasattr(config, "original_max_position_embeddings"):
            _set(config, "original_max_position_embeddings", LONGEST)
    return rope


def _first(config: Any, *names: str) -> int | None:
    return next((value for name in names if type(value := getattr(config, name, None)) is int), None)


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # read-only names of a config: the class derives them
        return

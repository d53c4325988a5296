"""The configuration of a GGUF file's model: every key of the file is taken, has no effect, or is refused.

transformers reads some keys of each architecture and passes over the rest, which then have its defaults. Here they are all set.
The scaling of positions is a set of divisors, one per rotated pair, whatever the file calls it (linear, llama3, long rope).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.models.gguf_file import GGUFFile

# The fields of configs that keys set: the first that a config has.
FIELDS = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "use_parallel_residual": ("use_parallel_residual",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "ssm.conv_kernel": ("conv_kernel",),
    "ssm.inner_size": ("intermediate_size",),
    "ssm.state_size": ("state_size",),
    "ssm.time_step_rank": ("time_step_rank",),
}
# Keys that say nothing of what a model computes, or are read below.
OTHERS = {
    "vocab_size", "tensor_data_layout", "pooling_type", "attention.sliding_window_pattern", "rope.dimension_count",
    "rope.freq_base", "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.finetuned",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
OPTIONAL = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")  # 0 stands for none
UNSET = {
    "feed_forward_length": (0,),
    "attention.head_count": (0,),
    "attention.head_count_kv": (0,),
}  # of models without
OF_TRANSFORMERS = ("qwen35", "qwen35moe", "lfm2")  # their whole configs are made by transformers
WITHOUT_ROPE = ("gpt2", "bloom", "mamba")
PARTLY_ROTATED = ("stablelm", "phi3", "nemotron", "minimax_m2")  # classes that rotate a part of each head
LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the one model whose scores are scaled by hidden size / heads
DIVISORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TOLERANCE = 1e-5  # of frequencies in float32, relative


def complete(config: Any, file: GGUFFile) -> Any:
    """transformers' config of a GGUF file, with every key of the file in it. Raises InputError for what has no place there."""
    from transformers import LlamaConfig

    if config.model_type == "mistral":  # transformers' choice for the general.name "mistral": what Llama computes
        config = LlamaConfig()
    config.vocab_size = int(file.tensors["token_embd.weight"].shape[-1])
    config.tie_word_embeddings = "output.weight" not in file.tensors
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        setattr(config, f"{name}_token_id", file.keys.get(f"tokenizer.ggml.{key}_token_id"))
    if file.architecture not in OF_TRANSFORMERS:
        _set_fields(config, file)
        _set_biases(config, file)
    if file.architecture not in (*OF_TRANSFORMERS, *WITHOUT_ROPE):
        config.rope_parameters = _rope_parameters(config, file)
    elif file.get("rope.scaling.type", "none") != "none" or file.tensors.keys() & {DIVISORS, LONG, SHORT}:
        raise InputError(f"{file.path} scales positions, which is not read of the architecture {file.architecture}")
    return config


def _set_fields(config: Any, file: GGUFFile) -> None:
    needed = [("context_length",), ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")]
    needed += [("expert_used_count",)] if file.get("expert_count") else []
    needed += [("attention.sliding_window",)] if file.architecture in ("gemma2", "gemma3") else []
    for names in needed:  # without them the model would have the defaults of transformers
        has_field = any(_has(config, field) for name in names for field in FIELDS[name])
        if has_field and not any(file.get(name) for name in names):
            raise InputError(f"{file.path} lacks {file.architecture}.{names[-1]}, which its model needs")
    neutral = _neutral(file)
    for key in file.keys:
        name = key.removeprefix(f"{file.architecture}.")
        if name == key or name in OTHERS:
            continue
        value = file.get(name)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        field = next((field for field in FIELDS.get(name, ()) if _has(config, field)), None)
        if field is not None and not isinstance(value, list) and value not in UNSET.get(name, ()):
            setattr(config, field, (value or None) if name in OPTIONAL else value)
        elif value not in neutral.get(name, ()):
            raise InputError(f"{file.path} has {key}={_short(value)}, which transformers' {config.model_type} has not")
    if file.get("attention.key_length") is None and _has(config, "head_dim"):
        config.head_dim = config.hidden_size // config.num_attention_heads
    if file.get("attention.head_count_kv") is None and _has(config, "num_key_value_heads"):
        config.num_key_value_heads = config.num_attention_heads
    if config.model_type == "falcon" and file.get("attention.head_count_kv") != 1:
        raise InputError(f"{file.path}: of Falcon's files those with one key head are read, it has more")
    if config.model_type in ("gemma2", "gemma3_text"):
        is_largest = config.num_hidden_layers == LARGEST[file.architecture]
        width = config.hidden_size // config.num_attention_heads if is_largest else config.head_dim
        config.query_pre_attn_scalar = width
    pattern = file.get("attention.sliding_window_pattern")
    if pattern is not None:
        count = config.num_hidden_layers
        slides = pattern if isinstance(pattern, list) else [(i + 1) % max(int(pattern), 1) != 0 for i in range(count)]
        config.layer_types = ["sliding_attention" if entry else "full_attention" for entry in slides[:count]]


def _has(config: Any, field: str) -> bool:
    """Whether a config has a field, which may be set."""
    prop = getattr(type(config), field, None)
    return hasattr(config, field) and not (isinstance(prop, property) and prop.fset is None)


def _neutral(file: GGUFFile) -> dict[str, tuple[Any, ...]]:
    """The values of keys that have no effect on a model without such a field."""
    heads, width = file.get("attention.head_count"), file.get("embedding_length") or 0
    even = width // heads if isinstance(heads, int) and heads else None
    return {
        "context_length": (file.get("context_length"),),
        "feed_forward_length": (0, 4 * width),
        "attention.head_count": (0,),
        "attention.head_count_kv": (0, heads),
        "attention.key_length": (even,),
        "attention.value_length": (file.get("attention.key_length") or even,),
        "attention.causal": (True,),
        "attention.clamp_kqv": (0,),
        "attention.max_alibi_bias": (8.0,) if file.architecture == "bloom" else (0,),
        "attention.sliding_window": (0,),
        "attn_logit_softcapping": (0,),
        "final_logit_softcapping": (0,),
        "use_parallel_residual": (file.architecture in ("falcon", "stablelm"),),
        "logit_scale": (0, 1),
        "residual_scale": (0, 1),
        "embedding_scale": (0, 1),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "expert_feed_forward_length": (0,),
        "expert_shared_count": (0,),
        "expert_shared_feed_forward_length": (0,),
        "expert_group_count": (0, 1),
        "expert_group_used_count": (0, 1),
        "expert_weights_scale": (0, 1),
        "expert_gating_func": (2,) if file.architecture == "minimax-m2" else (0, 1),
        "leading_dense_block_count": (0,),
        "nextn_predict_layers": (0,),
        "rope.scaling.yarn_log_multiplier": (0,),
        "rope.scaling.yarn_ext_factor": (1,),
        "ssm.dt_b_c_rms": (False,),
    }


def _set_biases(config: Any, file: GGUFFile) -> None:
    """Biases that a class has by a switch; those that the file lacks are zero."""
    attention = bool(file.names(r"blk\.\d+\.attn_(q|k|v|qkv|output)\.bias"))
    feed_forward = bool(file.names(r"blk\.\d+\.ffn_(gate|up|down)\.bias"))
    switches = {"attention_bias": attention, "mlp_bias": feed_forward, "bias": attention or feed_forward}
    for name, value in {**switches, "use_bias": attention or feed_forward}.items():
        if isinstance(getattr(config, name, None), bool) and config.model_type != "mamba":
            setattr(config, name, value)


# -- positions ----------------------------------------------------------------------------------------------------------


def rotated(file: GGUFFile) -> tuple[int, float]:
    """How many entries of each head are rotated, and the base of their frequencies."""
    heads = file.get("attention.head_count")
    heads = max(heads) if isinstance(heads, list) else heads
    length = file.get("attention.key_length") or file.get("embedding_length") // heads
    return int(file.get("rope.dimension_count") or length), float(file.get("rope.freq_base", 10000.0))


def divisors(file: GGUFFile) -> Tensor | None:
    """What the frequencies of pairs are divided by, [dimensions / 2] in float64; None: by yarn or long rope."""
    kind, factor = _scaling(file)
    if kind == "yarn" or LONG in file.tensors:
        return None
    own = file.tensor(DIVISORS)
    dimensions, _ = rotated(file)
    if own is not None and own.shape != (dimensions // 2,):
        raise InputError(
            f"{file.path}: {DIVISORS} has {own.numel()} divisors, expected one for each of {dimensions // 2} pairs"
        )
    if own is not None and not bool((own.isfinite() & (own > 0)).all()):
        raise InputError(f"{file.path}: {DIVISORS} holds what nothing can be divided by: expected numbers above 0")
    base = torch.ones(dimensions // 2, dtype=torch.float64) if own is None else own.double()
    return base * (factor if kind == "linear" else 1.0)


def frequencies(file: GGUFFile) -> Tensor | None:
    """The frequencies that positions are rotated by, [dimensions / 2] in float64; None: yarn or long rope."""
    factors, (dimensions, base) = divisors(file), rotated(file)
    return None if factors is None else unscaled(dimensions, base) / factors


def unscaled(dimensions: int, base: float) -> Tensor:
    """Frequencies without any scaling, [dimensions / 2] in float64."""
    return base ** (-torch.arange(0, dimensions, 2, dtype=torch.float64) / dimensions)


def _scaling(file: GGUFFile) -> tuple[str, float]:
    """Kind and factor; llama.cpp takes a factor alone for a linear one."""
    factor = float(file.get("rope.scaling.factor", file.get("rope.scale_linear", 0.0)) or 1.0)
    kind = file.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise InputError(f"{file.path} scales positions by {kind!r}: expected none, linear, yarn or longrope")
    return kind, factor


def _rope_parameters(config: Any, file: GGUFFile) -> dict[str, Any]:
    """The rope of a config. Raises InputError for one that its class cannot compute."""
    if config.model_type != "gemma3_text" and any(isinstance(part, dict) for part in config.rope_parameters.values()):
        raise InputError(
            f"{file.path} rotates by the kind of layer, which is not read of the architecture {file.architecture}"
        )
    dimensions, base = rotated(file)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    common: dict[str, Any] = {"rope_theta": base}
    if config.model_type in PARTLY_ROTATED:
        common["partial_rotary_factor"] = dimensions / head_dim
    elif dimensions != head_dim:
        raise InputError(
            f"{file.path} rotates {dimensions} of {head_dim} entries of each head: transformers' {config.model_type} all"
        )
    full = {"rope_type": "default", **common, **_scaled(config, file)}
    if config.model_type != "gemma3_text":
        return full
    local = {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base_swa", 10000.0))}
    return {"full_attention": full, "sliding_attention": local}


def _scaled(config: Any, file: GGUFFile) -> dict[str, Any]:
    kind, factor = _scaling(file)
    context = int(file.get("context_length", 0)) or config.max_position_embeddings
    original = int(file.get("rope.scaling.original_context_length") or context)
    own_attention = file.get("rope.scaling.attn_factor")
    attention = 1.0 if own_attention is None else float(own_attention)
    if LONG in file.tensors or SHORT in file.tensors:
        long, short = file.tensor(LONG), file.tensor(SHORT)
        if long is None or short is None or kind in ("linear", "yarn"):
            raise InputError(f"{file.path} holds {LONG} or {SHORT}: expected both of them, and no other scaling")
        if hasattr(config, "original_max_position_embeddings"):
            config.original_max_position_embeddings = original
        return _long_rope(long, short, original, own_attention)  # None: what follows from the two lengths
    if kind == "longrope":
        raise InputError(f"{file.path} scales positions by long rope: expected {LONG} and {SHORT}")
    if kind == "yarn":
        if DIVISORS in file.tensors:
            raise InputError(f"{file.path} scales positions by yarn and by {DIVISORS}: expected one of them")
        beta = {f"beta_{end}": file.get(f"rope.scaling.yarn_beta_{end}") for end in ("fast", "slow")}
        total = file.get("rope.scaling.yarn_attn_factor", attention * (0.1 * math.log(max(factor, 1.0)) + 1.0))
        kept = {key: value for key, value in (config.rope_parameters or {}).items() if key == "truncate"}
        scaled = {"rope_type": "yarn", "factor": factor, "attention_factor": total} | kept
        return scaled | {k: v for k, v in beta.items() if v} | {"original_max_position_embeddings": original}
    factors = divisors(file)
    assert factors is not None
    if attention == 1.0 and bool((factors == factors[0]).all()):
        return {} if factors[0] == 1 else {"rope_type": "linear", "factor": float(factors[0])}
    if attention == 1.0 and (llama3 := _llama3(factors, file)) is not None:
        return llama3
    return _long_rope(factors, factors, context, attention)


def _long_rope(long: Tensor, short: Tensor, original: int, attention: float | None) -> dict[str, Any]:
    own = {} if attention is None else {"attention_factor": attention}
    return {
        "rope_type": "longrope",
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
        "original_max_position_embeddings": original,
        **own,
    }


def _llama3(factors: Tensor, file: GGUFFile) -> dict[str, Any] | None:
    """Parameters of Llama 3's scaling that give these divisors; None: none with its usual ends (1 and 4) do."""
    largest = float(factors.max())
    if largest <= 1.0 or factors.min() != 1.0:
        return None
    plain = unscaled(*rotated(file))
    # 1 for four turns and more within the original context, 0 below one
    smooth = (1 / factors - 1 / largest) / (1 - 1 / largest)
    between = ((smooth > 0.01) & (smooth < 0.99)).nonzero().flatten().tolist()
    if between:
        lengths = [round(float((1 + 3 * smooth[between[0]]) * 2 * math.pi / plain[between[0]]))]
    else:
        lengths = [8192, math.ceil(8 * math.pi / plain[factors == 1.0].min())]
    for original in lengths:
        rope = {**LLAMA3, "factor": largest, "original_max_position_embeddings": original}
        if torch.allclose(llama3_divisors(plain, rope), factors, rtol=TOLERANCE, atol=0):
            return rope
    return None


def llama3_divisors(plain: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """What Llama 3's scaling divides frequencies by: 1 for what turns often within the original context, up to `factor`."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    weight = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - weight) / rope["factor"] + weight)


def check_rope(model: Any, file: GGUFFile) -> None:
    """Raises InputError if a model rotates by other frequencies than its file says."""
    expected = None if file.architecture in (*OF_TRANSFORMERS, *WITHOUT_ROPE) else frequencies(file)
    if expected is None:
        return
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    for name, buffer in buffers.items():
        if "original" in name or "sliding" in name:
            continue
        if buffer.shape != expected.shape or not torch.allclose(buffer.double(), expected, rtol=TOLERANCE, atol=0):
            raise InputError(
                f"{file.path}: transformers' {type(model).__name__} rotates otherwise than the file says ({name})"
            )
    if not buffers:
        raise InputError(f"{file.path} rotates positions, which transformers' {type(model).__name__} does not")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:36]} ..."

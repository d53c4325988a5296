"""Small Llamas grown to the shape of large ones that compute the same function. For benchmarks, nothing else.

A padded toy target has the distributions of the toy target at the cost of its new shape. What is padded with what, so that no
logit changes (up to rounding):

    hidden size      zeros in whatever writes to the residual stream (embeddings, o_proj, down_proj). RMSNorm divides by
                     the root mean square over all D entries, which with d of them alive is sqrt(d/D) of the source's: norm
                     weights are multiplied by sqrt(d/D) and epsilon by d/D
    heads, neurons   random q, k, v, gate and up rows whose columns of o_proj and down_proj are zero
    head size        rotary pairs keep their frequencies: pair i goes to i * (new / old). The added key rows are zero;
                     queries are multiplied by sqrt(new / old) to undo the smaller attention scale
    layers           random ones after the source's, with o_proj and down_proj zero: they add nothing
    vocabulary       rows with a bias that makes the added tokens impossible (`save_pretrained` loses it)

Dense kernels multiply a zero like any other number, so a forward pass takes the time of its shape. Zeros toggle fewer bits, so
do not report joules. In bfloat16 or float16 the rescaled weights round differently from the source's.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.errors import InputError, unknown_name
from toolkit.models.pair import ModelPair

IMPOSSIBLE = -1e4  # logit of an added token: its probability is exactly zero in every format, and it is finite in all
ROPES = ("default", "linear", "llama3")  # kinds whose frequencies depend on nothing but each pair's own

PRESETS: dict[str, dict[str, Any]] = {
    "200m": {  # 206.6 M parameters around the toy target
        "hidden_size": 1024, "intermediate_size": 2816, "num_layers": 16,
        "num_heads": 16, "num_kv_heads": 16, "head_dim": 64,
    },
    "1b": {  # the layers of Llama-3.2-1B: 0.98 B parameters; its 128,256 tokens would add 0.26 B
        "hidden_size": 2048, "intermediate_size": 8192, "num_layers": 16,
        "num_heads": 32, "num_kv_heads": 8, "head_dim": 64,
    },
    "8b": {  # the layers of Llama-3.1-8B: 6.98 B parameters; its 128,256 tokens would add 1.05 B
        "hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32,
        "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
    },
}  # fmt: skip


def pad_model(
    model: Any,
    *,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab_size: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Any:
    """A larger Llama that computes the same logits as `model`; `model` stays as it is.

    num_heads      None: enough to fill the hidden size
    num_kv_heads   None: the source's number of query heads per key-value head
    head_dim       a multiple of the source's; None, as of the other sizes: the same
    device, dtype  where and in which format it is built, once: 8b takes 13 GiB in bfloat16; None: the source's
    seed           of the random weights that reach no output
    Raises InputError if `model` is not a Llama, or does not fit into the new shape.
    """
    from transformers import AutoModelForCausalLM

    config = padded_config(
        model.config, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size
    )
    device, dtype = torch.device(device or model.device), dtype or model.dtype
    with torch.device("meta"):  # so that the weights are allocated once
        attention = model.config._attn_implementation
        padded: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    padded = padded.to_empty(device=device)
    padded.tie_weights()
    with torch.device(device):
        padded.model.rotary_emb = type(padded.model.rotary_emb)(config)  # its buffers are computed, not loaded
    if config.vocab_size > model.config.vocab_size:  # the added tokens get no probability
        bias = torch.zeros_like(padded.lm_head.weight[:, 0])
        bias[model.config.vocab_size :] = IMPOSSIBLE
        padded.lm_head.bias = nn.Parameter(bias)
    with torch.no_grad():
        _fill_dead(padded, model.config, seed)
        _copy_live(padded, model)
    padded.generation_config = copy.deepcopy(model.generation_config)
    return padded.requires_grad_(False).eval()


def padded_pair(
    target: str = "toy/target",
    draft: str | None = "toy/draft",
    target_preset: str | None = "200m",
    draft_preset: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    seed: int = 0,
    **options: Any,
) -> ModelPair:
    """A pair of padded models; options: of `ModelPair.from_pretrained`; None as a preset: not padded."""
    pair = ModelPair.from_pretrained(target, draft, device=device, dtype=dtype, **options)
    name = "-".join([pair.name, *filter(None, (target_preset, draft_preset))])
    target_model = pad_to_preset(pair.target, target_preset, seed)
    drafts = [pad_to_preset(model, draft_preset, seed) for model in pair.drafts]
    head = pair.head if draft_preset is None else None
    return replace(pair, target=target_model, draft=None, drafts=drafts, name=name, head=head, costs="measured")


def pad_to_preset(model: Any, preset: str | None, seed: int = 0) -> Any:
    """The model in the shape of a preset; None: the model itself."""
    if preset is None:
        return model
    if preset not in PRESETS:
        raise unknown_name("padding preset", preset, PRESETS)
    return pad_model(model, **PRESETS[preset], seed=seed)


def padded_config(
    source: Any,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab_size: int | None = None,
) -> Any:
    """The config of the padded model. Raises InputError if the source does not fit into it."""
    if source.model_type != "llama":
        raise InputError(f"only Llama models can be padded, got {source.model_type}")
    head_dim = head_dim or source.head_dim
    num_heads = num_heads or hidden_size // head_dim
    group = source.num_attention_heads // source.num_key_value_heads
    sizes = {
        "vocab_size": vocab_size or source.vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads or max(num_heads // group, 1),
        "head_dim": head_dim,
    }
    _check_sizes(source, sizes)
    epsilon = source.rms_norm_eps * source.hidden_size / hidden_size
    return type(source).from_dict({**source.to_dict(), **sizes, "rms_norm_eps": epsilon})


def _check_sizes(source: Any, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if size < getattr(source, name):
            raise InputError(f"padding needs {name} of at least {getattr(source, name)}, got {size}")
    if sizes["head_dim"] % source.head_dim:
        raise InputError(f"padding needs head_dim as a multiple of {source.head_dim}, got {sizes['head_dim']}")
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if heads % kv_heads or sizes["hidden_size"] % heads:
        raise InputError(
            f"padding needs heads that split into num_key_value_heads={kv_heads} groups and divide "
            f"hidden_size={sizes['hidden_size']}, got {heads}"
        )
    rope = source.rope_parameters["rope_type"]
    if sizes["head_dim"] > source.head_dim and rope not in ROPES:
        raise InputError(f"heads with {rope} rotary embeddings cannot grow: expected head_dim={source.head_dim}")
    copies = _copies(source.num_attention_heads // source.num_key_value_heads, heads // kv_heads)
    if source.num_key_value_heads * copies > kv_heads:
        raise InputError(
            f"padding needs num_key_value_heads of at least {source.num_key_value_heads * copies} for groups of "
            f"{heads // kv_heads}, got {kv_heads}"
        )


def _copies(group: int, new_group: int) -> int:
    """Padded key-value heads that stand for one of the source, whose query heads may need several smaller groups."""
    return math.ceil(group / new_group)


def _fill_dead(model: Any, source: Any, seed: int) -> None:
    """Fill with zeros whatever would reach the output, and with random numbers everything else."""
    generator = torch.Generator(model.device).manual_seed(seed)
    spread = model.config.initializer_range
    model.model.embed_tokens.weight.zero_()
    if not model.config.tie_word_embeddings:
        model.lm_head.weight.normal_(0.0, spread, generator=generator)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        readers = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
        writers = (attention.o_proj, mlp.down_proj)  # they add to the residual stream
        for linear in readers:
            linear.weight.normal_(0.0, spread, generator=generator)
        for linear in writers:
            linear.weight.zero_()
        for linear in (*readers, *writers):
            if linear.bias is not None:
                linear.bias.zero_()
    shrink = math.sqrt(source.hidden_size / model.config.hidden_size)
    for norm in _norms(model):
        norm.weight.fill_(shrink)


def _norms(model: Any) -> list[Any]:
    """All RMSNorms: two per layer, in order, and the last one."""
    inner = [norm for layer in model.model.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    return [*inner, model.model.norm]


@dataclass(frozen=True)
class _Positions:
    """Where the source's coordinates are in the padded model: index tensors, on its device.

    hidden [d], neurons [m]  of the residual stream and of the MLP
    queries [heads * size]   rows of q_proj, columns of o_proj
    keys, key_sources [n]    rows of k_proj and v_proj, and the source's row that each of them holds. Where the new
                             groups of query heads are smaller, a key-value head is there several times
    idle_keys [r]            the other rows of those key heads: rotary pairs that the source does not have
    """

    hidden: Tensor
    neurons: Tensor
    queries: Tensor
    keys: Tensor
    key_sources: Tensor
    idle_keys: Tensor

    @classmethod
    def of(cls, source: Any, padded: Any, device: torch.device) -> _Positions:
        group = source.num_attention_heads // source.num_key_value_heads
        new_group = padded.num_attention_heads // padded.num_key_value_heads
        copies = _copies(group, new_group)
        head = torch.arange(source.num_attention_heads)
        kv_head, member = head // group, head % group
        new_heads = (kv_head * copies + member // new_group) * new_group + member % new_group
        new_kv_heads = torch.arange(source.num_key_value_heads * copies)
        first = torch.arange(source.head_dim // 2) * (padded.head_dim // source.head_dim)
        inside = torch.cat([first, first + padded.head_dim // 2])  # rotary pairs (i, i + size/2) keep their frequency
        is_free = torch.ones(padded.head_dim, dtype=torch.bool)
        is_free[inside] = False
        positions = cls(
            hidden=torch.arange(source.hidden_size),
            neurons=torch.arange(source.intermediate_size),
            queries=_rows(new_heads, inside, padded.head_dim),
            keys=_rows(new_kv_heads, inside, padded.head_dim),
            key_sources=_rows(new_kv_heads // copies, torch.arange(source.head_dim), source.head_dim),
            idle_keys=_rows(new_kv_heads, is_free.nonzero().squeeze(1), padded.head_dim),
        )
        return cls(**{name: index.to(device) for name, index in vars(positions).items()})


def _rows(heads: Tensor, inside: Tensor, size: int) -> Tensor:
    """Flat rows of some dimensions of some heads of `size` dimensions."""
    return (heads.unsqueeze(1) * size + inside).flatten()


def _copy_live(padded: Any, model: Any) -> None:
    source, config, device = model.config, padded.config, padded.device
    positions = _Positions.of(source, config, device)
    query_scale = math.sqrt(config.head_dim / source.head_dim)
    tokens = torch.arange(source.vocab_size, device=device)
    _put(padded.model.embed_tokens.weight, model.model.embed_tokens.weight, tokens, positions.hidden)
    if not config.tie_word_embeddings:
        _put(padded.lm_head.weight, model.lm_head.weight, tokens, positions.hidden)
    for layer, original in zip(padded.model.layers, model.model.layers, strict=False):
        new, old, mlp, old_mlp = layer.self_attn, original.self_attn, layer.mlp, original.mlp
        _put_linear(new.q_proj, old.q_proj, positions.queries, positions.hidden, scale=query_scale)
        new.k_proj.weight[positions.idle_keys] = 0.0  # whatever the queries hold there, it adds nothing to the scores
        for name in ("k_proj", "v_proj"):
            _put_linear(getattr(new, name), getattr(old, name), positions.keys, positions.hidden, positions.key_sources)
        _put_linear(new.o_proj, old.o_proj, positions.hidden, positions.queries)
        for name in ("gate_proj", "up_proj"):
            _put_linear(getattr(mlp, name), getattr(old_mlp, name), positions.neurons, positions.hidden)
        _put_linear(mlp.down_proj, old_mlp.down_proj, positions.hidden, positions.neurons)
    shrink = math.sqrt(source.hidden_size / config.hidden_size)
    norm_indices = [*range(2 * source.num_hidden_layers), -1]
    norms = _norms(padded)
    for index, norm in zip(norm_indices, _norms(model), strict=True):
        scaled = (norm.weight.double() * shrink).to(device, padded.dtype)
        norms[index].weight[positions.hidden] = scaled


def _put_linear(
    new: nn.Linear, old: nn.Linear, rows: Tensor, columns: Tensor, chosen: Tensor | None = None, scale: float = 1.0
) -> None:
    """Write a projection's weight and bias, or the `chosen` rows of it, times `scale`."""
    for name in ("weight", "bias"):
        values = getattr(old, name)
        if values is None:
            continue
        values = values if chosen is None else values[chosen.to(values.device)]
        values = (values.double() * scale).to(values.dtype) if scale != 1.0 else values
        if name == "weight":
            _put(new.weight, values, rows, columns)
        else:
            new.bias[rows] = values.to(new.bias.device, new.bias.dtype)


def _put(weight: Tensor, values: Tensor, rows: Tensor, columns: Tensor) -> None:
    weight[rows.unsqueeze(1), columns] = values.to(weight.device, weight.dtype)

"""Block drafts on disk: `speculators_model_type` dflash and dspark of `speculators` 0.9, which vLLM, SGLang and llama.cpp load.

    key of config.json            meaning                                       if it is missing
    block_size                    positions of a block, the anchor's included   refused
    mask_token_id                 token at the positions after the anchor       refused
    aux_hidden_state_layer_ids    the target's `hidden_states[i]`               refused
    sample_from_anchor            whether the anchor's position predicts        true for dspark, false for dflash
    draft_vocab_size, d2t, t2d    tokens with an output row                     all
    markov_rank                   of dspark's Markov term; 0: none              256
    markov_head_type              vanilla; gated and rnn are refused            vanilla
    enable_confidence_head, confidence_head_with_markov                         true, true
    sliding_window_non_causal     layers with a window see all of their block   false

Embeddings and output rows that a folder lacks are the target's. The layers are Qwen-3's whatever family their config names. In
the flat configs of DFlash's authors, `dflash_config.target_layer_ids` number outputs, one less than here: such a folder is
refused with a line that says so, for what its draft reads of the last layer has no number here.

Shapes: V vocabulary, V' output rows, D hidden size, W = n D width of the target's states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from toolkit.drafts import speculators
from toolkit.drafts.block import DFLASH, DSPARK
from toolkit.drafts.block.model import BlockDraft, BlockSettings
from toolkit.drafts.folders import CONFIG, read_config, read_weights
from toolkit.errors import InputError

LAYER_IDS = "aux_hidden_state_layer_ids"
CLASSES = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}
FLAGS = ("sample_from_anchor", "sliding_window_non_causal", "enable_confidence_head", "confidence_head_with_markov")
OF_LAYERS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_parameters",
             "attention_bias", "layer_types", "sliding_window", "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip


def load(folder: Path, dtype: torch.dtype | str, target: Any, device: Any = "cpu") -> BlockDraft:
    """Read a draft for a target.

    target  None: the weights alone are wanted, and the folder must hold all of them
    dtype   of torch, or its name; "auto": as stored
    Raises InputError for what is not known here, and for another target's draft. Warns of a target of another name.
    """
    config, state = read_config(folder), read_weights(folder)
    settings = _settings(folder, config)
    try:
        layers = _layers(config.get("transformer_layer_config") or {})
    except Exception as error:  # whatever values of a config make transformers raise
        reason = " ".join(str(error).split())
        raise InputError(f"{folder / CONFIG}: no layers can be made of it: {reason}") from error
    if not _has_windows(layers):  # there it means nothing
        settings = replace(settings, sliding_window_non_causal=False)
    _check_sizes(folder, config, settings, layers)
    if target is not None:
        _check_target(folder, config, settings, layers, target)
    state = _with_targets(folder, state, target)
    speculators.check_numbers(folder, state)
    tokens = speculators.tokens_of_rows(folder, state, layers.vocab_size)
    speculators.check_rows(folder, config, state)
    model = BlockDraft(layers, settings, tokens)
    reason = f"layers are Qwen-3's, markov_rank={settings.markov_rank}"
    loaded: BlockDraft = speculators.filled(folder, model, state, tokens, dtype, device, reason)
    return loaded


def save(folder: Path, model: BlockDraft, target: str, architectures: Sequence[str] = ()) -> None:
    """Write a draft in the format of `speculators`, with its target's name and the names of its classes."""
    settings = asdict(model.settings)
    kind = settings.pop("kind")
    # vLLM 0.32.0 reads it for layers without a window, too: false would make their blocks causal
    settings["sliding_window_non_causal"] |= not _has_windows(model.config)
    if kind == DFLASH.name:
        for name in ("markov_rank", *FLAGS[2:]):
            settings.pop(name)
    else:
        settings["markov_head_type"] = "vanilla"
    settings = {LAYER_IDS: list(settings.pop("target_layers")), **settings}
    speculators.save(folder, model, target, architectures, CLASSES[kind], settings, model.block_length)


def _settings(folder: Path, config: Mapping[str, Any]) -> BlockSettings:
    """The settings of a config. Raises InputError for those that are missing, and for what is not known here."""
    kind = config.get("speculators_model_type")
    if kind not in CLASSES:
        authors = f": dflash_config.target_layer_ids + 1 = {LAYER_IDS}; speculators converts such a draft"
        raise InputError(
            f"{folder}: expected speculators_model_type=dflash or dspark, got {kind!r}"
            f"{authors if 'dflash_config' in config else ''}"
        )
    for name in ("block_size", "mask_token_id"):
        if type(config.get(name)) is not int:
            raise InputError(f"{folder / CONFIG}: {name}: expected a whole number, got {config.get(name)!r}")
    for name in FLAGS:
        if not isinstance(config.get(name, False), bool):
            raise InputError(f"{folder / CONFIG}: {name}: expected true or false, got {config[name]!r}")
    layers = config.get(LAYER_IDS)
    if not isinstance(layers, list) or not layers or not all(type(layer) is int for layer in layers):
        raise InputError(f"{folder / CONFIG}: {LAYER_IDS}: expected a list of layers, got {layers!r}")
    spark = kind == DSPARK.name
    rank, head = config.get("markov_rank", 256) if spark else 0, config.get("markov_head_type", "vanilla")
    if type(rank) is not int or rank < 0:
        raise InputError(f"{folder / CONFIG}: markov_rank: expected a whole number from 0 on, got {rank!r}")
    if rank and head != "vanilla":
        raise InputError(f"{folder}: markov_head_type={head!r} is not supported: expected vanilla")
    confidence = spark and config.get("enable_confidence_head", True)
    reads_markov = confidence and config.get("confidence_head_with_markov", True)
    if reads_markov and not rank:
        raise InputError(
            f"{folder}: confidence_head_with_markov needs a Markov term: expected markov_rank above 0, got 0"
        )
    return BlockSettings(
        kind,
        config["block_size"],
        config["mask_token_id"],
        tuple(layers),
        sample_from_anchor=config.get("sample_from_anchor", spark),
        sliding_window_non_causal=config.get("sliding_window_non_causal", False),
        markov_rank=rank,
        enable_confidence_head=confidence,
        confidence_head_with_markov=reads_markov,
    )


def _has_windows(layers: Any) -> bool:
    return getattr(layers, "sliding_window", None) is not None


def _layers(values: Mapping[str, Any]) -> Any:
    """The config of Qwen-3 layers from that of any family; what it leaves out are that family's defaults."""
    named = AutoConfig.for_model(**{"model_type": "qwen3", **values})
    sizes = {name: getattr(named, name) for name in OF_LAYERS if getattr(named, name, None) is not None}
    if "sliding_attention" not in (sizes.get("layer_types") or ()):
        sizes.pop("sliding_window", None)
    head_dim = getattr(named, "head_dim", None) or named.hidden_size // named.num_attention_heads
    windows = "sliding_window" in sizes
    return AutoConfig.for_model(
        "qwen3", **sizes, head_dim=head_dim, use_sliding_window=windows, tie_word_embeddings=False
    )


def _check_sizes(folder: Path, config: Mapping[str, Any], settings: BlockSettings, layers: Any) -> None:
    """Raises InputError for a block of no tokens, a mask that is no token, and ropes that follow a text's length."""
    if settings.block_size < 2:
        raise InputError(f"{folder}: block_size: expected at least 2, the anchor included, got {settings.block_size}")
    if not 0 <= settings.mask_token_id < layers.vocab_size:
        size = layers.vocab_size
        raise InputError(f"{folder}: mask_token_id: expected a token below {size}, got {settings.mask_token_id}")
    speculators.check_rope(folder, config)


def _check_target(folder: Path, config: Mapping[str, Any], settings: BlockSettings, layers: Any, target: Any) -> None:
    """Raises InputError unless the draft was made for a target of this shape; warns if its target has another name."""
    base = speculators.text_config(folder, target, DSPARK if settings.kind == DSPARK.name else DFLASH)
    ids, count = settings.target_layers, base.num_hidden_layers
    if not all(0 <= layer < count for layer in ids) or len(set(ids)) < len(ids):
        raise InputError(
            f"{folder}: {LAYER_IDS}: expected different layers below the target's {count}, got {list(ids)}"
        )
    if layers.hidden_size != base.hidden_size:
        raise InputError(
            f"{folder}: the draft reads states of {layers.hidden_size} numbers, the target's have {base.hidden_size}"
        )
    speculators.check_target(folder, config, layers, target)


def _with_targets(folder: Path, state: Mapping[str, Tensor], target: Any) -> dict[str, Tensor]:
    """The weights, and the target's embeddings and output rows where they lack them. Raises InputError without both."""
    whole = {name: tensor for name, tensor in state.items() if not name.startswith("verifier_")}
    sources = {"embed_tokens.weight": "get_input_embeddings", "lm_head.weight": "get_output_embeddings"}
    for name, layer in sources.items():
        if name in whole:
            continue
        if target is None:
            raise InputError(f"{folder}: expected {name}, or the draft's target beside it")
        rows = getattr(target, layer)().weight.detach().cpu()
        if name == "lm_head.weight" and "d2t" in whole:
            rows = rows[(whole["d2t"].long() + torch.arange(len(whole["d2t"]))).clamp(0, len(rows) - 1)]
        whole[name] = rows
    return whole

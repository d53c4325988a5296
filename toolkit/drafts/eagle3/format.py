"""EAGLE-3 drafts on disk: those of other programs are read as `speculators` would have written them.

    written by               config.json                                      weights
    speculators 0.9          speculators_model_type=eagle3, nested            layers.0.*
    SpecForge, ModelOpt      architectures=[LlamaForCausalLMEagle3], flat     midlayer.* or layers.0.*
    EAGLE's authors          a Llama's, with draft_vocab_size, flat           midlayer.*, pytorch_model.bin

A flat config is that of the layer, with the draft's own keys beside the layer's. The arithmetic is that of `speculators` with
all flags off. Which of them are on, a flat config says by the same names, or its eagle_config does.

eagle_config numbers layers by their outputs: i is `hidden_states[i + 1]` of transformers. Some that serve in vLLM alone number
the inputs, as vLLM does at the top level and `speculators` everywhere; `read_layers` has how the two are told apart.

Refused by name: more than one layer, other families than Llama and Qwen3, ropes that follow a text's length, and keys of the
config that are not known here.

Facts: SafeAILab/EAGLE eagle/model/cnets.py, sgl-project/SpecForge specforge/modeling/draft/llama3_eagle.py, llama_eagle3.py of
vLLM and SGLang, SGLang's pull request 25454 (numbers of layers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from toolkit.drafts import speculators
from toolkit.drafts.eagle3 import EAGLE3
from toolkit.drafts.eagle3.model import FAMILIES, FLAGS, Eagle3
from toolkit.drafts.folders import CONFIG, read_config, read_weights
from toolkit.errors import InputError, warn

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
         "num_hidden_layers", "max_position_embeddings", "draft_vocab_size", "target_hidden_size")  # fmt: skip
OF_LAYER = (*SIZES[:8], "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "mlp_bias",
            "layer_types", "sliding_window", "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip
KNOWN = {*FLAGS, LAYER_IDS, "speculators_model_type", "architectures", "transformer_layer_config", "draft_vocab_size",
         "target_hidden_size", "embed_requires_grad", "speculators_config", "speculators_version", "auto_map", "dtype",
         "torch_dtype", "transformers_version", "tie_word_embeddings", "model_type", "eagle_config",
         "draft_attn_kernel"}  # fmt: skip


def load(folder: Path, dtype: torch.dtype | str, target: Any, device: Any = "cpu") -> Eagle3:
    """Read a draft for a target; embeddings that the folder lacks are the target's.

    target  None: the weights alone are wanted, and the folder must hold all of them
    dtype   of torch, or its name; "auto": as stored
    Raises InputError for what is not known here, and for another target's draft. Warns of a target of another name.
    """
    state = read_weights(folder)
    config = eagle3_config(folder, state)
    if "lm_head.weight" not in state:
        raise InputError(
            f"{folder}: expected an EAGLE-3 draft's weights in {speculators.WEIGHTS}, found no lm_head.weight"
        )
    speculators.check_numbers(folder, state)
    speculators.check_rows(folder, config, state)
    _check_config(folder, config)
    base: Any = None if target is None else speculators.text_config(folder, target, EAGLE3)
    named = config.get(LAYER_IDS) or (config.get("eagle_config") or {}).get(LAYER_IDS)
    if target is None and not (named and {"embed_tokens.weight", "fc.weight"} <= state.keys()):
        raise InputError(
            f"{folder}: expected {LAYER_IDS}, fc.weight and embed_tokens.weight, or the draft's target beside it"
        )
    layers = list(named or ()) if base is None else read_layers(folder, config, base.num_hidden_layers)
    try:
        layer = AutoConfig.for_model(**{"model_type": "qwen3", **config["transformer_layer_config"]})
        if "sliding_attention" not in (getattr(layer, "layer_types", None) or []):
            layer.sliding_window = None
        if target is not None:
            _check_target(folder, config, layer, layers, state, target)
        width = state["fc.weight"].shape[1] if target is None else len(layers) * base.hidden_size
        tokens = speculators.tokens_of_rows(folder, state, layer.vocab_size)
        model: Any = Eagle3(layer, layers, width, tokens, [flag for flag in FLAGS if config.get(flag)])
    except InputError:
        raise
    except Exception as error:  # whatever values of a config make transformers raise
        reason = " ".join(str(error).split())
        raise InputError(f"{folder / CONFIG}: no layer can be made of it: {reason}") from error
    if state.get("embed_tokens.weight") is None:
        theirs, width = target.get_input_embeddings().weight.detach().cpu(), model.config.hidden_size
        if theirs.shape[1] != width:
            raise InputError(
                f"{folder} lacks embed_tokens.weight, and the target's are of {theirs.shape[1]} numbers, not {width}"
            )
        state["embed_tokens.weight"] = theirs
    reason = f"one layer of {' or '.join(FAMILIES)} is supported"
    loaded: Eagle3 = speculators.filled(folder, model, state, tokens, dtype, device, reason)
    return loaded


def save(folder: Path, model: Eagle3, target: str, architectures: Sequence[str] = ()) -> None:
    """Write a draft in the format of `speculators`, with its target's name and the names of its classes."""
    settings = {
        LAYER_IDS: list(model.target_layers),
        "target_hidden_size": model.target_width // len(model.target_layers),
        **{flag: flag in model.flags for flag in FLAGS},
        "embed_requires_grad": False,
    }
    speculators.save(folder, model, target, architectures, "Eagle3Speculator", settings, 3)


def _check_config(folder: Path, config: dict[str, Any]) -> None:
    unknown = sorted(key for key, value in config.items() if key not in KNOWN and value not in (None, False, [], {}))
    if unknown:
        raise InputError(f"{folder}: {unknown[0]}={config[unknown[0]]!r} of an EAGLE-3 config is not known here")
    if "norm_before_residual" not in config:
        raise InputError(
            f"{folder}: expected norm_before_residual in an EAGLE-3 config: its default differs between programs"
        )
    layer = config.get("transformer_layer_config") or {}
    family = layer.get("model_type", "qwen3")
    if family not in FAMILIES:
        raise InputError(f"{folder}: expected an EAGLE-3 draft with a layer of {' or '.join(FAMILIES)}, got {family!r}")
    if layer.get("num_hidden_layers", 0) != 1:
        raise InputError(f"{folder}: expected an EAGLE-3 draft of 1 layer, got {layer.get('num_hidden_layers')}")
    speculators.check_rope(folder, config)


def _check_target(
    folder: Path, config: dict[str, Any], layer: Any, layers: Sequence[int], state: dict[str, Tensor], target: Any
) -> None:
    """Raises InputError unless the draft was made for a target of this shape; warns if its target has another name."""
    base = target.config.get_text_config()
    speculators.check_target(folder, config, layer, target)
    if not all(0 <= number < base.num_hidden_layers for number in layers) or list(layers) != sorted(set(layers)):
        raise InputError(
            f"{folder}: {LAYER_IDS}: expected ascending layers below the target's {base.num_hidden_layers}, got {layers}"
        )
    width = state["fc.weight"].shape[1] if "fc.weight" in state else len(layers) * base.hidden_size
    if width != len(layers) * base.hidden_size:
        raise InputError(
            f"{folder}: the draft reads {len(layers)} states of {width / len(layers):g} numbers, the target's have "
            f"{base.hidden_size}"
        )


def eagle3_config(folder: Path, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config of an EAGLE-3 draft in the form of `speculators`; `state` has its weights, by `read_weights`.

    Raises InputError for sizes that are not whole numbers, and for what a flat config asks for and this package lacks.
    """
    config = read_config(folder)
    own, layer = (_object(folder, config, name) for name in ("eagle_config", "transformer_layer_config"))
    if "speculators_model_type" in config:
        _check_sizes(folder, {**config, **layer})
        return config
    _check_sizes(folder, config)
    if own.get("use_aux_hidden_state", True) is not True:
        raise InputError(
            f"{folder}: the draft reads the target's last state alone: expected one that reads several layers"
        )
    for name, most in (("parallel_draft_step", 1), ("quantization_config", 0)):
        if (value := {**config, **own}.get(name)) and value != most:
            raise InputError(f"{folder}: {name}={value!r} of an EAGLE-3 config is not supported")
    for flag in FLAGS:
        if not isinstance(value := own.get(flag, config.get(flag, False)), bool | None):
            raise InputError(f"{folder / CONFIG}: {flag}: expected true or false, got {value!r}")
    layer = {name: config[name] for name in OF_LAYER if config.get(name) is not None}
    if not isinstance(layer.get("layer_types"), list) or len(layer["layer_types"]) != 1:
        layer.pop("layer_types", None)
    names = [name.rpartition("self_attn.")[2] for name in state]
    layer["model_type"] = "qwen3" if "q_norm.weight" in names else "llama"
    layer["attention_bias"] = "q_proj.bias" in names
    if "mrope_section" in (layer.get("rope_scaling") or {}):  # all three positions of a text's token are the same
        del layer["rope_scaling"]
    return {
        "transformer_layer_config": {"num_hidden_layers": 1, **layer},
        **{name: config[name] for name in ("draft_vocab_size", LAYER_IDS) if config.get(name) is not None},
        **{flag: bool(own.get(flag, config.get(flag, False))) for flag in FLAGS},
        "eagle_config": own,
    }


def _object(folder: Path, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise InputError(f"{folder / CONFIG}: {name}: expected an object in JSON, got {value!r}")
    return value


def _check_sizes(folder: Path, config: Mapping[str, Any]) -> None:
    for name in ("rope_scaling", "rope_parameters", "speculators_config"):
        _object(folder, config, name)
    numbers = [(name, config.get(name)) for name in SIZES]
    for ids in (config.get(LAYER_IDS), (config.get("eagle_config") or {}).get(LAYER_IDS)):
        numbers += [(LAYER_IDS, number) for number in (ids if isinstance(ids, list) else [ids])]
    for name, value in numbers:
        if value is not None and (type(value) is not int or value < 0):
            raise InputError(f"{folder / CONFIG}: {name}: expected a whole number, got {value!r}")


def read_layers(folder: Path, config: Mapping[str, Any], count: int) -> list[int]:
    """The layers i of a target of `count` layers whose inputs, `hidden_states[i]`, an EAGLE-3 draft reads.

    Without any in the config they are those of EAGLE's authors. Numbers in eagle_config are of outputs, unless they are the
    authors' inputs, or would reach beyond the last layer.
    """
    usual = [2, count // 2, count - 3]
    outputs = (config.get("eagle_config") or {}).get(LAYER_IDS)
    if config.get(LAYER_IDS) or not outputs:
        return list(config.get(LAYER_IDS) or usual)
    if outputs == usual or max(outputs) >= count:
        return list(outputs)
    layers = [number + 1 for number in outputs]
    if layers != usual:
        warn(
            f"{folder}: the layers {outputs} of eagle_config are taken for outputs, as SpecForge numbers them: the draft reads "
            f"the inputs of {layers}; for others put {LAYER_IDS} beside eagle_config"
        )
    return layers

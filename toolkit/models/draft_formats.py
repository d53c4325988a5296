"""What kind of draft a folder holds; EAGLE-3 drafts of other programs as `speculators` would have written them.

    written by               config.json                                      weights
    speculators 0.9          speculators_model_type=eagle3, nested            layers.0.*
    SpecForge, ModelOpt      architectures=[LlamaForCausalLMEagle3], flat     midlayer.* or layers.0.*
    EAGLE's authors          a Llama's, with draft_vocab_size, flat           midlayer.*, pytorch_model.bin

A flat config is that of the layer, with the draft's own keys beside the layer's. The arithmetic is that of `speculators` with
all flags off. Which of them are on, a flat config says by the same names, or its eagle_config does.

eagle_config numbers layers by their outputs: i is `hidden_states[i + 1]` of transformers. Some that serve in vLLM alone number
the inputs, as vLLM does at the top level and `speculators` everywhere; `read_layers` has how the two are told apart.

Facts: SafeAILab/EAGLE eagle/model/cnets.py, sgl-project/SpecForge specforge/modeling/draft/llama3_eagle.py, llama_eagle3.py of
vLLM and SGLang, SGLang's pull request 25454 (numbers of layers).
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import InputError, warn
from toolkit.files.text import first_line

CONFIG, EAGLE3 = "config.json", "eagle3"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
         "num_hidden_layers", "max_position_embeddings", "draft_vocab_size", "target_hidden_size")  # fmt: skip
OF_LAYER = (*SIZES[:8], "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "mlp_bias",
            "layer_types", "sliding_window", "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip
KINDS = {  # by the names of classes and model types
    EAGLE3: r"eagle-?3",
    "P-EAGLE": r"p-?eagle",
    "DFlash": r"dflash",
    "DSpark": r"dspark",
    "Medusa": r"medusa",
    "Hydra": r"^hydra",
    "MTP": r"nextn|mtp",
    "MLP speculator": r"mlp_?speculator",
    "EAGLE-1": r"^eagle$|^eagle\w*forcausallm$|forcausallmeagle$",
}
BY_KEY = {"draft_vocab_size": EAGLE3, "eagle_config": EAGLE3, "dflash_config": "DFlash", "dspark_config": "DSpark",
          "medusa_num_heads": "Medusa", "hydra_num_heads": "Hydra"}  # fmt: skip
STATE_READERS = (EAGLE3, "DFlash", "DSpark")
SHARDS = (("model.safetensors", "model-*.safetensors"), ("pytorch_model.bin", "pytorch_model-*.bin"))


def is_eagle3(source: str | Path) -> bool:
    """Whether a folder holds an EAGLE-3 draft, of whichever program."""
    return kind_of(Path(source)) == EAGLE3


def reads_target(source: str | Path) -> bool:
    """Whether a folder holds a draft that reads its target's states, whose tokenizer is the target's (STATE_READERS)."""
    return kind_of(Path(source)) in STATE_READERS


def check_kind(folder: Path) -> None:
    """Raises InputError if a folder holds a draft of a kind that is not read here, and says which."""
    kind = kind_of(folder)
    if kind is not None and kind not in STATE_READERS:
        raise InputError(
            f"{folder} holds a draft of the kind {kind}, which is not supported: expected a causal language model with the "
            "target's tokenizer, an EAGLE-3 draft (speculators, SpecForge, EAGLE's authors), or a DFlash or DSpark draft "
            "(speculators); toolkit.distill kind=eagle3, dflash or dspark trains one"
        )


def kind_of(folder: Path) -> str | None:
    """The kind of draft in a folder, one of KINDS or what `speculators` calls it; None: a model like any other, or none.

    Raises InputError for a config that is not JSON, and where weights decide, for files that are not whole.
    """
    if not (folder / CONFIG).is_file():
        return None
    config = read_config(folder)
    if named := config.get("speculators_model_type"):
        return next((kind for kind in KINDS if re.search(KINDS[kind], str(named), re.IGNORECASE)), str(named))
    classes = config.get("architectures") or []
    words = [*(classes if isinstance(classes, list) else [classes]), config.get("model_type", "")]
    for kind, pattern in KINDS.items():
        if any(re.search(pattern, str(word), re.IGNORECASE) for word in words):
            return kind
    for key, kind in BY_KEY.items():
        if config.get(key):
            return kind
    return _kind_by_weights(folder) if config.get("num_hidden_layers", 1) == 1 else None


def _kind_by_weights(folder: Path) -> str | None:
    names = read_weights(folder).keys()  # memory-mapped: nothing else is read
    if {"fc.weight", "layers.0.hidden_norm.weight"} <= names:
        return EAGLE3
    if names and all(name.startswith("mtp") for name in names):
        return "MTP"
    if "fc.weight" in names and "lm_head.weight" not in names and any(name.startswith("layers.0.") for name in names):
        return "EAGLE-1"
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json. Raises InputError unless it is an object in JSON."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder / CONFIG} cannot be read: {first_line(error)}; expected a whole file in JSON"
        ) from error
    if not isinstance(config, dict):
        raise InputError(f"{folder / CONFIG}: expected an object in JSON, got {type(config).__name__}")
    return config


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


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder, by the names of `speculators`. Raises InputError for files that are not whole."""
    state: dict[str, Tensor] = {}
    for path in _files(folder):
        try:
            state |= _tensors(path)
        except Exception as error:  # whatever a file that is cut off makes its reader raise
            raise InputError(f"{path} is not a whole file of weights: {first_line(error)}; copy it again") from error
    renamed = {}
    for name, tensor in state.items():
        name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
        if not name.endswith("rotary_emb.inv_freq"):  # of old versions, a function of the config
            if name in renamed:
                raise InputError(f"{folder} holds {name} twice, under two names")
            renamed[name] = tensor
    return renamed


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, memory-mapped."""
    from safetensors.torch import load_file

    if path.suffix == ".safetensors":
        return load_file(path)
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise InputError("expected tensors by name")
    return content


def _files(folder: Path) -> Sequence[Path]:
    """The files with a folder's weights: one, or those that an index names, or all shards; safetensors first."""
    for single, shards in SHARDS:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / f"{single}.index.json").is_file():
            return [folder / name for name in sorted(set(_index(folder / f"{single}.index.json").values()))]
        if paths := sorted(folder.glob(shards)):
            return paths
    return []


def _index(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text("utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}; expected the index of a checkpoint") from error

"""The checkpoint format of `speculators` 0.9, which vLLM, SGLang and llama.cpp load: what it asks of every kind.

    config.json           speculators_model_type, transformer_layer_config (of the layers), draft_vocab_size, the kind's own
                          keys, speculators_config (the target's name and classes)
    embed_tokens.weight   [V, D]; a folder that lacks it means the target's
    lm_head.weight        [V', D]: output rows of V' of the V tokens
    d2t [V'], t2d [V]     an offset: token = row + d2t; which tokens have a row. Without them V' = V

A kind adds its own keys and the names of its other weights. Rows of tokens are `lm_head.rows.weight` and `lm_head.kept` here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.drafts.folders import CONFIG
from toolkit.drafts.kinds import DraftKind, kind_of
from toolkit.errors import InputError, warn

WEIGHTS = "model.safetensors"
ROPES = ("default", "linear", "llama3", "yarn")
TOKENS = ("d2t", "t2d")


def save(
    folder: Path,
    model: Any,
    target: str,
    architectures: Sequence[str],
    class_name: str,
    settings: Mapping[str, Any],
    length: int,
) -> None:
    """Write a draft, with its target's name and the names of its classes.

    class_name  of `speculators`;  settings  the kind's own keys of config.json;  length  tokens of a proposal
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("lm_head.")}
    state = {name: tensor.contiguous() for name, tensor in own.items()}
    tokens, name = model.lm_head.kept.cpu(), kind_of(model).name
    state["lm_head.weight"] = model.lm_head.weight.contiguous()
    if not model.lm_head.is_whole:
        has_row = torch.zeros(model.output_size, dtype=torch.bool).index_fill(0, tokens, True)
        state |= {"d2t": tokens - torch.arange(len(tokens)), "t2d": has_row}
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": length,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "architectures": [class_name],
        "speculators_model_type": name,
        "transformer_layer_config": model.config.to_diff_dict(),
        "draft_vocab_size": len(tokens),
        **settings,
        "tie_word_embeddings": False,
        "dtype": str(model.dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def filled(
    folder: Path,
    model: Any,
    state: Mapping[str, Tensor],
    tokens: Tensor,
    dtype: torch.dtype | str,
    device: Any,
    reason: str,
) -> Any:
    """A model with a folder's weights, frozen, on a device.

    dtype   of torch, or its name; "auto": as stored
    reason  why the names of weights are what they are, for the message
    Raises InputError unless the weights are the model's, by name and shape.
    """
    stored = state["lm_head.weight"].dtype
    model.to(stored if dtype == "auto" else getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    own = {name: tensor for name, tensor in state.items() if name not in (*TOKENS, "lm_head.weight")}
    own = {name: tensor for name, tensor in own.items() if not name.startswith("verifier_")}
    own |= {"lm_head.rows.weight": state["lm_head.weight"], "lm_head.kept": tokens}
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() ^ own.keys()):
        verb = "lacks" if name in expected else "has an unknown"
        raise InputError(f"{folder}: {kind_of(model).phrase} {verb} weight {name} ({reason})")
    for name, shape in expected.items():
        if own[name].shape != shape:
            raise InputError(f"{folder}: weight {name}: expected shape {list(shape)}, got {list(own[name].shape)}")
    model.load_state_dict(own)
    return model.to(device).requires_grad_(False).eval()


def check_numbers(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Raises InputError for weights that are quantised, or not numbers."""
    for name, tensor in state.items():
        if name not in TOKENS and (not tensor.is_floating_point() or tensor.dtype.itemsize == 1):
            raise InputError(f"{folder}: weight {name}: expected floating point, got {tensor.dtype}: it is quantised")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise InputError(f"{folder}: weight {name} holds values that are not numbers: it was not saved whole")


def check_rows(folder: Path, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Raises InputError unless there are as many output rows as the config says."""
    rows, stated = state["lm_head.weight"].shape[0], config.get("draft_vocab_size")
    if stated not in (None, rows):
        raise InputError(f"{folder}: draft_vocab_size={stated}, but lm_head.weight has {rows} rows")


def check_rope(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises InputError for a rope that follows a text's length."""
    layers = config.get("transformer_layer_config") or {}
    rope = layers.get("rope_parameters") or layers.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPES:
        raise InputError(f"{folder}: expected a rope that is the same for all texts ({', '.join(ROPES)}), got {kind}")


def text_config(folder: Path, target: Any, kind: DraftKind) -> Any:
    """The config of the target's layers. Raises InputError unless it is a transformers model."""
    if not hasattr(target, "config") or not hasattr(target, "get_decoder"):
        name = type(target).__name__
        raise InputError(f"{folder}: {kind.phrase} reads the states of a transformers model, got {name}")
    return target.config.get_text_config()


def check_target(folder: Path, config: Mapping[str, Any], layers: Any, target: Any) -> None:
    """Raises InputError unless draft and target have as many tokens; warns if the draft's target has another name."""
    size = target.config.get_text_config().vocab_size
    if layers.vocab_size != size:
        raise InputError(f"{folder}: the draft was made for {layers.vocab_size} tokens, the target has {size}")
    name = str(getattr(target, "name_or_path", "") or "")
    stated = str(((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path") or "")
    own_name = Path(stated).name
    if own_name and name and own_name.lower() not in name.lower() and not own_name.endswith(".gguf"):
        warn(f"{folder} is the draft of {stated}, the target is {name}: expect that fewer tokens are accepted")


def tokens_of_rows(folder: Path, state: Mapping[str, Tensor], size: int) -> Tensor:
    """The tokens of the output rows. Raises InputError unless they are different tokens of the vocabulary."""
    rows = state["lm_head.weight"].shape[0]
    if "d2t" not in state:
        if rows != size:
            raise InputError(f"{folder}: {rows} output rows for {size} tokens need d2t, the weights have none")
        return torch.arange(size)
    tokens = state["d2t"].long() + torch.arange(len(state["d2t"]))
    low, high = int(tokens.min()), int(tokens.max())
    if len(tokens) != rows or low < 0 or high >= size or len(tokens.unique()) < rows:
        raise InputError(
            f"{folder}: d2t: expected {rows} different tokens below {size}, got {len(tokens)} from {low} to {high}"
        )
    whole = rows == size and not state["d2t"].any()  # then EAGLE's authors leave t2d empty
    if (
        "t2d" in state
        and not (whole and not state["t2d"].any())
        and not torch.equal(state["t2d"].nonzero().squeeze(1), tokens.sort().values)
    ):
        raise InputError(f"{folder}: d2t and t2d name different tokens")
    return tokens

"""Facts about one model: its vocabulary, the longest text it reads, the tokens that end one, whether its mode is fit for
decoding, checksums of its weights; and the lock of its forwards.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from toolkit.errors import InputError

NO_LIMIT = 2**31
ROW = 2**12  # numbers of a row that a GPU sums for a checksum
RANDOM = ("drop", "jitter")  # parts of the names of what makes training forwards random
HARMLESS = ("classifier", "summary", "cls_")  # of heads that causal language models have not
POSITIONS = ("max_position_embeddings", "max_target_positions", "max_seq_len")  # what configs call the longest text


def vocab_size(model: Any) -> int:
    """Output size of a model: a transformers one, or one that says so itself."""
    if isinstance(size := getattr(model, "output_size", None), int):
        return size
    if hasattr(model, "vocab_size") and not hasattr(model, "config"):
        return int(model.vocab_size)
    return output_shape(model)[0]


def output_shape(model: Any) -> tuple[int, int]:
    """Tokens V that a model's output layer gives, and width D of the state that it reads; the layer may be quantised."""
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    if weight is None:
        raise InputError(f"expected a causal language model with an output embedding, got {type(model).__name__}")
    if isinstance(weight, Tensor) and weight.is_floating_point():
        return int(weight.shape[0]), int(weight.shape[1])
    return int(head.out_features), int(head.in_features)


def unwrapped(model: Any) -> Any:
    """The model inside of what torch.compile or PEFT made of it: the one whose forward runs in its `generate`."""
    while True:
        inner = getattr(model, "_orig_mod", model)  # compiled
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # with adapters
        if inner is model:
            return model
        model = inner


def max_positions(model: Any) -> int:
    """The longest text the model can read, with one rope for all of it.

    Long rope turns the keys of a whole text into others once it passes the length that it was trained on. What has been
    cached by then is of no use, and texts of a batch would change with their neighbours. So that length is the limit.
    """
    if not hasattr(model, "config"):
        return NO_LIMIT
    config = model.config.get_text_config()
    limits = [*(getattr(config, name, None) for name in POSITIONS), *_trained_positions(config)]
    return min([limit for limit in limits if isinstance(limit, int) and limit > 0], default=NO_LIMIT)


def _trained_positions(config: Any) -> list[int | None]:
    """Where ropes change that follow the longest text of a batch. (Dynamic ones do so at `max_position_embeddings`.)"""
    rope = getattr(config, "rope_parameters", None) or vars(config).get("rope_scaling") or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    own = getattr(config, "original_max_position_embeddings", None)
    changing = [part for part in parts if part.get("rope_type", part.get("type")) == "longrope"]
    return [part.get("original_max_position_embeddings", own) for part in changing]


def devices_of(model: Any) -> list[str]:
    """Every device that holds a part of the model or runs it, as "cuda:1"; weights that wait on disk are on none."""
    devices = [parameter.device for parameter in model.parameters()] if hasattr(model, "parameters") else [model.device]
    mapped = [device for device in getattr(model, "hf_device_map", {}).values() if device != "disk"]
    named = [str(device) for device in devices if device.type != "meta"]
    named += [
        f"cuda:{device}" if isinstance(device, int) else str(device) for device in mapped
    ]  # GPUs are numbers there
    return list(dict.fromkeys(named))


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a text: those of the model's generation config, and the tokenizer's."""
    named = [getattr(owner, "eos_token_id", None) for owner in (getattr(model, "generation_config", None), tokenizer)]
    ends = [end.tolist() if isinstance(end, Tensor) else end for end in named if end is not None]
    return tuple(
        dict.fromkeys(int(end) for part in ends for end in (part if isinstance(part, list | tuple) else [part]))
    )


def fit_logits(logits: Tensor, size: int, device: torch.device) -> Tensor:
    """A draft's logits [..., V'] on the target's device and vocabulary [..., V = size].

    Models that share a tokenizer may pad their output layers differently: missing tokens cannot be drawn, tokens beyond
    the target's are cut. The tokenizer itself reaches into neither part (checked when a pair is made).
    """
    logits = logits.to(device)
    missing = size - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits[..., :size]


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """One checksum per tensor, of its bytes: they tell of writes that leave no version (`.data`, numpy views).

    Every byte is read once, as many tensors at a time as torch has threads. On a CPU this takes as long as four or five
    products of such a matrix with one token.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(_checksum, tensors))


@torch.no_grad()
def _checksum(tensor: Tensor) -> int:
    whole = tensor.int_repr() if tensor.is_quantized else tensor.detach()
    flat = whole.contiguous().view(-1).view(torch.uint8)
    if flat.device.type == "cuda":  # sums of rows and columns go to the host instead of everything
        words = torch.nn.functional.pad(flat, (0, -len(flat) % (4 * ROW))).view(torch.int32).view(-1, ROW)
        flat = torch.cat([words.sum(0), words.sum(1)]).view(torch.uint8)
    return zlib.crc32(flat.cpu().numpy())  # type: ignore[arg-type]  # an array is a buffer


_LOCKS: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()


def forwards_lock(model: Any) -> threading.RLock:
    """One lock per model: hooks and captures are the model's, so its forwards run one after another."""
    return _LOCKS.setdefault(model, threading.RLock())


def check_mode(model: Any, role: str = "model") -> None:
    """Raises InputError if a transformers model's forward is not what it was loaded for: in training, or under autocast."""
    if hasattr(model, "open_session"):
        return
    if torch.is_autocast_enabled(model.device.type):
        raise InputError(
            f"decoding runs in the {role}'s own dtype, got torch.autocast: leave it, or load the {role} with dtype=bfloat16"
        )
    check_evaluation(model, role)


def check_evaluation(model: Any, role: str = "model") -> None:
    """Raises InputError if a model is in training mode and its forwards differ from those in evaluation mode."""
    training = [module for module in model.modules() if module.training] if isinstance(model, nn.Module) else []
    if training and (reason := _random_in_training(model)):
        raise InputError(f"expected the {role} in evaluation mode, got training mode with {reason}: call .eval() on it")


def _random_in_training(model: Any) -> str | None:
    """What makes a forward in training mode differ from one in evaluation mode; None: nothing."""
    for name, value in sorted(vars(model.config.get_text_config(decoder=True)).items()):
        if type(value) is float and value > 0 and any(w in name for w in RANDOM) and not name.startswith(HARMLESS):
            return f"{name}={value}"
    for module in model.modules():
        if module.training and type(module).__name__.startswith("Dropout") and getattr(module, "p", 0) > 0:
            return f"dropout of {module.p}"
        if module.training and getattr(module, "gradient_checkpointing", False):
            return "gradient checkpointing, which keeps no cache"
    return None

"""What a captured forward takes for granted about its model, and whether a model is fit for decoding at all.

A capture holds the very tensors, modules and hooks that were there when it was made. Writing into a tensor is seen by all;
another in its place (`load_state_dict(assign=True)`, a new submodule, `model.half()`) is not, nor is a hook added later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from toolkit.errors import InputError

RANDOM = ("drop", "jitter")  # parts of the names of what makes training forwards random
HARMLESS = ("classifier", "summary", "cls_")  # of heads that causal language models have not


class Standing:
    """The modules, tensors, hooks and modes of a model at one time; two are equal if a capture of one serves the other.

    The objects themselves are held, so that nothing new can come to lie where they were.
    """

    def __init__(self, model: nn.Module):
        self.modules = list(model.modules())
        self.tensors = [
            tensor
            for module in self.modules
            for held in (module._parameters, module._buffers)
            for tensor in held.values()
            if tensor is not None
        ]
        self.hooks = [hook for module in self.modules for hook in _hooks(module)]
        hooks = list(map(id, self.hooks))
        modes = [module.training for module in self.modules]
        self.facts = ([id(module) for module in self.modules], list(map(_fact, self.tensors)), hooks, modes)
        self.asks_gradients = any(tensor.requires_grad for tensor in self.tensors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Standing) and self.facts == other.facts

    __hash__ = None  # type: ignore[assignment]


def _fact(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.requires_grad)


def _hooks(module: nn.Module) -> list[Any]:
    """Whatever runs with a module's forward, or instead of it."""
    own = vars(module).get("forward")
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *([own] if own is not None else [])]


def globally_hooked() -> bool:
    """Whether hooks for all modules of this process are set: what is replayed would pass them by."""
    return bool(global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks)


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
    training = isinstance(model, nn.Module) and any(module.training for module in model.modules())
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

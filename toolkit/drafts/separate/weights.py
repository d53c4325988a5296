"""The weights that a separate draft begins with: a folder's, or fresh ones of a pair's draft's configuration."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from toolkit.drafts.folders import kind_in
from toolkit.engine.device import check_device
from toolkit.errors import InputError
from toolkit.files.text import first_line
from toolkit.models.pair import check_same_tokenizer, load_draft, load_tokenizer, resolve


def begin(
    source: str,
    shape: Mapping[str, Any],
    from_pretrained: str | None,
    tokenizer: Any,
    seed: int,
    device: str,
    dtype: str,
) -> Any:
    """A draft that asks for gradients: the weights of `from_pretrained`, or fresh ones of the source's configuration.

    shape      changes to that configuration: {hidden_size: 64, ...}
    tokenizer  the target's
    Raises InputError if the weights have another shape or another tokenizer, or if no model has such a shape.
    """
    check_device(device)
    weights = source if from_pretrained is None else from_pretrained
    if weights is not None and (kind := kind_in(resolve(weights))).reads_target:
        raise InputError(f"{weights} is a draft that kind={kind.name} trains: expected a draft of its own")
    if from_pretrained is not None:
        check_same_tokenizer(tokenizer, load_tokenizer(from_pretrained))
        model = load_draft(from_pretrained, device=device, dtype=dtype)
        for name, expected in shape.items():
            actual = getattr(model.config, name, None)
            if actual != expected:
                raise InputError(
                    f"from_pretrained: expected a draft with {name}={expected}, {from_pretrained} has {actual}; leave "
                    "shape out, or begin with fresh weights (from_pretrained=null)"
                )
    else:
        model = _fresh(load_draft(source, device="cpu", dtype=dtype), shape, seed).to(device)
    return model.requires_grad_(True)


def _fresh(original: Any, shape: Mapping[str, Any], seed: int) -> Any:
    """A model of the same class with other sizes and random weights."""
    settings = original.config.to_dict()
    unknown = sorted(name for name in shape if name not in settings)
    if unknown:
        raise InputError(f"shape.{unknown[0]}: expected keys of {type(original.config).__name__}, such as hidden_size")
    config = copy.deepcopy(original.config)
    if "hidden_size" in shape and "head_dim" not in shape and "head_dim" in settings:
        heads = shape.get("num_attention_heads", settings["num_attention_heads"])
        config.head_dim = shape["hidden_size"] // heads
    for name, value in shape.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = type(original)(config).to(original.dtype)
        except (ValueError, RuntimeError, TypeError) as error:
            raise InputError(f"shape: no {type(original).__name__} can be made of it: {first_line(error)}") from error
    model.generation_config = copy.deepcopy(original.generation_config)
    return model.eval()

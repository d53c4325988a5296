"""The draft that is trained: a pair's own weights, or fresh ones of a smaller shape; and its folder when it is done."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import InputError
from toolkit.files.atomic import write_folder
from toolkit.files.text import first_line
from toolkit.models.eagle3 import Eagle3, is_eagle3
from toolkit.models.eagle3 import save as save_eagle3
from toolkit.models.pair import check_same_tokenizer, load_draft, load_tokenizer, resolve
from toolkit.models.reduced import kept_tokens, reduce_vocabulary
from toolkit.models.reduced import save as save_reduced

CARD = "README.md"  # what the hub calls a model card


def begin(
    source: str,
    shape: Mapping[str, Any],
    from_pretrained: str | None,
    tokenizer: Any,
    seed: int,
    device: str,
    dtype: str,
) -> Any:
    """A draft that asks for gradients.

    source           the pair's draft: its configuration is that of a training from scratch
    shape            changes to that configuration: {hidden_size: 64, ...}
    from_pretrained  weights to begin with; None: fresh ones
    tokenizer        the target's

    Raises InputError if the weights have another shape or another tokenizer, or if no model has such a shape.
    """
    weights = source if from_pretrained is None else from_pretrained
    if weights is not None and is_eagle3(resolve(weights)):
        raise InputError(f"{weights} is an EAGLE-3 draft, which kind=eagle3 trains: expected a draft of its own")
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


def blank_of(model: Any) -> Callable[[], Any]:
    """What makes a model of the same class, configuration and format on the CPU, its weights not those of `model`."""
    if isinstance(model, Eagle3):
        return model.blank
    kind, config, dtype, generation_config = type(model), model.config, model.dtype, model.generation_config
    tokens = kept_tokens(model)

    def blank() -> Any:
        copied = kind(copy.deepcopy(config)).to(dtype)
        copied.generation_config = copy.deepcopy(generation_config)
        return copied if tokens is None else reduce_vocabulary(copied, tokens.tolist(), ())

    return blank


def shape_of(model: Any) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


def export(
    folder: Path, model: Any, tokenizer: Any, card: str, target: str = "", architectures: Sequence[str] = ()
) -> Path:
    """A Hugging Face checkpoint with tokenizer and card, whole or not at all; of a reduced vocabulary, one of ours.

    An EAGLE-3 draft is written in the format of `speculators`, with its target's name and classes.
    """

    def write(temporary: Path) -> None:
        if isinstance(model, Eagle3):  # its folder has no tokenizer: the target's is meant
            save_eagle3(temporary, model, target, architectures)
            (temporary / CARD).write_text(card, encoding="utf-8")
            return
        if kept_tokens(model) is None:
            model.save_pretrained(temporary)
        else:
            save_reduced(temporary, model)
        tokenizer.save_pretrained(temporary)
        (temporary / CARD).write_text(card, encoding="utf-8")

    return write_folder(folder, write)


def card_of(config: Mapping[str, Any], facts: Mapping[str, Any], scores: Mapping[str, float]) -> str:
    """The card of a draft in Markdown: what it was trained from, on what, and what validation says.

    facts  revision, machine, versions, sampling and the number of texts
    """
    pair, loss, sampling = config["pair"], config["loss"], facts["sampling"]
    begun = config["from_pretrained"] or f"fresh weights, {config['shape'] or 'the draft'}"
    if config["layers"] is not None:
        begun = f"layers of the target: {config['layers']}"
    options = ", ".join(
        f"{name}={value}" for name, value in loss.items() if name != "_target_" and not isinstance(value, dict)
    )
    settings = ", ".join(f"{name}={sampling[name]}" for name in ("temperature", "top_k", "top_p", "max_new_tokens"))
    return f"""---
library_name: transformers
tags: [speculative-decoding, draft]
---
# A draft for `{pair["target"]}`

Proposes tokens that `{pair["target"]}` verifies; it is not meant to be used by itself.

| | |
|---|---|
| begun from | `{begun}` |
| loss | {loss["_target_"].rpartition(".")[2]} {options} |
| texts | {facts["texts"]} responses of the target ({settings}); share drawn from the draft itself: {config["lmbda"]} |
| tokens | {scores["tokens"]:,} in all epochs |
| optimizer | {config["optimizer"]["_target_"].rpartition(".")[2]}, lr {config["optimizer"]["lr"]} |
| seed | {config["seed"]} |
| code | {facts["revision"]} |

Probability of acceptance (sum of min(p, q) over the whole vocabulary), mean over {scores["positions"]} tokens of validation
texts: {scores["start/alpha"]:.4f} before, {scores["val/alpha"]:.4f} after. The draft's cross entropy on these tokens:
{scores["start/cross_entropy"]:.4f} before, {scores["val/cross_entropy"]:.4f} after.
What that is worth per domain: `python -m analysis.heads drafts=...`.

Use it: `ModelPair.from_pretrained("{pair["target"]}", "THIS FOLDER")`
"""

"""A model's layers: the list of them, the model without some, the config of a shorter one, and the proof that it is right.

What a layer computes may depend on its number: rope or none, a window or none, a dense or a sparse MLP. A config says so by
lists with an entry per layer, by lists of layers' numbers, by the number where a kind of layer begins, or by a period. All are
rewritten for the layers that are kept, so that other programs read the right model from its folder.

That a shorter model is right is not taken from names: its modules are compared with the target's one by one, and its logits
along one text with those of the target whose other layers are skipped.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from toolkit.engine.facts import check_evaluation, forwards_lock
from toolkit.engine.shrinking import LAYERS, SIZES
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.files.text import first_line
from toolkit.models.probe import check_same_logits, probe_text

NUMBERS = re.compile(r"mlp_only_layers|moe_layers|cross_attention_layers|.*_idxs|.*(layer_ids|layer_indices)")
BEGINS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
WINDOWS = re.compile(next(pattern for pattern, _ in SIZES if "sliding_window" in pattern))
OWN_NUMBER = re.compile(r".*(idx|index|_id|number)")  # attributes that hold a module's position
PLAIN = (bool, int, float, str, type(None))
SHORT = 5  # tokens of windows while a shorter model is tried, so that the text passes them


def layers_in(model: Any) -> nn.ModuleList:
    """The list of a model's layers: of its text decoder, where it has others. Raises InputError if there is none."""
    return layer_list(model)[1]


def layer_list(model: Any) -> tuple[str, nn.ModuleList]:
    """The name of the list of a model's layers, and the list."""
    config, decoder = model.config.get_text_config(decoder=True), decoder_of(model)
    counts = {count for name in LAYERS if type(count := getattr(config, name, None)) is int and count > 0}
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) in counts]
    if not lists:
        raise InputError(f"layers: found no list of {max(counts, default=0)} layers in {type(model).__name__}")
    layers = max(lists, key=lambda module: sum(parameter.numel() for parameter in module.parameters()))
    return name_of(model, layers), layers


def decoder_of(model: Any) -> nn.Module:
    """The part of a model that reads text: a multimodal one has towers beside it."""
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    is_whole = isinstance(decoder, nn.Module) and any(isinstance(part, nn.ModuleList) for part in decoder.modules())
    chosen: nn.Module = decoder if is_whole else model  # some call their output layer the decoder
    return chosen


def name_of(model: nn.Module, part: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is part)


@contextmanager
def skipped(model: Any, layers: Sequence[int]) -> Iterator[None]:
    """Within it, these layers of a model return what they are given; the others keep their numbers."""
    with ExitStack() as hooks:
        for number, layer in enumerate(layers_in(model)):
            if number in layers:
                hooks.enter_context(layer.register_forward_hook(_skip, with_kwargs=True))
        yield


def _skip(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    states = args[0] if args else kwargs["hidden_states"]
    return type(output)((states, *output[1:])) if isinstance(output, tuple | list) else states


# -- the config of a shorter model --------------------------------------------------------------------------------------


def shorter_config(config: Any, layers: Sequence[int], count: int) -> Any:
    """A config of the same class for some of `count` layers, in their order, as it will be read from a file."""
    shorter = copy.deepcopy(config)
    text = shorter.get_text_config(decoder=True)
    numbers = {old: new for new, old in enumerate(layers)}
    changes: dict[str, Any] = {}
    for name, value in vars(text).items():
        if name in LAYERS and value == count:
            changes[name] = len(layers)
        elif name in BEGINS and isinstance(value, int):
            changes[name] = sum(layer < value for layer in layers)
        elif isinstance(value, list | tuple) and NUMBERS.fullmatch(name):
            changes[name] = [numbers[layer] for layer in value if layer in numbers]
        elif isinstance(value, list | tuple) and len(value) == count and not name.endswith("token_id"):
            changes[name] = [value[layer] for layer in layers]
    if hasattr(text, "decoder_sparse_step"):  # layer i is sparse if i + 1 is a multiple of it
        dense = [new for old, new in numbers.items() if (old + 1) % text.decoder_sparse_step]
        changes |= {"decoder_sparse_step": 1, "mlp_only_layers": sorted({*changes.get("mlp_only_layers", ()), *dense})}
    if "attention_layers" in changes and hasattr(text, "attention_types"):  # GPT-Neo reads the first from the second
        changes["attention_types"] = [[[kind], 1] for kind in changes["attention_layers"]]
    overrides = getattr(vars(text).get("_heterogeneity_spec"), "per_layer_overrides", {})
    if overrides:  # single layers have sizes of their own
        text.per_layer_config = None
    vars(text).update(changes)
    if kept := {numbers[layer]: dict(sizes) for layer, sizes in overrides.items() if layer in numbers}:
        text.per_layer_config = kept
    return type(config).from_dict(shorter.to_dict())


# -- a shorter model ----------------------------------------------------------------------------------------------------


def shorter_model(target: Any, layers: Sequence[int]) -> Any:
    """A model of some of the target's layers, in their order; its weights are copies.

    Of a multimodal target it has the text model alone, if transformers knows that as a causal language model of its own.
    Raises InputError if no model of the class computes what the target computes without its other layers.
    """
    try:
        model = _built(target, layers)
        _check_logits(target, model, layers)
        _check_modules(target, model, layers)  # after a text: some attributes follow its length
    except InputError as error:
        reason = str(error)
    except Exception as error:  # whatever a class says to a config or to weights that it did not expect
        reason = f"{type(error).__name__}: {first_line(error)}"
    else:
        return model
    raise InputError(
        f"layers: no {type(target).__name__} of layers {list(layers)} alone computes what the target does without its other "
        f"layers ({reason}): give a draft, pair.draft=NAME"
    )


def _built(target: Any, layers: Sequence[int]) -> Any:
    path, all_layers = layer_list(target)
    config: Any = target.config
    kind: Any = type(target)
    text = config.get_text_config(decoder=True)
    if text is not config and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        config, kind = text, MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "auto_map", None):
        raise InputError(f"AutoModelForCausalLM reads no model of a {type(config).__name__}")
    config = shorter_config(config, layers, len(all_layers))
    config.tie_word_embeddings = target.get_output_embeddings().weight is target.get_input_embeddings().weight
    for name in ("_attn_implementation", "_experts_implementation"):
        setattr(config, name, getattr(target.config, name, None))
    with torch.random.fork_rng(devices=[]):
        model = kind._from_config(config, dtype=target.dtype)
    parts = [("", "")]
    if kind is not type(target):
        pairs = [
            (decoder_of(target), decoder_of(model)),
            (target.get_output_embeddings(), model.get_output_embeddings()),
        ]
        parts = [(name_of(target, theirs) + ".", name_of(model, ours) + ".") for theirs, ours in pairs]
    numbers = {str(old): str(new) for new, old in enumerate(layers)}

    def renamed(name: str) -> str | None:
        """A target's tensor's name in the shorter model; None: it has none there."""
        if name.startswith(f"{path}."):
            number, dot, rest = name.removeprefix(f"{path}.").partition(".")
            if number not in numbers:
                return None
            name = f"{path}.{numbers[number]}{dot}{rest}"
        return next((ours + name.removeprefix(theirs) for theirs, ours in parts if name.startswith(theirs)), None)

    state = {ours: tensor.detach().clone() for name, tensor in target.state_dict().items() if (ours := renamed(name))}
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() | state.keys()):
        shapes = [
            list(side[name]) if name in side else None for side in (expected, {k: t.shape for k, t in state.items()})
        ]
        if shapes[0] != shapes[1]:
            raise InputError(f"{name} would have shape {shapes[0]} instead of {shapes[1]}")
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.generation_config = copy.deepcopy(target.generation_config)
    return model.to(target.device).requires_grad_(False).eval()


def _check_modules(target: Any, model: Any, layers: Sequence[int]) -> None:
    """Raises InputError unless every kept layer has the modules and the settings of the target's."""
    theirs = layers_in(target)
    for ours, number in zip(layers_in(model), layers, strict=True):
        left, right = dict(ours.named_modules()), dict(theirs[number].named_modules())
        for name in sorted(left.keys() | right.keys()):
            traits = [_traits(side.get(name)) for side in (left, right)]
            for trait in sorted(traits[0].keys() | traits[1].keys()):
                own, its = (side.get(trait) for side in traits)
                if own != its:
                    raise InputError(f"{trait} of its layer {number} would be {own} instead of {its}")


def _traits(module: nn.Module | None) -> dict[str, Any]:
    """What a layer's part computes by, beside its weights: its class, its plain attributes, its computed tensors."""
    if module is None:
        return {}
    own = {k: v for k, v in vars(module).items() if not k.startswith("_") and not OWN_NUMBER.fullmatch(k)}
    plain = {k: v for k, v in own.items() if isinstance(v, PLAIN)}
    buffers = {k: content_hash(t.float().tolist()) for k, t in module._buffers.items() if t is not None}
    return {"class": type(module).__name__, **plain, **buffers}


@torch.no_grad()
def _check_logits(target: Any, model: Any, layers: Sequence[int]) -> None:
    """Raises InputError unless the logits along a text are the target's without its other layers, windows made short."""
    others = [number for number in range(len(layers_in(target))) if number not in layers]
    check_evaluation(target, "target")
    tokens = probe_text(target)
    with forwards_lock(target), short_windows(target.config), short_windows(model.config):
        with skipped(target, others):
            expected = target(input_ids=tokens, use_cache=False).logits
        logits = model(input_ids=tokens, use_cache=False).logits
    check_same_logits(logits, expected)


@contextmanager
def short_windows(config: Any) -> Iterator[None]:
    """Within it, a config's windows and chunks are so short that the text that models are tried on passes them."""
    parts = [config, config.get_text_config(decoder=True)]
    old = [(part, k, v) for part in parts for k, v in vars(part).items() if WINDOWS.fullmatch(k) and type(v) is int]
    try:
        for part, name, value in old:
            vars(part)[name] = min(value, SHORT)
        yield
    finally:
        for part, name, value in old:
            vars(part)[name] = value

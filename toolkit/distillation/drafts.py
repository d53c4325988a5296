"""The draft that is trained: a pair's own weights, fresh ones, or some of the target's layers; and its folder when it is done.

A draft of the target's layers has its embeddings, last norm and output layer, and those layers whose absence costs most. The
cost of a layer is the mean KL(p || p without it) over the tokens of responses, measured by leaving it out (cf. Men et al.,
ShortGPT, arXiv:2403.03853, who rank layers by the angle between their input and output).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.engine.device import check_device
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash, read_json, write_folder, write_json
from toolkit.files.text import first_line
from toolkit.models.eagle3 import Eagle3, is_eagle3
from toolkit.models.eagle3 import save as save_eagle3
from toolkit.models.fingerprint import fingerprint
from toolkit.models.pair import check_same_tokenizer, load_draft, load_tokenizer, resolve
from toolkit.models.reduced import kept_tokens, reduce_vocabulary
from toolkit.models.reduced import save as save_reduced
from toolkit.models.teacher import Text, produced_logits

CARD = "README.md"  # what the hub calls a model card
LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)|(?<=h\.)\d+(?=\.)")  # a layer's number in the name of a weight


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
        if isinstance(model, Eagle3):
            save_eagle3(temporary, model, target, architectures)
        elif kept_tokens(model) is None:
            model.save_pretrained(temporary)
        else:
            save_reduced(temporary, model)
        if not isinstance(model, Eagle3):  # its folder has no tokenizer: the target's is meant
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
    own = {name: value for name, value in loss.items() if name != "_target_" and not isinstance(value, dict)}
    options = ", ".join(f"{name}={value}" for name, value in own.items())
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


# -- drafts of the target's layers -----------------------------------------------------------------------------


def layers_in(model: Any) -> nn.ModuleList:
    """The list of a model's layers. Raises InputError if it has none of the length that its config gives."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise InputError(f"layers: found no list of {count} layers in {type(model).__name__}")
    return lists[0]


def most_costly(model: Any, texts: Sequence[Text], count: int, folder: Path) -> list[int]:
    """The layers whose absence costs most, in their order. Raises InputError for more than there are.

    folder  where the costs are kept, under a hash of model and texts
    """
    from tqdm.auto import tqdm

    total = len(layers_in(model))
    if count > total:
        raise InputError(f"layers: expected at most {total}, got {count}")
    path = folder / f"{content_hash([fingerprint(model), [[*map(list, text)] for text in texts]])}.json"
    if path.exists():
        costs = read_json(path)["nats"]
    else:
        costs = list(tqdm(absence_costs(model, texts), desc="cost of each layer's absence", total=total, unit="layer"))
        write_json(path, {"nats": costs})
    return sorted(sorted(range(total), key=lambda layer: -costs[layer])[:count])


@torch.no_grad()
def absence_costs(model: Any, texts: Sequence[Text]) -> Iterator[float]:
    """The cost of each layer's absence, in nats per response token, layer by layer: L + 1 forward passes over the texts."""
    whole = produced_logits(model, texts).float().log_softmax(-1)
    for layer in layers_in(model):
        with layer.register_forward_hook(_skip, with_kwargs=True):
            without = produced_logits(model, texts).float().log_softmax(-1)
        yield float(nn.functional.kl_div(without, whole, reduction="batchmean", log_target=True))


def _skip(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """A layer's hook: the layer returns what it is given."""
    states = args[0] if args else kwargs["hidden_states"]
    return (states, *output[1:]) if isinstance(output, tuple) else states


def draft_of(target: Any, layers: Sequence[int]) -> Any:
    """A model of the target's class with some of its layers, in their order; its weights are copies.

    Raises InputError for layers that do not exist.
    """
    count = len(layers_in(target))
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong or not layers or len(set(layers)) < len(layers):
        raise InputError(f"layers: expected layers from 0 to {count - 1} of the target, each once, got {list(layers)}")
    layers = sorted(layers)
    config = copy.deepcopy(target.config)
    text_config = config.get_text_config()
    text_config.num_hidden_layers = len(layers)
    if getattr(text_config, "layer_types", None):
        text_config.layer_types = [text_config.layer_types[layer] for layer in layers]
    draft = type(target)(config).to(target.dtype)
    numbers = {str(layer): str(i) for i, layer in enumerate(layers)}
    state = {}
    for name, tensor in target.state_dict().items():
        number = LAYER.search(name)
        if number is None:
            state[name] = tensor
        elif number[0] in numbers:
            state[LAYER.sub(numbers[number[0]], name, count=1)] = tensor
    draft.load_state_dict(state)
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft.eval()

"""A draft made of some of the target's layers, with its embeddings, last norm and output layer.

Which layers: those whose absence costs most. The cost of a layer is the mean KL(p || p without it) over the tokens of
responses, measured by leaving it out (cf. Men et al., ShortGPT, arXiv:2403.03853, who rank layers by the angle between
their input and output).

Shapes: L layers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.files.atomic import content_hash, read_json, write_json
from toolkit.models.fingerprint import fingerprint
from toolkit.models.teacher import Text, produced_logits

LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)|(?<=h\.)\d+(?=\.)")  # a layer's number in the name of a weight


def layers_in(model: Any) -> nn.ModuleList:
    """The list of a model's layers. Raises InputError if it has none of the length that its config gives."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise InputError(f"layers: found no list of {count} layers in {type(model).__name__}")
    return lists[0]


def most_costly(model: Any, texts: Sequence[Text], count: int, folder: Path) -> list[int]:
    """The layers whose absence costs most, in their order. Raises InputError for more than there are.

    folder  where the costs are kept, under a hash of model and texts: drafts of any number of layers have them in common
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

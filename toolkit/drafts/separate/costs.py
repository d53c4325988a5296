"""Drafts of the target's layers: those whose absence costs most, with its embeddings, last norm and output layer.

The cost of a layer is the mean KL(p || p without it) over the tokens of responses, measured by leaving it out (cf. Men et al.,
ShortGPT, arXiv:2403.03853, who rank layers by the angle between their input and output).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toolkit.drafts.separate.layers import layer_list, layers_in, shorter_model, skipped
from toolkit.engine.facts import vocab_size
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash, read_json, write_json
from toolkit.models.fingerprint import computed_by
from toolkit.models.teacher import LOGITS, Text, logits_of, produced_states


def most_costly(model: Any, sequences: Sequence[Text], count: int, folder: Path) -> list[int]:
    """The layers whose absence costs most, in their order. Raises InputError for more than there are.

    folder  where the costs are kept, under a hash of model and texts
    """
    from tqdm.auto import tqdm

    name, layers = layer_list(model)
    total = len(layers)
    if count > total:
        raise InputError(f"layers: expected at most {total}, got {count}")
    path = folder / f"{content_hash([computed_by(model), name, [[*map(list, text)] for text in sequences]])}.json"
    if path.exists():
        costs = read_json(path)["nats"]
    else:
        costs = list(
            tqdm(absence_costs(model, sequences), desc="cost of each layer's absence", total=total, unit="layer")
        )
        with suppress(InputError):  # a cache that cannot be written
            write_json(path, {"nats": costs})
    return sorted(sorted(range(total), key=lambda layer: -costs[layer])[:count])


@torch.no_grad()
def absence_costs(model: Any, sequences: Sequence[Text]) -> Iterator[float]:
    """The cost of each layer's absence, in nats per response token, layer by layer: L + 1 forward passes over the texts."""
    whole = produced_states(model, sequences)
    parts = torch.arange(len(whole), device=whole.device).split(max(1, LOGITS // vocab_size(model)))
    for layer in range(len(layers_in(model))):
        with skipped(model, [layer]):
            without = produced_states(model, sequences)
        nats = 0.0
        for part in parts:
            log_q, log_p = (logits_of(model, states[part]).float().log_softmax(-1) for states in (without, whole))
            nats += float(nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True))
        yield nats / len(whole)


def draft_of(target: Any, layers: Sequence[int]) -> Any:
    """A model of the target's class with some of its layers, in their order; its weights are copies.

    Raises InputError for layers that do not exist.
    """
    count = len(layers_in(target))
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong or not layers or len(set(layers)) < len(layers):
        raise InputError(f"layers: expected layers from 0 to {count - 1} of the target, each once, got {list(layers)}")
    return shorter_model(target, sorted(layers))

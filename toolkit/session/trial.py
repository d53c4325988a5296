"""A ragged batch of trees through a model's session, against the model's own uncached forwards.

A session assumes three things of a model that no interface promises. It takes positions and a ready mask, and writes
its keys and values into the cache it is handed. It attends only to what the mask shows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toolkit.session.hf import HFSession
from toolkit.session.shrinking import WINDOW

# Of logits, relative to the largest. In float64 right results are within 1e-15, or 4e-7 where a model turns to float32
# inside. Wrong ones are off by 1e-2 and more. A few models cannot run in float64.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
PARENTS = [[-1, -1, 0, 0, 3, 2], [-1, 0, 1, 0, -1, 2]]
KEPT = [4, 2]  # the nodes whose paths become context
SHORT = 4  # tokens of the second row's context: it passes no window before its tree begins
TAIL = 3  # tokens that follow


class Differs(Exception):
    """A model's logits through its session are not its own, or do not depend on the text; the message says more."""


@torch.no_grad()
def check_trees(model: Any, threshold: int = WINDOW) -> None:
    """Decode and compare; raises Differs, or whatever the model raises.

    threshold  tokens after which the model attends otherwise (a window, a chunk): one context is longer, one shorter
    """
    generator = torch.Generator().manual_seed(0)
    size = min(int(model.get_input_embeddings().weight.shape[0]), 60)
    prompts, nodes, tail = (
        torch.randint(3, size, (2, n), generator=generator) for n in (threshold + 1, len(PARENTS[0]), TAIL)
    )
    session = HFSession(model, 2, threshold + 24)
    reading = session.extend(prompts, counts=[threshold + 1, SHORT])
    contexts = [prompts[0].tolist(), prompts[1, -SHORT:].tolist()]
    texts, logits = list(contexts), list(reading.logits[:, -1])
    reading = session.extend(nodes, parents=torch.tensor(PARENTS), last=nodes.shape[1])
    paths = [_paths(*row) for row in zip(contexts, nodes.tolist(), PARENTS, strict=True)]
    texts += [path for row in paths for path in row]
    logits += list(reading.logits.flatten(0, 1))
    session.keep(torch.tensor(KEPT).unsqueeze(1))
    reading = session.extend(tail, last=TAIL)
    for row, kept in enumerate(KEPT):
        texts += [paths[row][kept] + tail[row, : i + 1].tolist() for i in range(TAIL)]
        logits += list(reading.logits[row])
    _compare(model, texts, logits)
    _check_context(model, texts[-1])


def _paths(context: list[int], tokens: list[int], parents: list[int]) -> list[list[int]]:
    """The text up to each node."""
    paths: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*(context if parent < 0 else paths[parent]), token])
    return paths


def _compare(model: Any, texts: list[list[int]], logits: list[Tensor]) -> None:
    """Logits [V] after each text against the model's own, texts of one length in one forward."""
    for length in sorted({len(text) for text in texts}):
        chosen = [i for i, text in enumerate(texts) if len(text) == length]
        own = _last_logits(model, [texts[i] for i in chosen])
        ours = torch.stack([logits[i] for i in chosen])
        error = float((ours - own).abs().max() / own.abs().max())
        if not error <= TOLERANCES[own.dtype]:
            raise Differs(f"logits after {length} tokens differ by {error:.1e}")


def _check_context(model: Any, text: list[int]) -> None:
    """A trial of a model that looks at one token only would show nothing."""
    own = _last_logits(model, [text, [*text[:-3], text[-3] ^ 1, *text[-2:]]])
    if torch.allclose(own[0], own[1], rtol=1e-6, atol=0):
        raise Differs("its logits do not depend on the text")


def _last_logits(model: Any, texts: list[list[int]]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor(texts, device=model.device), use_cache=False).logits
    return logits[:, -1]

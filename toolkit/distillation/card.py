"""The card of a distilled draft: what it was trained from, on what, and what validation says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def card_of(config: Mapping[str, Any], facts: Mapping[str, Any], scores: Mapping[str, float]) -> str:
    """Markdown. `facts` has revision, machine, versions, sampling and the number of texts."""
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

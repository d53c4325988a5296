"""What serving engines are known to refuse, or to read otherwise than it was meant, of block drafts."""

from __future__ import annotations

from pathlib import Path

from toolkit.drafts.block import DSPARK
from toolkit.drafts.folders import kind_in, read_config


def cautions(folder: Path) -> list[str]:
    """Return a line for everything that is known of the draft in a folder."""
    config = read_config(folder)
    if kind_in(folder) is DSPARK:
        return [f"{folder}: vLLM 0.32.0 refuses DSpark drafts in its model runner V1, the only one on CPUs"]
    if config.get("sliding_window_non_causal", False):
        return []
    layers = config.get("transformer_layer_config") or {}
    which = "its layers without a window, too" if layers.get("sliding_window") is not None else "its blocks"
    return [
        f"{folder}: vLLM 0.32.0 makes {which} causal, without a message, because sliding_window_non_causal is false; "
        "less is accepted there than here"
    ]

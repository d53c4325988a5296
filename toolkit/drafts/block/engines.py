"""What serving engines are known to refuse, or to read otherwise than it was meant, of block drafts."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from toolkit.drafts.block import DSPARK
from toolkit.drafts.folders import kind_in, read_config


def cautions(folder: Path, lengths: Collection[int]) -> list[str]:
    """Return a line for everything that is known of the draft in a folder, at these numbers of drafted tokens."""
    config, lines = read_config(folder), list[str]()
    if kind_in(folder) is DSPARK:
        return [f"{folder}: vLLM 0.32.0 refuses DSpark drafts in its model runner V1, the only one on CPUs"]
    whole = config.get("block_size", 1) - 1
    if short := [str(length) for length in sorted(set(lengths)) if 0 < length < whole]:
        lines.append(
            f"{folder}: vLLM 0.32.0 drafts K tokens in blocks of K + 1, here in those of {whole + 1} that it was trained with: "
            f"at K = {', '.join(short)} its tokens are others there; num_speculative_tokens={whole} drafts as here"
        )
    if not config.get("sliding_window_non_causal", False):
        layers = config.get("transformer_layer_config") or {}
        which = "its layers without a window, too" if layers.get("sliding_window") is not None else "its blocks"
        lines.append(
            f"{folder}: vLLM 0.32.0 makes {which} causal, without a message, because sliding_window_non_causal is false; "
            "less is accepted there than here"
        )
    return lines

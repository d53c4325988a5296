"""Memory of the caches: what the formula says, what they hold, and whether anything grows over 1,000 prompts.

A session keeps, for each layer, keys and values [B, capacity + 1, heads, head size], allocated once per call of `decode`:

    bytes     = 2 * layers * B * (capacity + 1) * key-value heads * head size * bytes per number
    capacity  = longest prompt + max_new_tokens + most proposed tokens of a round + 1, rounded up to a multiple of 128

The slot beyond the capacity is scratch for padding.
"""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from typing import Any

import torch

from data_gen.frozen import load_frozen
from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.engine import CAPACITY_GRANULE, engine_of

PROMPTS, BATCH, TOKENS = 1000, 8, 16
TURNS = 3  # how often the same prompts are decoded


def memory() -> str:
    """Bytes of the caches against the formula, and live tensors and resident memory over 3,000 prompts."""
    pair = ModelPair.toy()
    prompts = [pair.encode(e.prompt) for d in ("instruct", "math", "code") for e in load_frozen(d, "test")][:PROMPTS]
    lines = ["| method | model | formula, bytes | held, bytes |", "|---|---|---:|---:|"]
    for name, overrides in (("speculative", ["policy.num_drafted=4"]), ("mcsd", ["proposer.k_config=4x2x1"])):
        method = config.method(name, overrides).bind(pair)
        held = _held(pair, prompts[:BATCH], method)
        capacity = max(map(len, prompts[:BATCH])) + TOKENS + method.max_nodes + 1
        capacity = -(-capacity // CAPACITY_GRANULE) * CAPACITY_GRANULE
        for role, model, found in zip(("target", "draft"), (pair.target, pair.draft), held, strict=True):
            lines.append(f"| {name} | {role} | {formula(model, BATCH, capacity):,} | {found:,} |")
    growth = [
        "| prompts decoded | live tensors, bytes | resident memory, MiB |",
        "|---:|---:|---:|",
        *_growth(prompts),
    ]
    return "\n".join([f"Batch {BATCH}, {TOKENS} new tokens.", "", *lines, "", *growth])


def _growth(prompts: list[list[int]]) -> list[str]:
    """Memory while the same prompts are decoded again and again, 100 in a call."""
    pair = ModelPair.toy()
    method, sampling = config.method("speculative", ["policy.num_drafted=4"]), Sampling(max_new_tokens=TOKENS)
    lines = []
    for call in range(TURNS * PROMPTS // 100):
        first = call * 100 % PROMPTS
        decode(pair, prompts[first : first + 100], method, sampling, batch_size=BATCH)
        if call == 0 or (call + 1) % 5 == 0:
            lines.append(f"| {(call + 1) * 100:,} | {live_bytes():,} | {resident() / 2**20:.1f} |")
    return lines


def formula(model: Any, rows: int, capacity: int) -> int:
    """Bytes of a session's cache."""
    about = model.config
    heads = about.num_key_value_heads
    size = getattr(about, "head_dim", None) or about.hidden_size // about.num_attention_heads
    return int(2 * about.num_hidden_layers * rows * (capacity + 1) * heads * size * model.dtype.itemsize)


def _held(pair: ModelPair, prompts: list[list[int]], method: Any) -> list[int]:
    """Bytes of the target's and the draft's cache at the end of a call."""
    opened: list[Any] = []
    engine = engine_of(pair)
    open_sessions = engine.open

    def remember(*args: Any) -> Any:
        sessions = open_sessions(*args)
        opened[:] = sessions.every
        return sessions

    most = [0, 0]

    def note(_: Any) -> None:
        most[:] = [max(old, session.cache_bytes) for old, session in zip(most, opened, strict=True)]

    engine.open = remember  # type: ignore[method-assign]
    try:
        decode(pair, prompts, method, Sampling(max_new_tokens=TOKENS), batch_size=len(prompts), on_finish=note)
    finally:
        del engine.open  # type: ignore[method-assign]
    return most


def live_bytes() -> int:
    """Bytes of all tensors that Python can reach."""
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())


def resident() -> int:
    """Resident bytes of this process now (Linux); elsewhere the most it ever had."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    print(memory())

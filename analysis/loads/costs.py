"""The cost tables of a pair, one per draft: from files, modelled for a device, or measured here and kept.

Measured: the decoding loop runs with fixed draft lengths, every setting in every repeat, as the speed of a shared machine
changes. All but draft forwards counts for the target. A first round reads the prompts. An entry is the median over repeats.
A target without a draft sends the last tokens of its text again; its own forwards stand for those of a draft.

Modelled, from a device's public peak figures and the model's config:

    seconds = max(bytes / bandwidth, operations / arithmetic) / REACHED / devices + layers * (kernel floor + reductions)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from toolkit.config import commands, plain
from toolkit.costs.load import LoadCost, grid_of
from toolkit.decoding import ChainProposer, Method, Sampling
from toolkit.decoding.decode import decode_measured
from toolkit.decoding.proposers.copying import Copy, CopyProposer
from toolkit.errors import InputError, unknown_name
from toolkit.files.atomic import content_hash, write_text
from toolkit.models.pair import ModelPair, fingerprint
from toolkit.runs.stage import provenance
from toolkit.stopping import Fixed
from toolkit.verification import get

DRAFTED = (1, 2, 3, 4, 5, 8)  # draft lengths that are timed: processors are faster at some widths than at others
REPEATS = 5
WARM_UP = 2  # repeats that are not counted, on a GPU: forwards are captured in them; elsewhere one
WIDE = 0.4  # spread of an entry over repeats, as a share of it, beyond which a line says so
PLAIN = -1  # number of the draft of autoregressive decoding, which has none
REACHED = 0.7  # share of a device's peaks that kernels reach in practice
REDUCTION = 8e-6  # seconds of one all-reduce of a few tokens between devices of one machine
WIDTHS = (1, 2, 3, 5, 9, 17, 64, 512)
CONTEXTS = (0, 512, 2048, 8192)


@dataclass(frozen=True)
class Device:
    """Peaks: bytes per second of memory, operations per second at 16 bits, seconds to launch a layer's kernels."""

    bandwidth: float
    arithmetic: float
    floor: float


DEVICES = {  # data sheets: dense bfloat16 without sparsity, memory of the SXM parts
    "h100": Device(3.35e12, 989e12, 12e-6),
    "h200": Device(4.8e12, 989e12, 12e-6),
    "a100": Device(2.04e12, 312e12, 14e-6),
    "l40s": Device(0.864e12, 362e12, 14e-6),
}


@dataclass(frozen=True)
class Shape:
    """What a cost depends on: parameters, layers, hidden size, keys and values per token (numbers)."""

    parameters: float
    layers: int
    hidden: int
    kv_numbers: int

    @classmethod
    def of(cls, model: Any) -> Shape:
        """The shape of a model. Raises InputError for one without a config, and for mixtures of experts."""
        config = getattr(model, "config", None)
        if config is None:
            raise InputError("modelled costs need a model with a config; this one has none")
        text = config.get_text_config()
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        if experts := [name for name in names if getattr(text, name, None)]:
            raise InputError(
                f"modelled costs do not cover mixtures of experts ({experts[0]}): measure, or give costs=FILE"
            )
        heads, layers = text.num_attention_heads, text.num_hidden_layers
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return cls(parameters, layers, text.hidden_size, 2 * layers * kv_heads * head_dim)

    def seconds(self, device: Device, devices: int, batch: float, width: float, context: float) -> float:
        read = 2 * (self.parameters + batch * (context + width) * self.kv_numbers)
        attention = 4 * self.layers * self.hidden * (context + width)
        operations = batch * width * (2 * self.parameters + attention)
        work = max(read / device.bandwidth, operations / device.arithmetic) / REACHED / devices
        return work + self.layers * (device.floor + (2 * REDUCTION if devices > 1 else 0.0))


SHAPES = {
    "llama-70b": Shape(70.6e9, 80, 8192, 2 * 80 * 8 * 128),
    "llama-8b": Shape(8.03e9, 32, 4096, 2 * 32 * 8 * 128),
    "llama-1b": Shape(1.24e9, 16, 2048, 2 * 16 * 8 * 64),
}


def modelled(target: Shape, draft: Shape, hardware: str, devices: int, batch_sizes: Sequence[int]) -> LoadCost:
    """The cost table of a pair whose target is spread over `devices` devices; the draft is on one."""
    if hardware not in DEVICES:
        raise unknown_name("hardware", hardware, DEVICES)
    batches = sorted({1.0, *map(float, batch_sizes)})
    points = [(batch, float(width), float(context)) for batch in batches for width in WIDTHS for context in CONTEXTS]
    grids = [
        grid_of({point: shape.seconds(DEVICES[hardware], count, *point) for point in points}, hardware)
        for shape, count in ((draft, 1), (target, devices))
    ]
    return LoadCost(grids[0], grids[1], "modelled", {"hardware": hardware, "devices": devices, "reached": REACHED})


def costs_of_files(cfg: commands.Advise | commands.Serving, count: int, batch_sizes: Sequence[int]) -> list[LoadCost]:
    """The cost tables of costs=FILE for `count` drafts; [] without it.

    Raises InputError for tables that would be read as flat, as they do not know these batch sizes or drafted tokens.
    """
    if cfg.costs is None:
        return []
    if cfg.hardware is not None:
        raise InputError("expected costs=FILE or hardware=NAME, got both")
    files = plain(cfg.costs)
    files = [files] if isinstance(files, str) else files
    if len(files) not in (1, count):
        raise InputError(f"expected one cost table, or one for each of {count} drafts, got {len(files)}")
    tables = [LoadCost.load(file) for file in files]
    for file, table in zip(files, tables, strict=True):
        if lacking := table.lacks(batch_sizes, widest=2):
            sizes = ",".join(map(str, batch_sizes))
            raise InputError(f"costs={file}: {lacking}; python -m analysis.timing batch_sizes=[{sizes}] writes a table")
    return tables * (count // len(files))


def costs_of(
    cfg: commands.Advise | commands.Serving,
    pairs: Sequence[ModelPair],
    prompts: Sequence[Any],
    sampling: Sampling,
    batch_sizes: Sequence[int],
    folder: Path,
    deepest: int = DRAFTED[-1],
) -> list[LoadCost]:
    """For each of these pairs of one target, or a target alone, the cost table of its forwards at these batch sizes.

    folder  where a measurement is kept, by all that it depends on;  deepest  longer drafts are not timed
    """
    if tables := costs_of_files(cfg, len(pairs), batch_sizes):
        for fall in dict.fromkeys(table.fall for table in tables if table.fall):
            print(f"costs: {fall}")
        return tables
    if cfg.hardware is not None:
        named = plain(getattr(cfg, "shapes", None)) or []
        if unknown := [name for name in named if name not in SHAPES]:
            raise unknown_name("shape", unknown[0], SHAPES)
        if len(named) not in (0, 2):
            raise InputError(f"shapes: expected [TARGET, DRAFT], got {named}")
        shapes = [
            (SHAPES[named[0]], SHAPES[named[1]])
            if named
            else (Shape.of(pair.target), Shape.of(pair.draft if pair.drafts else pair.target))
            for pair in pairs
        ]
        return [modelled(target, draft, cfg.hardware, cfg.devices, batch_sizes) for target, draft in shapes]
    pair = replace(pairs[0], draft=None, drafts=[other.draft for other in pairs if other.draft is not None])
    drafted = [length for length in DRAFTED if length <= deepest]
    device = torch.cuda.get_device_name(pair.device) if pair.device.type == "cuda" else pair.device.type
    machine = provenance()["machine"], device, str(pair.target.dtype), torch.get_num_threads()
    models = [fingerprint(model) for model in (pair.target, *pair.drafts)]
    key = content_hash([models, machine, list(batch_sizes), cfg.rounds, drafted], length=16)
    paths = [folder / f"measured-{key}-{number}.json" for number in range(len(pairs))]
    if all(path.exists() for path in paths):
        return [LoadCost.load(path) for path in paths]
    tables = []
    measured = measured_costs(pair, prompts, sampling, batch_sizes, drafted, cfg.rounds)
    for path, (costs, entries) in zip(paths, measured, strict=True):
        write_text(path.with_suffix(".csv"), entries.to_csv(index=False))
        costs.save(path)
        tables.append(costs)
    return tables


def measured_costs(
    pair: ModelPair,
    prompts: Sequence[Any],
    sampling: Sampling,
    batch_sizes: Sequence[int],
    drafted: Sequence[int],
    num_rounds: int,
) -> list[tuple[LoadCost, pd.DataFrame]]:
    """For each draft of the pair a cost table and its entries (median over repeats, low, high), measured here.

    A batch of one is always timed, too. All prompts are cut or continued to their median length.
    """
    lengths = sorted({0, *drafted})
    pairs = [replace(pair, draft=draft, drafts=(), end_ids=()) for draft in pair.drafts or [None]]
    encoded = [pair.encode(prompt) for prompt in prompts]
    longest = pair.max_length - (num_rounds + 2) * (lengths[-1] + 1)  # what the timed rounds leave
    size = min(max(int(np.median([len(ids) for ids in encoded])), lengths[-1] + 2), longest)
    if size <= lengths[-1] + 1:
        raise InputError(
            f"no room for {num_rounds} timed rounds in {pair.max_length} tokens: expected fewer (rounds=N), or costs=FILE"
        )
    texts = [(list(ids) * -(-size // len(ids)))[-size:] for ids in encoded]
    settings = [
        (batch, length, number)
        for batch in sorted({1, *batch_sizes})
        for length in lengths
        for number in range(len(pairs))
        if length or not number
    ]
    lines = []
    warm_up = WARM_UP if pair.device.type == "cuda" else 1
    work = [batch * (length + 1) * (num_rounds + 1) for batch, length, _ in settings]  # tokens that the target reads
    total = (warm_up + REPEATS) * sum(work)
    print(
        f"timing {pair.name}: {len(settings)} settings, {warm_up + REPEATS} times {num_rounds + 1} rounds each: "
        f"{total:,} target tokens",
        file=sys.stderr,
    )
    with tqdm(total=total, desc="timing", unit="token", unit_scale=True) as bar:
        for repeat in range(-warm_up, REPEATS):
            for (batch, length, number), tokens in zip(settings, work, strict=True):
                chosen = [texts[row % len(texts)] for row in range(batch)]
                timings = _timed(pairs[number], chosen, sampling, length, num_rounds, reads=length == lengths[1])
                facts = {"batch": batch, "draft": number if length else PLAIN, "repeat": repeat}
                lines += [{**line, **facts} for line in timings if repeat >= 0]
                bar.update(tokens)
    table = pd.DataFrame(lines)
    machine = {"machine": provenance()["machine"], "rounds": num_rounds, "batch_sizes": list(batch_sizes)}
    return [
        _cost_table(table[table.draft.isin((number, PLAIN))], size + num_rounds, machine)
        for number in range(len(pairs))
    ]


def _timed(
    pair: ModelPair, prompts: Sequence[list[int]], sampling: Sampling, length: int, num_rounds: int, reads: bool
) -> list[dict[str, Any]]:
    """Mean seconds of full rounds, and of the first one (`reads`), which reads the prompts. Raises InputError if one failed."""
    proposer = ChainProposer() if pair.drafts else _Again()
    method = Method(f"K={length}", Fixed(max(length, 1)), get("rejection"), proposer, min_drafted=0, max_drafted=length)
    limit = replace(sampling, max_new_tokens=(num_rounds + 1) * (length + 1) + 1, max_length=None, stop=(), end_ids=())
    generations = decode_measured(pair, prompts, method, limit, batch_size=len(prompts), timed=True).generations
    failed = next((generation.error for generation in generations if generation.error), None)
    if failed is not None:
        raise InputError(f"a prompt cannot be timed: {failed}")
    together = list(zip(*(generation.rounds for generation in generations), strict=False))  # while all rows decode
    first, *later = [rounds for rounds in together if min(record.num_drafted for record in rounds) == length]
    timed = [rounds[0] for rounds in later[:num_rounds]]  # seconds are those of the whole batch
    if not length:
        seconds = [record.draft_seconds + record.target_seconds for record in timed]
        return [{"model": "target", "width": 1, "seconds": float(np.mean(seconds))}]
    draft = float(np.mean([record.draft_seconds for record in timed])) / length
    lines = [
        {"model": "draft", "width": 1, "seconds": draft},
        {"model": "target", "width": length + 1, "seconds": float(np.mean([r.target_seconds for r in timed]))},
    ]
    if reads:
        size, beyond = len(prompts[0]), (length - 1) * draft
        lines += [
            {"model": "draft", "width": size, "seconds": max(first[0].draft_seconds - beyond, draft)},
            {"model": "target", "width": size + length, "seconds": first[0].target_seconds},
        ]
    return lines if pair.drafts else [line for line in lines if line["model"] == "target"]


class _Again(CopyProposer):
    def lookup(self, text: Sequence[int], most: int, end_ids: Sequence[int]) -> Copy:
        return Copy.of((list(text) * -(-most // len(text)))[-most:])


def _cost_table(lines: pd.DataFrame, context: int, facts: dict[str, Any]) -> tuple[LoadCost, pd.DataFrame]:
    grouped = lines.groupby(["model", "batch", "width"]).seconds
    entries = grouped.agg(seconds="median", low="min", high="max").reset_index()
    entries.insert(3, "context", context)
    spread = ((entries.high - entries.low) / entries.seconds).max()
    if (wide := int((entries.high - entries.low > WIDE * entries.seconds).sum())) > 0:
        print(
            f"the times of {wide} of {len(entries)} settings vary by more than {WIDE:.0%} between repeats: use a quieter "
            "machine, or more rounds (rounds=N)"
        )
    grids = [
        grid_of({(float(e.batch), float(e.width), float(e.context)): e.seconds for e in part.itertuples()}, str(name))
        for name, part in entries.groupby("model")
    ]  # draft, if there is one, and target
    costs = LoadCost(grids[0], grids[-1], "measured", {**facts, "spread": round(float(spread), 3)})
    if costs.fall:
        print(f"costs: {costs.fall}")
    return costs, entries

"""The cost tables of a pair, one per draft: from files, modelled for a device, or measured here and kept (`toolkit.costs`).

Modelled, from a device's public peak figures and the model's config:

    seconds = max(bytes / bandwidth, operations / arithmetic) / REACHED / devices + layers * (kernel floor + reductions)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from analysis import keys
from toolkit.config import plain
from toolkit.costs.kept import costs_here
from toolkit.costs.load import LoadCost, grid_of
from toolkit.errors import InputError, unknown_name
from toolkit.models.pair import ModelPair

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


def costs_of_files(cfg: keys.Advise | keys.Serving, count: int, batch_sizes: Sequence[int]) -> list[LoadCost]:
    """The cost tables of costs=FILE for `count` drafts; [] without it.

    Raises InputError for tables that would be read as flat, as they do not know these batch sizes or drafted tokens, and for an
    engine's answers that are too noisy to advise on.
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
        if table.engine is not None and table.engine.noise:
            raise InputError(f"costs={file}: {table.engine.noise}")
        if lacking := table.lacks(batch_sizes, widest=2 if cfg.max_drafted == "auto" else 1 + cfg.max_drafted):
            sizes = ",".join(map(str, batch_sizes))
            hint = "" if table.is_published else f"; python -m analysis.timing batch_sizes=[{sizes}] writes a table"
            raise InputError(f"costs={file}: {lacking}{hint}")
    return tables * (count // len(files))


def costs_of(cfg: keys.Advise | keys.Serving, pairs: Sequence[ModelPair], batch_sizes: Sequence[int]) -> list[LoadCost]:
    """For each of these pairs of one target, or a target alone, the cost table of its forward passes at these batch sizes."""
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
    pair = pairs[0]
    if len(pairs) > 1:  # all drafts take turns beside one target
        pair = replace(pair, draft=None, drafts=[other.draft for other in pairs])
    sizes = sorted({1, *batch_sizes})
    by_size = [[table for table, _ in costs_here(pair, size, cfg.rounds)] for size in sizes]
    tables = [LoadCost.of(of_draft) for of_draft in zip(*by_size, strict=True)]
    for fall in dict.fromkeys(table.fall for table in tables if table.fall):
        print(f"costs: {fall}")
    return tables

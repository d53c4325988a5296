"""Costs modelled from a device's public peak figures and the models' configs: for pairs that are not on this machine.

`cpu` is this machine, which is asked (`analysis.loads.this_cpu`). For the others:

A forward of `batch` rows and `width` tokens each reads all weights and every row's keys and values, and multiplies every
token by all weights. The longer of both times at the device's peaks counts, divided by the share of the peaks that is reached
in practice. The time to launch every layer's kernels is added. Over several devices, bytes and products are divided, and
every layer adds two all-reduces. This is a model, not a measurement, and tables say so.

    seconds = max(bytes / bandwidth, operations / arithmetic) / REACHED + layers * (kernel floor + reductions)

Peaks come from the vendors' data sheets: dense bfloat16 without sparsity, and the memory bandwidth of the SXM parts. Mixtures
of experts are refused, because a config does not say which experts a batch reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from analysis.loads.this_cpu import BYTES, OPERATIONS, Cpu
from toolkit.costs.load import LoadCost, grid_of
from toolkit.errors import InputError, unknown_name

REACHED = 0.7  # share of the peaks that kernels reach in practice
REDUCTION = 8e-6  # seconds of one all-reduce of a few tokens between devices of one machine
WIDTHS = (1, 2, 3, 5, 9, 17, 64, 512)
CONTEXTS = (0, 512, 2048, 8192)


@dataclass(frozen=True)
class Device:
    """Peaks: bytes per second of memory, operations per second at 16 bits, seconds to launch a layer's kernels."""

    bandwidth: float
    arithmetic: float
    floor: float


DEVICES = {
    "h100": Device(3.35e12, 989e12, 12e-6),
    "h200": Device(4.8e12, 989e12, 12e-6),
    "a100": Device(2.04e12, 312e12, 14e-6),
    "l40s": Device(0.864e12, 362e12, 14e-6),
}


@dataclass(frozen=True)
class Shape:
    """What a cost depends on: parameters, layers, hidden size, keys and values per token (numbers), bytes per number."""

    parameters: float
    layers: int
    hidden: int
    kv_numbers: int
    bytes_each: int = 2

    @classmethod
    def of(cls, model: Any) -> Shape:
        """The shape of a loaded model, or of one on the meta device. Raises InputError for mixtures of experts."""
        config = getattr(model, "config", None)
        if config is None:
            raise InputError("modelled costs need a model with a config; this one has none")
        text = config.get_text_config()
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        if experts := [name for name in names if getattr(text, name, None)]:
            raise InputError(
                f"modelled costs do not cover mixtures of experts ({experts[0]}): measure, or give costs=FILE"
            )
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        parameters, layers = sum(parameter.numel() for parameter in model.parameters()), text.num_hidden_layers
        return cls(parameters, layers, text.hidden_size, 2 * layers * kv_heads * head_dim)

    def seconds(self, device: Device, devices: int, batch: float, width: float, context: float) -> float:
        """Seconds of one forward on a device, or on several."""
        read = self.bytes_each * (self.parameters + batch * (context + width) * self.kv_numbers)
        attention = 4 * self.layers * self.hidden * (context + width)
        operations = batch * width * (2 * self.parameters + attention)
        work = max(read / device.bandwidth, operations / device.arithmetic) / REACHED / devices
        return work + self.layers * (device.floor + (2 * REDUCTION if devices > 1 else 0.0))

    def cpu_seconds(self, cpu: Cpu, batch: float, width: float, context: float) -> float:
        """Seconds of one forward on this machine's processor, in float32."""
        rows, seen = batch * width, context + width
        weights = self.parameters * cpu.product(rows)
        attention = BYTES * batch * seen * self.kv_numbers / cpu.copied
        attention += 4 * rows * self.layers * self.hidden * seen / cpu.arithmetic
        return weights + attention + self.layers * OPERATIONS * cpu.operation


PRESETS = {
    "llama-70b": Shape(70.6e9, 80, 8192, 2 * 80 * 8 * 128),
    "llama-8b": Shape(8.03e9, 32, 4096, 2 * 32 * 8 * 128),
    "llama-1b": Shape(1.24e9, 16, 2048, 2 * 16 * 8 * 64),
}


def modelled(
    target: Shape, draft: Shape, hardware: str, devices: int, batch_sizes: Sequence[int], cpu: Cpu | None = None
) -> LoadCost:
    """The cost table of a pair on `devices` devices of this kind; the draft lies on one.

    cpu  what this machine does, for hardware="cpu"

    Raises InputError for other names, and for several processors.
    """
    if hardware not in DEVICES and (hardware != "cpu" or cpu is None):
        raise unknown_name("hardware", hardware, [*DEVICES, "cpu"])
    if cpu is not None and devices != 1:
        raise InputError(f"hardware=cpu is this machine: expected devices=1, got {devices}")
    grids = []
    for shape, count in ((draft, 1), (target, devices)):
        points = {
            (float(batch), float(width), float(context)): shape.cpu_seconds(cpu, batch, width, context)
            if cpu is not None
            else shape.seconds(DEVICES[hardware], count, batch, width, context)
            for batch in sorted({1, *batch_sizes})
            for width in WIDTHS
            for context in CONTEXTS
        }
        grids.append(grid_of(points, hardware))
    facts = {"hardware": hardware, "devices": devices, **({"reached": REACHED} if cpu is None else asdict(cpu))}
    return LoadCost(grids[0], grids[1], "modelled", facts)

"""Costs of forward passes modelled from a device's public peak figures and a model's config.

    seconds = max(bytes / bandwidth, operations / arithmetic) / REACHED / devices + layers * (kernel floor + reductions)

A mixture of experts reads its shared weights and those of the experts that some token reaches. Of E experts, k per token, n
tokens that were routed independently would reach E (1 - (1 - k/E)^n). Tokens of one text are alike: w of them reach what
w^overlap independent ones do. Tokens of other rows are independent.

    overlap   experts reached by 8 and 15 tokens, E = 256, k = 8        by K + 1 tokens of K = 1, 4, 8, in those of one token
    1         57.4 and 97.0                                             2.0, 4.7, 8.0
    .79       38.7 and 60.5                                             1.7, 3.4, 5.3
    measured  39.4 and 58.9 (lucebox#501)                               1.3, 3.2, 6.1 (vllm#46295, another model)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.costs.load import LoadCost, grid_of
from toolkit.errors import InputError, unknown_name

REACHED = 0.7  # share of a device's peaks that kernels reach in practice
REDUCTION = 8e-6  # seconds of one all-reduce of a few tokens between devices of one machine
WIDTHS = (1, 2, 3, 5, 9, 17, 64, 512)
CONTEXTS = (0, 512, 2048, 8192)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
PER_TOKEN = ("num_experts_per_tok", "top_k_experts")


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
class Experts:
    """The routed experts of a mixture, over all of its layers.

    number      E, of a layer;  per_token  k
    parameters  of all experts of all layers
    """

    number: int
    per_token: int
    parameters: float

    def reached(self, batch: float, width: float, overlap: float) -> float:
        """The experts of a layer that `width` tokens of each of `batch` texts reach, in expectation."""
        return self.number * (1 - (1 - self.per_token / self.number) ** (batch * width**overlap))


@dataclass(frozen=True)
class Shape:
    """What a cost depends on: parameters, layers, hidden size, keys and values per token (numbers), routed experts."""

    parameters: float
    layers: int
    hidden: int
    kv_numbers: int
    experts: Experts | None = None

    @classmethod
    def of(cls, model: Any) -> Shape:
        """The shape of a model. Raises InputError for one without a config, or whose experts are not told apart."""
        config = getattr(model, "config", None)
        if config is None:
            raise InputError("modelled costs need a model with a config; this one has none")
        text = config.get_text_config()
        heads, layers = text.num_attention_heads, text.num_hidden_layers
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return cls(parameters, layers, text.hidden_size, 2 * layers * kv_heads * head_dim, _experts(model, text))

    def seconds(
        self, device: Device, devices: int, batch: float, width: float, context: float, overlap: float = 1.0
    ) -> float:
        """Seconds of a forward pass over `width` tokens of each of `batch` texts, after `context` others."""
        touched = active = self.parameters
        if self.experts is not None:
            reached, number = self.experts.reached(batch, width, overlap), self.experts.number
            touched -= self.experts.parameters * (1 - reached / number)
            active -= self.experts.parameters * (1 - self.experts.per_token / number)
        read = 2 * (touched + batch * (context + width) * self.kv_numbers)
        attention = 4 * self.layers * self.hidden * (context + width)
        operations = batch * width * (2 * active + attention)
        work = max(read / device.bandwidth, operations / device.arithmetic) / REACHED / devices
        return work + self.layers * (device.floor + (2 * REDUCTION if devices > 1 else 0.0))


def _experts(model: Any, config: Any) -> Experts | None:
    """The routed experts of a model; None: it has none. Raises InputError where their weights are not found by name."""
    number = next((count for name in EXPERTS if (count := getattr(config, name, None))), None)
    parameters = sum(weights.numel() for name, weights in model.named_parameters() if ".experts." in name)
    if number == 1 or (number is None and not parameters):
        return None
    per_token = next((count for name in PER_TOKEN if (count := getattr(config, name, None))), None)
    if not number or not per_token or not parameters:
        raise InputError(
            f"modelled costs: expected a mixture whose config says {' or '.join(EXPERTS)}, and {' or '.join(PER_TOKEN)}, "
            f"and whose weights are named experts, got {type(model).__name__}: measure, or give costs=FILE"
        )
    return Experts(number, per_token, parameters)


SHAPES = {
    "llama-70b": Shape(70.6e9, 80, 8192, 2 * 80 * 8 * 128),
    "llama-8b": Shape(8.03e9, 32, 4096, 2 * 32 * 8 * 128),
    "llama-1b": Shape(1.24e9, 16, 2048, 2 * 16 * 8 * 64),
}


def modelled(
    target: Shape, draft: Shape, hardware: str, devices: int, batch_sizes: Sequence[int], overlap: float = 1.0
) -> LoadCost:
    """The cost table of a pair whose target is spread over `devices` devices; the draft is on one."""
    if hardware not in DEVICES:
        raise unknown_name("hardware", hardware, DEVICES)
    batches = sorted({1.0, *map(float, batch_sizes)})
    points = [(batch, float(width), float(context)) for batch in batches for width in WIDTHS for context in CONTEXTS]
    grids = [
        grid_of({point: shape.seconds(DEVICES[hardware], count, *point, overlap) for point in points}, hardware)
        for shape, count in ((draft, 1), (target, devices))
    ]
    about = {"hardware": hardware, "devices": devices, "reached": REACHED}
    about |= {"overlap": overlap} if target.experts or draft.experts else {}
    return LoadCost(grids[0], grids[1], "modelled", about)

"""Weights of linear layers on a CPU, laid out once for products with a few tokens, where this processor gains by it.

Stock products read a weight several times for two to sixteen tokens, or lay it out again in every call. oneDNN keeps close to
one reading with a weight that was reordered once. What that gains differs between processors: each shape is tried when its
model is first decoded, and the choice is kept in the user's cache. A packed weight is a second copy: all of them take at most
SHARE of the free memory, and the shapes that gain most come first. Results differ in rounding only.

Theirs -> ours: torch's compiler does the same when it freezes a model, by the same private operators. Ours changes no module:
within our forward passes they multiply by packed weights, at those numbers of rows where that is faster.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from toolkit.config.values import fits
from toolkit.errors import warn
from toolkit.files.machine import available_memory, processor
from toolkit.files.measured import measured

SMALL = 2**18  # elements; smaller weights stay in a core's cache
ROWS = (1, 2, 4, 8, 16)  # rows that a shape is tried at; others are taken for the next lower one
MOST = 2 * ROWS[-1]  # from here on products are bound by arithmetic: they stay stock
LAYOUTS = (1, 8)  # numbers of rows that oneDNN is told to lay a weight out for
TRIED = 2**25  # bytes of weights of each shape that are tried: beyond a core's cache
REPEATS, MOST_REPEATS = 5, 15  # trials of each way, in turns: more where least and median times disagree
GAIN = 0.1  # of the time over all of ROWS: less is not worth a second copy of a weight
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of a product, relative to its largest entry; no other dtypes
SHARE = 0.25  # of the free memory, for all packed weights
Choice = list[int]  # the layout, and those of ROWS at which it is used; empty: stock
Trial = tuple[float, Choice]  # the share of the time that a choice saves, and the choice


class PackedLinears:
    """Context manager: within it, the linear layers of a model multiply by their packed weights.

    option    "auto": where this processor gains by it; "on": wherever it is possible; "off"
    writable  compare the weights with what was packed at every `refresh`; False: only pointers and torch's counts of writes
    """

    def __init__(self, model: nn.Module, option: str | bool = "auto", writable: bool = True):
        self.model, self.option, self.writable = model, option, writable
        self.products: list[_Product] = []
        self._seen: Any = None
        self._projections: list[Tensor] = []

    @torch.inference_mode()
    def refresh(self) -> None:
        """Pack all weights again if one of them, or the number of threads, is another than when they were packed."""
        modules = [] if self.option in ("off", False) else packable(self.model, self.option == "auto")
        facts = [(id(m), m.weight.data_ptr(), 0 if m.weight.is_inference() else m.weight._version) for m in modules]
        seen = (torch.get_num_threads(), facts)
        pairs = zip(self.products, self._projections, strict=False)  # no projections: nobody writes
        if seen == self._seen and all(torch.equal(projection(p.module.weight), before) for p, before in pairs):
            return
        self.products = []  # their memory is free before it is needed again
        self.products = _products(modules, self.option == "auto")
        self._projections = [projection(product.module.weight) for product in self.products] if self.writable else []
        self._seen = seen

    def __enter__(self) -> None:
        for product in self.products:
            vars(product.module)["forward"] = product

    def __exit__(self, *_: object) -> None:
        for product in self.products:  # another thread's model may have the same layer, and be done with it
            vars(product.module).pop("forward", None)


class _Product:
    """What stands in for a linear layer's forward: [..., D] -> [..., D']; stock where the layout is not faster."""

    def __init__(self, module: nn.Linear, choice: Choice):
        layout, *rows = choice
        self.module, self.packed = module, pack(module.weight, layout)
        self.is_packed = [max((r for r in ROWS if r <= number), default=0) in rows for number in range(MOST)]

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows < MOST and self.is_packed[rows] and x.dtype == self.module.weight.dtype:
            return product(x, self.packed, self.module.bias)
        return linear(x, self.module.weight, self.module.bias)


def packable(model: nn.Module, large: bool = True) -> list[nn.Linear]:
    """The linear layers of a model that can be packed: dense ones on a CPU, with the stock forward; `large` ones only."""
    modules = list(model.modules())
    if [module for module in modules if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None]:
        return []  # compiled: it was guarded against other forwards
    return [
        module
        for module in modules
        if type(module) is nn.Linear
        and isinstance(vars(module).get("forward"), _Product | None)  # no hook of somebody else
        and type(module._parameters.get("weight")) is nn.Parameter
        and module.weight.device.type == "cpu"
        and _operators_work(module.weight.dtype)
        and module.weight.numel() >= (SMALL if large else 1)
        and module.weight.is_contiguous()
    ]


def pack(weight: Tensor, layout: int) -> Any:
    """The weight [D', D] reordered for about `layout` rows: an opaque tensor that nothing but oneDNN can read."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), layout)


def product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Any:
    """x [..., D] times a packed weight, [..., D']."""
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, bias, "none", [], "")


@cache
def _operators_work(dtype: torch.dtype) -> bool:
    """Whether this torch has the operators for a dtype, and they give what stock products give; one line if they do not."""
    operators = ("_linear_pointwise", "_reorder_linear_weight")
    if dtype not in TOLERANCES or not all(hasattr(torch.ops.mkldnn, name) for name in operators):
        return False
    x, weight, bias = (_drawn(size).to(dtype) for size in ((3, 5, 96), (160, 96), (160,)))
    try:
        expected = linear(x, weight, bias)
        errors = [(product(x, pack(weight, layout), bias) - expected).abs().max() for layout in LAYOUTS]
    except (RuntimeError, NotImplementedError):  # a processor without instructions for the dtype
        return False
    if max(errors) <= TOLERANCES[dtype] * expected.abs().max():
        return True
    warn(f"linear layers in {str(dtype).removeprefix('torch.')} are not packed: the operator gives other results")
    return False


def projection(weight: Tensor) -> Tensor:
    """The bits [D'] of a product with a fixed random vector: what they do not show is within the rounding of a product."""
    vector = _drawn((weight.shape[1],))
    chunks = [weight] if weight.dtype == torch.float32 else weight.split(2**12)  # rows that become float32 at a time
    return torch.cat([chunk.float() @ vector for chunk in chunks]).view(torch.int32)


def _drawn(size: tuple[int, ...]) -> Tensor:
    """The same random numbers every time, whatever the process's defaults are."""
    return torch.randn(size, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32)


def _products(modules: Sequence[nn.Linear], tried: bool) -> list[_Product]:
    """The packed layers among some: those whose shapes gain by it, as far as memory goes (`tried`), or all.

    Where memory is short, one line says so.
    """
    everything: Trial = (0.0, [LAYOUTS[-1], *ROWS])
    trials = _trials(modules) if tried else {_key(module): everything for module in modules}
    gaining = [module for module in modules if (trial := trials[_key(module)]) and trial[1]]
    gaining.sort(key=lambda module: -trials[_key(module)][0])  # type: ignore[index]
    needed, available = sum(module.weight.nbytes for module in gaining), available_memory()
    chosen, taken = gaining, needed
    if available is not None and needed > (most := int(available * (SHARE if tried else 1))):
        chosen, taken = [], 0
        for module in gaining:
            if taken + module.weight.nbytes <= most:
                chosen.append(module)
                taken += module.weight.nbytes
        if not tried or not chosen:
            warn(f"linear layers are not packed: expected {needed >> 20} MiB of free memory, got {most >> 20}")
            return []
    if tried and chosen:
        layers = "1 linear layer is" if len(chosen) == 1 else f"{len(chosen)} linear layers are"
        least = f" of {needed >> 20}, a quarter of what is free" if taken < needed else ""
        print(
            f"{layers} kept a second time, packed: {taken >> 20} MiB{least}; pair.packed=off keeps none",
            file=sys.stderr,
        )
    return [_Product(module, trials[_key(module)][1]) for module in chosen]  # type: ignore[index]


def _key(module: nn.Linear) -> str:
    """What the choice for a layer depends on."""
    threads, shape = torch.get_num_threads(), "x".join(map(str, module.weight.shape))
    return f"{processor()}; {threads} threads; torch {torch.__version__}; {module.weight.dtype}; {shape}"


def _trials(modules: Sequence[nn.Linear]) -> dict[str, Trial | None]:
    """The trial of each shape, from the user's cache; what that lacks is tried. None: no trial was clear."""
    weights: dict[str, list[Tensor]] = {}
    for module in modules:
        weights.setdefault(_key(module), []).append(module.weight.detach())
    trials = {key: partial(_trial, held) for key, held in weights.items()}
    return measured("packed.json", "packed weights", trials, _is_trial, seconds=0.8)


def _is_trial(stored: Any) -> bool:
    if not (fits(stored, list) and len(stored) == 2 and fits(stored[0], float) and fits(stored[1], list[int])):
        return False
    choice = stored[1]
    return {*choice[:1]} <= {*LAYOUTS} and {*choice[1:]} <= {*ROWS}


def _trial(weights: Sequence[Tensor]) -> Trial | None:
    """The choice by the times of all ways, in turns; None if least and median times do not agree whether it gains."""
    weights = [weight[: max(1, TRIED // weight[0].nbytes)] for weight in weights[: max(1, TRIED // weights[0].nbytes)]]
    ways: list[Any] = [(linear, weights), *((product, [pack(w, layout) for w in weights]) for layout in LAYOUTS)]
    seconds: list[list[list[float]]] = [[[] for _ in ROWS] for _ in ways]
    clock = (
        time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    )  # alone, other programs do not count
    for repeat in range(1, MOST_REPEATS + 1):
        for number, rows in enumerate(ROWS):
            x = weights[0].new_ones(rows, weights[0].shape[1])
            for times, (multiply, held) in zip(seconds, ways, strict=True):
                start = clock()
                _ = [multiply(x, weight) for weight in held]
                times[number].append(clock() - start)
        least, usual = (_choice([[sorted(laps)[at] for laps in t] for t in seconds]) for at in (0, repeat // 2))
        if repeat >= REPEATS and bool(least[1]) == bool(usual[1]):
            return least
    return None  # too busy a machine


def _choice(seconds: Sequence[Sequence[float]]) -> Trial:
    """The layout with the least time over all of ROWS, stock where that is faster; empty if it saves less than GAIN."""
    stock, *packed = seconds
    total, best = min((sum(map(min, stock, times)), number) for number, times in enumerate(packed))
    faster = [rows for rows, ours, theirs in zip(ROWS, packed[best], stock, strict=True) if ours < theirs]
    saved = 1 - total / sum(stock)
    return saved, [LAYOUTS[best], *faster] if saved >= GAIN else []

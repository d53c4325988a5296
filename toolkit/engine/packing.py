"""Weights of large linear layers laid out for the products of decoding: a few tokens by a matrix that fits in no cache.

What bounds such a product is reading the matrix once. The stock kernels of x86 machines do so for one token; for two to
twenty they take two to four times as long. With a weight reordered once, oneDNN keeps close to the bound, so checking a
drafted token is as cheap as it should be. Results differ in rounding only.

Theirs -> ours: torch's own compiler does the same when it freezes a model. Ours leaves the model as it is: its modules
use packed weights within our forwards only. Nothing changes for other callers of the model.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.engine.facts import checksums

LARGE = 2**20  # elements; below, the matrix stays in cache and the call costs more than the kernel saves
AT_MOST = 4 * 2**30  # bytes of packed weights, which come on top of the model's own, unless asked for more


class PackedLinears:
    """Context manager: within it, the large linear layers of a model multiply by their packed weights.

    weights  the packed ones, in the order of `modules`: opaque tensors that nothing but oneDNN can read
    check    read the model's own weights at every `refresh`; False: writes that leave no version are not noticed
    """

    def __init__(self, model: Any, check: bool = True):
        self.model, self.check = model, check
        self.modules: list[nn.Linear] = []
        self.weights: list[Tensor] = []
        self._seen: list[tuple[int, int, int]] = []
        self.refresh()

    def refresh(self) -> None:
        """Pack all of them again if any of the model's weights has been written to, or replaced, since."""
        modules = packable(self.model)
        weights = [module.weight for module in modules]
        sums = checksums(weights) if self.check else [0] * len(weights)
        versions = [0 if weight.is_inference() else weight._version for weight in weights]
        seen = list(zip((weight.data_ptr() for weight in weights), versions, sums, strict=True))
        if seen != self._seen:
            with torch.inference_mode():
                self.weights = [torch.ops.mkldnn._reorder_linear_weight(m.weight.detach()) for m in modules]
            self.modules, self._seen = modules, seen

    def __enter__(self) -> None:
        for module, weight in zip(self.modules, self.weights, strict=True):
            vars(module)["forward"] = _Product(weight, module.bias)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module in self.modules:
            del vars(module)["forward"]


class _Product:
    """What stands in for a linear layer's forward: [..., D] -> [..., D']."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), self.weight, self.bias, "none", [], "")


def packable(model: Any) -> list[nn.Linear]:
    """The layers worth packing: large, dense, in float32, and with the stock forward."""
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and "forward" not in vars(module)  # somebody else's hook
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
        and module.weight.numel() >= LARGE
    ]


def packed_for(model: Any, cpu_packing: str | bool, check: bool = True) -> PackedLinears | None:
    """What a model uses; None: its own weights, because it is small, elsewhere, or too large for `auto`.

    check  as in `PackedLinears`
    """
    if cpu_packing in ("off", False) or model.device.type != "cpu" or not _supported():
        return None
    num_bytes = sum(module.weight.numel() * module.weight.element_size() for module in packable(model))
    if not num_bytes or (cpu_packing == "auto" and num_bytes > AT_MOST):
        return None
    return PackedLinears(model, check)


def _supported() -> bool:
    """Whether this torch was built with the operations."""
    operations = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in operations)

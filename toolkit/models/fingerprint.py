"""Which weights a model holds: an exact identity, and a sketch that tolerates another number format.

Both go over every entry once, in chunks, on the model's own device, and are remembered while the model lives. Adapters that are
at work count, too. The sketch of a tensor is its norm and a few sums of all its entries with fixed random signs. Rounding to a
coarser format moves such a sum by about the rounding times the norm, other weights by about the norm itself.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from toolkit.drafts.kinds import reads_states
from toolkit.engine.facts import checksums
from toolkit.files.atomic import content_hash

CHUNK = 2**14  # entries under one pattern of signs
BLOCK = 2**4  # chunks at once: what is copied to float64 or int64 at one time
SUMS = 4  # sums with signs per tensor
# Relative, of one entry.
ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SUBNORMAL = {"float16": 2.0**-25}  # absolute, of entries near zero
SUMMATION = 1e-9  # of a sum of the same numbers in another order, relative to the norm
MARGIN = 8.0  # standard errors of a sum, and more: the rounding of single entries is smaller than its bound
# Of a configuration: what changes no number that a forward pass gives. The number format counts as the model has it.
IMMATERIAL = (
    "_name_or_path", "transformers_version", "architectures", "dtype", "use_cache", "return_dict", "id2label", "label2id",
    "output_hidden_states", "output_attentions", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
Sketch = dict[str, Any]  # {"format": "float32", "tensors": {name: [shape, norm, sums]}, "adapters": rows, if any}
_chunk_signs = cache(lambda device: _signs("signs", CHUNK).to(device))
_REMEMBERED: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Weights:
    """Which weights a model holds: by an exact fingerprint, and by a sketch where number formats differ.

    A model without a state (tables of tests) has no sketch; what earlier versions recorded has none either.
    """

    fingerprint: str
    sketch: Sketch | None = None

    @classmethod
    def of(cls, model: Any) -> Weights:
        return cls(fingerprint(model), sketch(model) if hasattr(model, "state_dict") else None)

    @classmethod
    def recorded(cls, record: Mapping[str, Any], role: str = "draft") -> Weights | None:
        """The weights that a summary, a manifest or a head's config names for a role ("draft", "target"); None: none."""
        hash_ = record.get(f"{role}_fingerprint")
        return None if hash_ is None else cls(str(hash_), record.get(f"{role}_weights"))

    @classmethod
    def changed(cls, record: Mapping[str, Any], weights: Weights, role: str = "draft") -> str | None:
        """Why these are not the weights that a record names for a role; None: they are, or it names none."""
        recorded = cls.recorded(record, role)
        return None if recorded is None else recorded.other_than(weights)

    def facts(self, role: str = "draft") -> dict[str, Any]:
        """The fields that `recorded` reads."""
        return {f"{role}_fingerprint": self.fingerprint, f"{role}_weights": self.sketch}

    def other_than(self, other: Weights) -> str | None:
        """Why these are not the same weights, in whatever formats they are held; None: they are."""
        if self.fingerprint == other.fingerprint:
            return None
        both = f"fingerprint {self.fingerprint}, this one {other.fingerprint}"
        if self.sketch is None or other.sketch is None:
            return both
        reason = difference(self.sketch, other.sketch)
        return None if reason is None else f"{both}: {reason}"

    def not_of(self, model: Any) -> str | None:
        """Why these are not a model's weights, in whatever format it holds them; None: they are."""
        return None if self.fingerprint == fingerprint(model) else self.other_than(Weights.of(model))


def fingerprint(model: Any) -> str:
    """A short hash of all weights as float32: the same on every device, and in any format that holds them exactly.

    It is remembered while the model lives.
    """
    if not hasattr(model, "state_dict"):
        return content_hash(model.probs.tolist())
    return str(_once(model, "identity", lambda: content_hash([*_checksums(model), *adapters(model)])))


def configuration(model: Any) -> str:
    """A short hash of what the numbers of a forward pass depend on beside the weights and their format: RoPE, windows, caps."""
    config = model.config.to_dict() if hasattr(model, "config") else {}
    if reads_states(model):  # what such a draft has beside the config of its layers
        flags, settings = sorted(getattr(model, "flags", ())), getattr(model, "settings", None)
        config |= {"target_layers": list(model.target_layers), "flags": flags, "settings": settings}
    return content_hash({name: value for name, value in config.items() if name not in IMMATERIAL})


def computed_by(model: Any) -> list[str]:
    """All that the numbers of a forward pass depend on: weights, their number format and the configuration."""
    return [fingerprint(model), str(getattr(model, "dtype", None)), configuration(model)]


def sketch(model: Any) -> Sketch:
    """Norm and signed sums of every tensor, in float64, and the format they were taken in: what `difference` compares."""

    def compute() -> Sketch:
        at_work = {"adapters": rows} if (rows := adapters(model)) else {}
        return {"format": _format(model), "tensors": {n: _sketched(t) for n, t in _tensors(model)}, **at_work}

    result: Sketch = _once(model, "sketch", compute)
    return result


def tensor_sketch(name: str, tensor: Tensor) -> Sketch:
    """The sketch of one tensor, for `difference`."""
    return {"format": str(tensor.dtype).removeprefix("torch."), "tensors": {name: _sketched(tensor)}}


def adapters(model: Any) -> list[Any]:
    """What every layer with adapters of PEFT does with them: which are active or merged, by what factors; [] without any."""
    rows = []
    for name, layer in model.named_modules() if hasattr(model, "named_modules") else ():
        if isinstance(vars(layer).get("merged_adapters"), list):
            active, merged, scaling = layer.active_adapters, layer.merged_adapters, vars(layer).get("scaling") or {}
            rows.append([name, list(active), layer.disable_adapters, list(merged), dict(scaling)])
    return rows


def difference(left: Mapping[str, Any], right: Mapping[str, Any]) -> str | None:
    """Why two sketches are not of the same weights; None: they are, up to the coarser format's rounding.

    Warns, and compares nothing, if either is of quantised weights.
    """
    if "adapters" in left and "adapters" in right and left["adapters"] != right["adapters"]:
        return "other adapters are at work"
    formats = (left["format"], right["format"])
    if any(name not in ROUNDING for name in formats):
        warnings.warn(f"weights in {' and '.join(formats)} cannot be compared", RuntimeWarning, stacklevel=3)
        return None
    coarser = max(formats, key=lambda name: ROUNDING[name])
    if names := sorted(left["tensors"].keys() ^ right["tensors"].keys()):
        return f"only one of them has {names[0]}"
    for name, (shape, norm, sums) in left["tensors"].items():
        other_shape, other_norm, other_sums = right["tensors"][name]
        if list(shape) != list(other_shape):
            return f"{name} has shape {list(shape)} and {list(other_shape)}"
        if formats[0] == formats[1]:
            allowed = SUMMATION * max(norm, other_norm)
        else:
            near_zero = SUBNORMAL.get(coarser, 0.0) * math.sqrt(math.prod(shape))
            allowed = MARGIN * (ROUNDING[coarser] * max(norm, other_norm) + near_zero)
        if not all(abs(a - b) <= allowed for a, b in zip([norm, *sums], [other_norm, *other_sums], strict=True)):
            return f"{name} differs"
    return None


def _once(model: Any, what: str, compute: Callable[[], Any]) -> Any:
    """Compute a result once, until the weights or the adapters at work are others."""
    tensors = _tensors(model)
    formats = [(name, t.dtype, t.shape) for name, t in tensors]
    seen = [formats, checksums([t for _, t in tensors]), adapters(model)]
    results = _REMEMBERED.setdefault(model, {})
    if results.get("seen") != seen:
        results.clear()
        results["seen"] = seen
    if what not in results:
        results[what] = compute()
    return results[what]


def _tensors(model: Any) -> list[tuple[str, Tensor]]:
    """All tensors by name, as if nothing had been compiled; those of torch's quantised layers come in tuples."""
    named = [
        (name.replace("_orig_mod.", ""), tensor)
        for name, entry in model.state_dict(keep_vars=True).items()
        for tensor in (entry if isinstance(entry, tuple) else (entry,))
        if isinstance(tensor, Tensor)
    ]
    return sorted(named, key=lambda pair: pair[0])


def _format(model: Any) -> str:
    """The coarsest format of the weights, or what quantised them."""
    if getattr(model.config, "quantization_config", None) is not None:
        return "quantised"
    names = {str(t.dtype).removeprefix("torch.") for _, t in _tensors(model) if t.dim() > 1}
    unknown = sorted(names - ROUNDING.keys())
    return unknown[0] if unknown else max(names, key=lambda name: ROUNDING[name], default="float32")


@torch.no_grad()
def _sketched(tensor: Tensor) -> list[Any]:
    sums, squares = torch.zeros(SUMS, dtype=torch.float64, device="cpu"), 0.0
    patterns = _chunk_signs(tensor.device)
    all_flips = _signs("flips", -(-tensor.numel() // CHUNK)).to(tensor.device)  # [chunks, SUMS]
    for first, block in _blocks(tensor, torch.float64):
        flips = all_flips[first : first + len(block)]
        sums += ((block @ patterns) * flips).sum(0).cpu()
        squares += float((block * block).sum())
    return [list(tensor.shape), math.sqrt(squares), sums.tolist()]


@torch.no_grad()
def _checksums(model: Any) -> list[Any]:
    """Name, shape and an exact checksum of each tensor: integers, so that the order of summation does not matter."""
    rows = []
    for name, tensor in _tensors(model):
        total = 0
        multipliers = _multipliers(tensor.device)
        for first, block in _blocks(tensor, torch.float32):
            bits = block.view(torch.int32).to(torch.int64)
            for i, row in enumerate((bits * multipliers).sum(1).tolist()):
                total = (total + row * (2 * (first + i) + 1)) % 2**64
        rows.append([name, list(tensor.shape), total])
    return rows


def _blocks(tensor: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Blocks (index of the first chunk, chunks [n, CHUNK]) of all entries, zeros after the last."""
    flat = (tensor.dequantize() if tensor.is_quantized else tensor.detach()).reshape(-1)
    for start in range(0, flat.numel(), CHUNK * BLOCK):
        block = flat[start : start + CHUNK * BLOCK].to(dtype) + 0  # minus zero becomes zero
        block = torch.nn.functional.pad(block, (0, -len(block) % CHUNK))
        yield start // CHUNK, block.view(-1, CHUNK)


@cache
def _multipliers(device: torch.device) -> Tensor:
    """Odd random integers [CHUNK], the same everywhere and always."""
    bytes_ = hashlib.shake_256(b"multipliers").digest(8 * CHUNK)
    return (torch.frombuffer(bytearray(bytes_), dtype=torch.int64) | 1).to(device)


def _signs(name: str, count: int) -> Tensor:
    """The first rows of a fixed table of signs [count, SUMS], in float64."""
    bytes_ = hashlib.shake_256(name.encode()).digest(count * SUMS)
    bits = torch.frombuffer(bytearray(bytes_), dtype=torch.uint8) & 1
    return (2.0 * bits.double() - 1).view(count, SUMS)

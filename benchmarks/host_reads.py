"""Finds code that makes the host wait for the device.

On a GPU that is PyTorch's own business (`set_sync_debug_mode`). On a CPU nothing waits, so what would wait on a GPU is
recognised as it is called. Reading a value is recognised (`bool`, `item`, `tolist`), and results whose size depends on
values (`nonzero`, boolean masks). So are new tensors from Python values, except by `toolkit.engine.device`. The answers of a
`Gate` are what waiting is for, and are let through. Not seen on a CPU: `.cpu()`, and indexing with Python lists.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import toolkit
from toolkit.engine.device import Gate, floats_on, most_of, tensor_on
from toolkit.sampling import not_below, nucleus_of_few

HOME = Path(toolkit.__file__).parent
aten = torch.ops.aten
READERS = ("__bool__", "__int__", "__float__", "__index__", "__array__", "item", "tolist", "numpy")
READS = {
    aten.equal.default: "the host compares tensors",
    aten.nonzero.default: "the size of the result depends on values",
    aten.masked_select.default: "the size of the result depends on values",
    aten.repeat_interleave.Tensor: "the size of the result depends on values",
    aten._unique2.default: "the size of the result depends on values",
}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
ALLOWED = {
    Gate._answer.__code__,
    tensor_on.__code__,
    floats_on.__code__,
    most_of.__code__,  # reads on CPUs alone
    not_below.__code__,  # likewise
    nucleus_of_few.__code__,
}


class HostRead(RuntimeError):
    """The host would wait for a GPU here."""


@contextmanager
def no_host_reads(device: torch.device) -> Iterator[None]:
    """Raises a RuntimeError (on CPUs a HostRead) where something inside makes the host wait for the device."""
    if device.type == "cuda":
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return
    with ExitStack() as watched:
        for name in READERS:  # in inference mode these do not show as operations
            reader = _refused(f"the host reads a value ({name})", getattr(Tensor, name))
            watched.enter_context(patch.object(Tensor, name, reader))
        maker = _refused("a tensor is made of Python values", torch.tensor)
        watched.enter_context(patch.object(torch, "tensor", maker))
        watched.enter_context(_Watching())
        yield


def where(error: BaseException) -> str:
    """The innermost line of the toolkit that an error passed through: file, number and text."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(HOME)]
    if not frames:
        return "outside of the toolkit"
    last = frames[-1]
    return f"toolkit/{Path(last.filename).relative_to(HOME).as_posix()}:{last.lineno}: {last.line}"


class _Watching(TorchDispatchMode):
    """Looks at every operation that runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reason = READS.get(func)
        if func in INDEXED and any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]):
            reason = "the size of a boolean mask's result depends on values"
        if reason and not _allowed():
            raise HostRead(f"{reason} ({func})")
        return func(*args, **(kwargs or {}))


def _refused(reason: str, original: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _allowed():
            raise HostRead(reason)
        return original(*args, **kwargs)

    return call


def _allowed() -> bool:
    """Whether a function that may wait is among the callers."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in ALLOWED:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False

"""Forwards of recurring shapes, recorded once and replayed: CUDA graphs on GPUs, TorchScript traces on CPUs.

A decoding loop runs the same few shapes over and over. For small models, launching the operations takes most of a
forward's time. A captured forward launches them all at once. What is replayed is the model's own forward, operation for
operation. Models that branch on values (`static_flow`) are run as they are; so is one whose first replays differ from
the forward itself.

Shapes: b rows, T tokens of a block, S visible slots, V vocabulary, D hidden size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

Forward = Callable[..., tuple[Tensor, Tensor]]  # inputs, then buffers -> logits [b, T, V], hidden [b, T, D]
SHAPES = 4096  # whose uses are counted; more than these, and the rare ones are forgotten
PROOFS = 2  # replays of a new capture that are compared with the forward itself
# Of that comparison, relative: a wrong branch is off by far more, bfloat16 by less. In float64 a replay that goes through
# float32 somewhere is wrong, too: traces of Gemma-2 do.
TOLERANCE = 1e-2
TOLERANCE_FLOAT64 = 1e-10


class Captured(Protocol):
    """A recorded forward."""

    def __call__(self, inputs: Sequence[Tensor], buffers: Sequence[Tensor]) -> tuple[Tensor, Tensor]: ...


class TracedForward:
    """A TorchScript trace. Buffers are arguments: any session with buffers of these shapes can use it."""

    after: ClassVar[int] = 32  # uses before a shape is captured: by then a trace costs about what it saves
    layers: ClassVar[int] = 128  # of all traces of a model: each takes 2 to 3 MB per layer, whatever the layer's size
    # TorchScript does not free the memory of a dropped trace (torch 2.13, toy target: 6 MB each, 3.5 if never run). So
    # the traces ever made are bounded, as a multiple of those that are kept.
    replaced: ClassVar[float] = 1.5

    def __init__(self, forward: Forward, inputs: Sequence[Tensor], buffers: Sequence[Tensor]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sizes become constants, as they should
            held = [forward]  # a trace keeps the function that was traced, and that one its session's buffers
            self.traced = torch.jit.trace(lambda *tensors: held[0](*tensors), (*inputs, *buffers), check_trace=False)
            held.clear()

    def __call__(self, inputs: Sequence[Tensor], buffers: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self.traced(*inputs, *buffers)


class StaticForward:
    """A forward on inputs and buffers that stay where they are: what a CUDA graph needs, and all of it but the graph.

    Bound to the buffers it was captured with. Results are copies: the next replay overwrites the originals.
    """

    after: ClassVar[int] = 2
    replaced: ClassVar[float] = float("inf")
    layers: ClassVar[int] = 4096  # of all captures of a model

    def __init__(self, forward: Forward, inputs: Sequence[Tensor], buffers: Sequence[Tensor]):
        self.inputs = [tensor.clone() for tensor in inputs]
        self.buffers = list(buffers)
        self.run = lambda: forward(*self.inputs, *self.buffers)

    def __call__(self, inputs: Sequence[Tensor], buffers: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        assert all(ours is theirs for ours, theirs in zip(self.buffers, buffers, strict=True))
        for static, tensor in zip(self.inputs, inputs, strict=True):
            static.copy_(tensor)
        logits, hidden = self.run()
        return logits.clone(), hidden.clone()


class GraphForward(StaticForward):
    """The same as one CUDA graph. Graphs of a process share one memory pool: they never run at the same time."""

    pool: ClassVar[Any] = None

    def __init__(self, forward: Forward, inputs: Sequence[Tensor], buffers: Sequence[Tensor]):
        super().__init__(forward, inputs, buffers)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries choose and allocate on their first calls
                self.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if GraphForward.pool is None:
            GraphForward.pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=GraphForward.pool):
            results = self.run()

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return results

        self.run = replay


class Captures:
    """The captured forwards of one model, by shape.

    A shape that recurs is captured. Once there are as many as are kept, it replaces the least used one, if it has been
    used more than twice as often. Otherwise, in a loop over too many shapes, captures would only replace each other.

    num_layers  of the model: what a capture costs
    refusals    why this model's forward cannot be captured, if it cannot; shared by all captures of a model
    """

    def __init__(
        self,
        kind: type[TracedForward] | type[StaticForward],
        num_layers: int = 1,
        refusals: list[str] | None = None,
    ):
        self.kind, self.num_layers = kind, num_layers
        self.most = max(kind.layers // num_layers, 4)
        self.refusals: list[str] = [] if refusals is None else refusals
        self.after = kind.after  # uses before a shape is captured
        self.made = 0
        self.uses: dict[tuple[int, ...], int] = {}
        self.unproven: dict[tuple[int, ...], int] = {}  # replays still to be compared with the forward itself
        self.known: dict[tuple[int, ...], Captured] = {}

    @property
    def refused(self) -> bool:
        """Whether this model's forward cannot be captured."""
        return bool(self.refusals)

    def afresh(self) -> Captures:
        """Empty ones of the same model, for other buffers."""
        return Captures(self.kind, self.num_layers, self.refusals)

    @property
    def fixed_buffers(self) -> bool:
        """Whether captures belong to the buffers they were made with."""
        return issubclass(self.kind, StaticForward)

    def run(
        self, key: tuple[int, ...], forward: Forward, inputs: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The forward's result: replayed if this shape has been captured, which happens once it recurs."""
        captured = self.known.get(key)
        self.uses[key] = self.uses.get(key, 0) + 1
        if len(self.uses) > SHAPES:
            self._forget()
        if captured is not None:
            return (
                self._proven(key, captured, forward, inputs, buffers)
                if self.unproven[key]
                else captured(inputs, buffers)
            )
        if self.uses[key] >= self.after and not self.refused and self._has_room(key):
            self._capture(key, forward, inputs, buffers)
        return forward(*inputs, *buffers)

    def _has_room(self, key: tuple[int, ...]) -> bool:
        """Whether this shape may be captured; makes room for it if it is worth more than the least used one."""
        if self.made >= self.kind.replaced * self.most:
            return False
        if len(self.known) < self.most:
            return True
        least = min(self.known, key=lambda known: self.uses[known])
        if self.uses[key] <= 2 * self.uses[least]:
            return False
        del self.known[least], self.unproven[least]
        return True

    def _forget(self) -> None:
        """Keep the counts of captured shapes and of the more frequent half of the others."""
        ranked = sorted(self.uses, key=lambda key: (key in self.known, self.uses[key]), reverse=True)
        self.uses = {key: self.uses[key] for key in ranked[: max(SHAPES // 2, len(self.known))]}

    def _capture(
        self, key: tuple[int, ...], forward: Forward, inputs: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> None:
        self.made += 1
        try:
            self.known[key], self.unproven[key] = self.kind(forward, inputs, buffers), PROOFS
        except Exception as error:  # whatever a model's code does when it is captured: its forward itself works
            self._refuse(str(error).strip().split("\n")[0])

    def _proven(
        self,
        key: tuple[int, ...],
        captured: Captured,
        forward: Forward,
        inputs: Sequence[Tensor],
        buffers: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """What the forward itself gives; the capture counts as proven after a few replays like it."""
        self.unproven[key] -= 1
        try:
            replayed = captured(inputs, buffers)
        except Exception as error:  # operations recorded with types or sizes that were those of one call only
            self._refuse(str(error).strip().split("\n")[-1])
            return forward(*inputs, *buffers)
        computed = forward(*inputs, *buffers)
        if not all(_alike(ours, truth) for ours, truth in zip(replayed, computed, strict=True)):
            self._refuse("a replayed forward differs from the model's own")
        return computed

    def _refuse(self, reason: str) -> None:
        self.refusals.append(reason)
        self.known.clear()
        warnings.warn(f"this model's forwards are run one by one: {reason}", RuntimeWarning, stacklevel=3)


def _alike(replayed: Tensor, computed: Tensor) -> bool:
    """Whether a replay gave what it should, in dtype and shape, too."""
    if replayed.dtype != computed.dtype or replayed.shape != computed.shape:
        return False
    tolerance = TOLERANCE_FLOAT64 if computed.dtype == torch.float64 else TOLERANCE
    numbers = computed[torch.isfinite(computed)]  # logits may be minus infinity, or not numbers at all
    largest = float(numbers.abs().max()) if numbers.numel() else 0.0
    return torch.allclose(replayed, computed, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def static_flow(model: Any) -> bool:
    """Whether a model's forward runs the same operations whatever the values: no routing, no position-dependent rope."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)]
    routed = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return not routed and not {"dynamic", "longrope"} & set(kinds)


def captures_for(
    device: torch.device, cuda_graphs: str | bool, cpu_traces: str | bool, num_layers: int
) -> Captures | None:
    """What a model on this device uses; None: every forward is run as it is."""
    if device.type == "cuda":
        return Captures(GraphForward, num_layers) if _wanted(cuda_graphs) else None
    return Captures(TracedForward, num_layers) if device.type == "cpu" and _wanted(cpu_traces) else None


def _wanted(option: str | bool) -> bool:
    return option in ("auto", "on", True)

"""Forwards of recurring shapes, captured once and replayed as CUDA graphs.

A decoding loop runs the same few shapes over and over. For small models, launching the operations takes most of a
forward's time. A captured forward launches them all at once. What is replayed is the model's own forward, operation for
operation. Models that branch on values, or that have code of which nothing is known (adapters), are run as they are
(`static_flow`); so is one whose first replays differ from the forward itself.

A capture holds the very tensors, modules, hooks and Python values that were there when it was made. It sees what is written
into a tensor. It does not see another tensor or module in its place (`load_state_dict(assign=True)`, `model.half()`), a hook
that is added later, or an attribute or a key of the config that is set. So captures of a model are dropped once its
`CaptureGuard` is another. They belong to one session, whose keys and values they write, and are dropped if these are replaced.

Shapes: b rows, T tokens of a block, S visible slots, V vocabulary, D hidden size.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

Forward = Callable[..., tuple[Tensor, Tensor]]  # inputs -> logits [b, T, V], hidden [b, T, D]
SHAPES = 4096  # whose uses are counted; more than these, and the rare ones are forgotten
PROOFS = 2  # replays of a new capture that are compared with the forward itself
# Of that comparison, relative: a wrong branch is off by far more, bfloat16 by less. In float64 a replay that goes through
# float32 somewhere is wrong, too.
TOLERANCE = 1e-2
TOLERANCE_FLOAT64 = 1e-10
# Their modules read their attributes and config, nothing else.
STOCK = ("torch", "transformers", "bitsandbytes", "toolkit")
PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device}
# Attributes that torch gives every module, and the mark of transformers' recorders.
INTERNAL = frozenset(vars(nn.Module())) | {"_output_capturing_hooks_installed"}
# Modules whose hooks do the same in every forward pass: those that stay after `output_hidden_states=True`, and those that
# scatter the logits of a reduced vocabulary.
STEADY = ("transformers.utils.output_capturing", "toolkit.models.reduced")


class StaticForward:
    """A forward on inputs that stay where they are: what a CUDA graph needs, and all of it but the graph.

    Results are copies: the next replay overwrites the originals.
    """

    after: ClassVar[int] = 2  # uses before a shape is captured
    layers: ClassVar[int] = 4096  # of all captures of a session

    def __init__(self, forward: Forward, inputs: Sequence[Tensor]):
        inputs = self.inputs = [tensor.clone() for tensor in inputs]
        self.run = lambda: forward(*inputs)

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        for static, tensor in zip(self.inputs, inputs, strict=True):
            static.copy_(tensor)
        logits, hidden = self.run()
        return logits.clone(), hidden.clone()


class GraphForward(StaticForward):
    """A static forward as one CUDA graph. Graphs of a device share one memory pool: they never run at the same time.

    A pool ends with its last graph; torch refuses its handle from then on. A capture that fails leaves its pool, the current
    stream and the default generator in the state of capturing (torch 2.11): the pool is not used again, the others are mended.
    """

    alive: ClassVar[WeakSet[GraphForward]] = WeakSet()
    graph: torch.cuda.CUDAGraph

    def __init__(self, forward: Forward, inputs: Sequence[Tensor]):
        super().__init__(forward, inputs)
        self.device = inputs[0].device
        stream, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries choose and allocate on their first calls
                self.run()
        stream.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in GraphForward.alive if other.device == self.device), None)
        collecting = gc.isenabled()
        gc.disable()  # a graph that is freed while another one is captured ends the capture
        try:
            with torch.cuda.graph(graph, pool=pool):
                results = self.run()
        except Exception:
            GraphForward.alive.clear()
            torch.cuda.set_stream(stream)
            generator = torch.cuda.default_generators[stream.device.index]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            if collecting:
                gc.enable()

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return results

        self.run, self.graph = replay, graph
        GraphForward.alive.add(self)


class Captures:
    """The captured forwards of one session, by shape.

    A shape that recurs is captured. Once the most that are kept are there, it replaces the least used one, if it has been
    used more than twice as often. Otherwise, in a loop over too many shapes, captures would only replace each other.

    num_layers  of the model: what a capture costs
    refusals    why this model's forward cannot be captured, if it cannot; shared by all captures of a model
    """

    def __init__(self, kind: type[StaticForward], num_layers: int = 1, refusals: list[str] | None = None):
        self.kind, self.num_layers = kind, num_layers
        self.most = max(kind.layers // num_layers, 4)
        self.refusals: list[str] = [] if refusals is None else refusals
        self.uses: dict[tuple[int, ...], int] = {}
        self.unproven: dict[tuple[int, ...], int] = {}  # replays still to be compared with the forward itself
        self.known: dict[tuple[int, ...], StaticForward] = {}

    @property
    def refused(self) -> bool:
        """Whether this model's forward cannot be captured."""
        return bool(self.refusals)

    def empty(self) -> Captures:
        """Captures of the same model for other keys and values."""
        return Captures(self.kind, self.num_layers, self.refusals)

    def run(self, key: tuple[int, ...], forward: Forward, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The forward's result: replayed if this shape has been captured, which happens once it recurs."""
        captured = self.known.get(key)
        if key not in self.uses and len(self.uses) >= SHAPES:
            self._forget()
        self.uses[key] = self.uses.get(key, 0) + 1
        if captured is not None:
            return self._proven(key, captured, forward, inputs) if self.unproven[key] else captured(inputs)
        if self.uses[key] >= self.kind.after and not self.refused and self._has_room(key):
            try:
                self.known[key], self.unproven[key] = self.kind(forward, inputs), PROOFS
            except Exception as error:  # whatever a model's code does when it is captured: its forward itself works
                self._refuse(str(error).strip().split("\n")[0])
        return forward(*inputs)

    def _has_room(self, key: tuple[int, ...]) -> bool:
        """Whether this shape may be captured; makes room for it if it is worth more than the least used one."""
        if len(self.known) < self.most:
            return True
        least = min(self.known, key=lambda shape: self.uses[shape])
        if self.uses[key] <= 2 * self.uses[least]:
            return False
        del self.known[least], self.unproven[least]
        return True

    def _forget(self) -> None:
        """Keep the counts of captured shapes and of the more frequent half of the others."""
        ranked = sorted(self.uses, key=lambda key: (key in self.known, self.uses[key]), reverse=True)
        self.uses = {key: self.uses[key] for key in ranked[: max(SHAPES // 2, len(self.known))]}

    def _proven(
        self, key: tuple[int, ...], captured: StaticForward, forward: Forward, inputs: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute what the forward itself gives; the capture counts as proven after a few replays like it."""
        self.unproven[key] -= 1
        try:
            replayed = captured(inputs)
        except Exception as error:  # operations captured with types or sizes that were those of one call only
            self._refuse(str(error).strip().split("\n")[-1])
            return forward(*inputs)
        computed = forward(*inputs)
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
    """Whether a model's forward runs the same operations until its attributes change, whatever the values of tensors.

    No routing, no position-dependent rope, and no module of an unknown package: such a one may read anything.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)]
    routed = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    stock = all(type(module).__module__.partition(".")[0] in STOCK for module in model.modules())
    return stock and not routed and not {"dynamic", "longrope"} & set(kinds)


class CaptureGuard:
    """The modules, tensors, hooks and modes of a model at one time; two are equal if a capture of one serves the other.

    What else a forward reads is compared, too: the modules' attributes, code and configs. The objects themselves are held,
    so that nothing new can come to lie where they were.
    """

    def __init__(self, model: nn.Module):
        self.modules = list(model.modules())
        self.tensors = [
            tensor
            for module in self.modules
            for held in (module._parameters, module._buffers)
            for tensor in held.values()
            if tensor is not None
        ]
        self.hooks = [hook for module in self.modules for hook in _hooks(module)]
        tensors = [
            (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.requires_grad)
            for tensor in self.tensors
        ]
        modes = [module.training for module in self.modules]
        self.objects: list[Any] = []
        self.configs: dict[int, Any] = {}  # contents by identity
        reads = [self._read(_attributes(module)) for module in self.modules]
        same = (list(map(id, self.modules)), list(map(id, self.hooks)), globally_hooked())
        self.facts = (*same, tensors, modes, reads, self.configs)
        self.asks_gradients = any(tensor.requires_grad for tensor in self.tensors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CaptureGuard) and self.facts == other.facts

    __hash__ = None  # type: ignore[assignment]

    def _read(self, value: Any) -> Any:
        """What two values are compared by: the contents of plain ones, containers and configs, else the object itself."""
        if type(value) in PLAIN:
            return value
        if isinstance(value, dict):
            return [(key, self._read(entry)) for key, entry in value.items()]
        if isinstance(value, list | tuple | set):
            return [self._read(entry) for entry in value]
        self.objects.append(value)
        if hasattr(value, "get_text_config") and id(value) not in self.configs:
            self.configs[id(value)] = self._read(vars(value))
        return id(value)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module's forward may read beside tensors and submodules; its code is the class's, unless that was replaced."""
    own = {name: value for name, value in vars(module).items() if name not in INTERNAL}
    return {**own, "forward": type(module).forward}


def _hooks(module: nn.Module) -> list[Any]:
    """Whatever runs with a module's forward, or instead of it, and may change between two forward passes."""
    own = vars(module).get("forward")
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *([own] if own is not None else [])]
    return [hook for hook in hooks if getattr(hook, "__module__", None) not in STEADY]


def globally_hooked() -> bool:
    """Whether hooks for all modules of this process are set: what is replayed would pass them by."""
    return bool(global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks)

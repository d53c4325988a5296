"""The engine: what decoding owns and keeps for a pair, from one call to the next.

Caches (`Sessions`), captured forward passes and loaded heads live here; a `ModelPair` holds models and a
tokenizer, nothing else. There is one engine per pair (`engine_of`), made again if the pair's models or options are replaced. It
goes when the pair goes. Calls at the same time get caches of their own; forward passes of one model then run one after another.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

from toolkit.config.values import check_ranges
from toolkit.drafts.kinds import kind_of, reads_states
from toolkit.engine.base import Session
from toolkit.engine.capture import CaptureGuard, Captures, GraphForward, StaticForward, globally_hooked, static_flow
from toolkit.engine.facts import check_mode, forwards_lock, vocab_size
from toolkit.engine.packing import PackedLinears

CAPACITY_GRANULE = 128  # caches come in multiples of it, so that few shapes recur
IDLE = 3  # sets of caches that wait for another call of their number of rows, where captures belong to them
OnOff = Literal["auto", "on", "off"] | bool


@dataclass(frozen=True)
class EngineOptions:
    """How forward passes are run. None of it changes results beyond rounding.

    cuda_graphs    "auto" or "off": forward passes of recurring shapes are captured as CUDA graphs and replayed
    self_check     "auto" or "off": a model's architecture is tried on a tiny copy before its first text is decoded. It
                   is refused if it is decoded wrong (`toolkit.engine.selfcheck`). off: it is decoded on trust, with a
                   warning
    packed         "auto": large float32 and bfloat16 linear layers on a CPU keep a second copy of their weights, laid out for
                   products with a few tokens, where this processor gains by it (`toolkit.engine.packing`); together at most a
                   quarter of the free memory. "on": all that can, small ones, too; "off": none
    writable       weights may be written between two calls: packed ones are compared with the model's own at the start of every
                   call, by reading these once. False: the caller promises that nobody writes past torch's count of writes

    Models whose parameters ask for gradients, that have hooks, or that lie on several devices, are never captured.
    Models with modules of other packages than torch and transformers (adapters, code of one's own) are never captured.
    """

    cuda_graphs: OnOff = "auto"
    self_check: Literal["auto", "off"] | bool = "auto"
    packed: OnOff = "auto"
    writable: bool = True

    def __post_init__(self) -> None:
        check_ranges(self)


class Models(Protocol):
    """What the engine asks of a pair."""

    target: Any
    drafts: Sequence[Any]
    options: EngineOptions


@dataclass(eq=False)
class Sessions:
    """The caches of one call: the target's, and one per draft model."""

    target: Session
    drafts: list[Session]

    @property
    def every(self) -> list[Session]:
        """All caches, the target's first."""
        return [self.target, *self.drafts]

    @property
    def fixed_rows(self) -> bool:
        """Whether some captured forward pass belongs to these caches."""
        return any(session.fixed_rows for session in self.every)

    @property
    def cache_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(session.cache_bytes for session in self.every)

    def fits(self, num_rows: int, capacity: int) -> bool:
        """Whether these caches have `num_rows` rows, and room for `capacity` tokens in each."""
        return all(s.index.num_rows == num_rows and s.index.capacity >= capacity for s in self.every)


class Engine:
    """What decoding keeps for a target and its drafts.

    models   the target first
    heads    acceptance heads loaded and checked so far (`toolkit.acceptance.folder`)
    captures  per model, once it was first used: empty ones, which each of its caches begins with; None: it is not captured
    linears  per model: its packed weights; None for models that bring their own sessions
    idle     caches that wait for another call
    capture_kind  how forward passes are captured; None: as the options and the device say
    """

    def __init__(self, models: Sequence[Any], options: EngineOptions):
        self.models, self.options = tuple(models), options
        self.output_sizes = list(map(vocab_size, models))
        self.heads: dict[tuple[object, ...], Any] = {}
        self.captures: list[Captures | None] = []
        self.linears = [
            None if hasattr(model, "open_session") else PackedLinears(model, options.packed, options.writable)
            for model in self.models
        ]
        self.idle: list[Sessions] = []
        self.capture_kind: type[StaticForward] | None = None
        self._guards: list[CaptureGuard | None] = []  # of the models, when the captures were begun
        self._checked = False  # whether the architectures have been
        self._lock = threading.Lock()

    def serves(self, pair: Models) -> bool:
        """Whether this engine was made for these very models, of these output sizes, and options."""
        models = (pair.target, *pair.drafts)
        same = len(models) == len(self.models) and all(a is b for a, b in zip(models, self.models, strict=True))
        return same and pair.options == self.options and self.output_sizes == list(map(vocab_size, models))

    @property
    def packed(self) -> bool:
        """Whether some layer of some model multiplies by packed weights, as of the last call."""
        return any(linears is not None and linears.products for linears in self.linears)

    @contextmanager
    def sessions(self, num_rows: int, capacity: int) -> Iterator[Sessions]:
        """Caches for the length of a `with`; given back at its end, dropped if it ends in an error."""
        opened = self.open(num_rows, capacity)
        yield opened
        self.close(opened)

    def open(self, num_rows: int, capacity: int, captured: bool = True) -> Sessions:
        """Empty caches for the target and for each draft, of at least this capacity.

        captured  False: forward passes are run as they are; for work whose shapes hardly recur

        Captured forward passes belong to the caches they were made with. So caches of an earlier call are used again.
        Raises InputError if a model is in training mode, or of an architecture that is not decoded right.
        """
        capacity = -(-capacity // CAPACITY_GRANULE) * CAPACITY_GRANULE
        with self._lock:
            self._check()
            self._prepare()
            fitting = (sessions for sessions in self.idle if captured and sessions.fits(num_rows, capacity))
            waiting = next(fitting, None)
            if waiting is not None:
                self.idle.remove(waiting)
                return waiting
            own = [captures.empty() if captures and captured else None for captures in self.captures]
            layers = next((model.target_layers for model in self.models[1:] if reads_states(model)), ())
            target = open_session(self.models[0], num_rows, capacity, own[0], kept_layers=layers)
            drafts = [
                open_session(model, num_rows, capacity, captures, target=target)
                for model, captures in zip(self.models[1:], own[1:], strict=True)
            ]
        for draft, session in zip(self.models[1:], drafts, strict=True):
            session.clips_tokens = vocab_size(draft) < vocab_size(self.models[0])
        for linears, session in zip(self.linears, [target, *drafts], strict=True):
            session.linears = linears
        return Sessions(target, drafts)

    def close(self, sessions: Sessions) -> None:
        """Give caches back. The last few sets are kept if captured forward passes belong to them; memory of others is free."""
        if not sessions.fixed_rows:
            return
        for session in sessions.every:
            for row in range(session.index.num_rows):
                session.reset(row)
        with self._lock:
            self.idle[:] = [sessions, *self.idle][:IDLE]

    def _check(self) -> None:
        """Check the modes of all models, on every call, and their architectures once."""
        roles = ["target", *["draft"] * (len(self.models) - 1)]
        for model, role in zip(self.models, roles, strict=True):
            check_mode(model, role)
            if not self._checked and not hasattr(model, "open_session") and kind_of(model).session is None:
                if self.options.self_check in ("off", False):
                    name = type(model).__name__
                    warnings.warn(f"self_check=off: {name} is decoded on trust", RuntimeWarning, stacklevel=5)
                    continue
                from toolkit.engine.selfcheck import check_architecture  # transformers, only where it is needed

                check_architecture(model, role)
        self._checked = True

    def _prepare(self) -> None:
        """Prepare captures and packed weights of every model; drop what belongs to modules or tensors that were replaced."""
        guards = [_guard(model) if self._kind(model) else None for model in self.models]
        if guards != self._guards:
            self.captures, self.idle, self._guards = [], [], guards
        self.captures = self.captures or list(map(self._captures, guards, self.models))
        for model, linears in zip(self.models, self.linears, strict=True):
            if linears is not None:
                with forwards_lock(model):
                    linears.refresh()

    def _kind(self, model: Any) -> type[StaticForward] | None:
        """How a model's forward passes are captured, if they are."""
        graphs = model.device.type == "cuda" and self.options.cuda_graphs not in ("off", False)
        return self.capture_kind or (GraphForward if graphs else None)

    def _captures(self, guard: CaptureGuard | None, model: Any) -> Captures | None:
        kind = self._kind(model)
        if kind is None or not _constant(guard, model) or globally_hooked() or not static_flow(model):
            return None
        return Captures(kind, model.config.get_text_config().num_hidden_layers)


_ENGINES: WeakKeyDictionary[Models, Engine] = WeakKeyDictionary()
_MAKING = threading.Lock()


def engine_of(pair: Models, earlier: Engine | None = None) -> Engine:
    """The pair's engine, the same in every call until the pair's models, their output sizes or options are others.

    earlier  the engine of an earlier pair, which this one takes over if it serves it
    """
    with _MAKING:
        engine = _ENGINES.get(pair, earlier)
        if engine is None or not engine.serves(pair):
            engine = Engine((pair.target, *pair.drafts), pair.options)
        _ENGINES[pair] = engine
        return engine


def _guard(model: Any) -> CaptureGuard | None:
    """What captures of a model depend on; None for models that bring their own sessions."""
    if hasattr(model, "open_session"):
        return None
    with forwards_lock(model):  # no forward pass is under way, which adds hooks of its own
        return CaptureGuard(model)


def _constant(guard: CaptureGuard | None, model: Any) -> bool:
    """Whether a model is a transformers one on one device, without hooks and gradients: every forward pass is the same."""
    one_device = len(set(getattr(model, "hf_device_map", {0: 0}).values())) <= 1
    return guard is not None and one_device and not guard.hooks and not guard.asks_gradients


def open_session(
    model: Any,
    num_rows: int,
    capacity: int,
    captures: Captures | None = None,
    *,
    kept_layers: Sequence[int] = (),
    target: Session | None = None,
) -> Session:
    """The session of a model: its own, if it brings one (`open_session`), else the one for Hugging Face models.

    captures     forward passes of recurring shapes are replayed through them (Hugging Face models only); None: never
    kept_layers  layers whose states stay in the cache, for drafts that read them
    target       of a draft that reads the target's states: the target's session
    """
    own = getattr(model, "open_session", None)
    if own is not None:
        session: Session = own(num_rows, capacity)
        return session
    if kind_of(model).session is not None:
        session = kind_of(model).part("session")(model, num_rows, capacity, captures, target)
        return session
    from toolkit.engine.hf import HFSession  # transformers is imported only where it is needed

    return HFSession(model, num_rows, capacity, captures, kept_layers)

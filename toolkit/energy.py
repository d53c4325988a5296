"""Energy of a window of work, from the devices' own cumulative counters. Never from power samples, never an estimate.

    meter = EnergyMeter("cuda:0")    # or all devices of a pair: EnergyMeter(pair.devices)
    meter.measure_idle(5)            # seconds of doing nothing, before the work
    with meter:
        work()
    meter.energy                     # Energy(joules=..., idle_watts=..., seconds=..., source="NVML ...")

    joules = sum over devices of (counter at the end - counter at the start)

Idle power is reported beside, and nothing is subtracted: `Energy.above_idle` says what is left without it.
GPUs are read through zeus if it is installed, else through NVML (nvidia-ml-py); CPUs through RAPL in /sys/class/powercap.
A counter sees the whole GPU or the whole package, other programs included. On GPUs it advances in steps of up to a
tenth of a second, so windows should be long. Nothing that scores a text belongs into one. If the counter of one device
cannot be read, there is no sum.

Paper: MTAD (arXiv:2407.09722) measures joules per token. Needs none of these libraries, and no torch, to be imported.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from types import TracebackType
from typing import Any, Protocol

from toolkit.errors import InputError
from toolkit.lines import first_line

POWERCAP = Path("/sys/class/powercap")
SLICED = "GPU {} is cut into slices (MIG): its counter is the whole card's"
POLL_SECONDS = 20.0  # between looks at a counter that wraps: it takes minutes to go round


@dataclass(frozen=True)
class Energy:
    """What a window took.

    joules        of all devices, idle power included; None: not available, `source` says why
    idle_watts    mean power of all devices while nothing was done; None: not measured
    seconds       length of the window
    source        which counters were read, or "not available: REASON"
    idle_seconds  length of the window idle_watts was measured over
    """

    joules: float | None
    idle_watts: float | None
    seconds: float
    source: str
    idle_seconds: float | None = None

    @property
    def idle_joules(self) -> float | None:
        """What doing nothing takes in as much time; None: not measured."""
        return None if self.idle_watts is None else self.idle_watts * self.seconds

    @property
    def above_idle(self) -> float | None:
        """Joules without those of doing nothing; None: one of both is not known. Short windows can come out negative."""
        if self.joules is None or self.idle_joules is None:
            return None
        return self.joules - self.idle_joules


NOTHING = Energy(None, None, 0.0, "not available: nothing was metered yet")


class NoCounter(Exception):
    """The device's energy cannot be read; the message says why."""


class Counter(Protocol):
    """A cumulative counter. `wraps`: it must be looked at now and then, or whole turns are missed."""

    source: str
    wraps: bool

    def joules(self) -> float:
        """Since some fixed moment. Raises NoCounter if it cannot be read."""


class EnergyMeter:
    """Context manager around work on some devices; after it, `energy` says what the work took. Can be used again.

    device    "cpu", "cuda", "cuda:1" or a torch device, or several of them: a model may be spread over them. The same
              device named twice counts once. The queues of GPUs are emptied at both ends of a window
    powercap  folder of the RAPL counters
    Never raises for want of a counter: `energy.joules` is None then, and `energy.source` says why.
    """

    def __init__(self, device: Any = "cpu", powercap: Path | str = POWERCAP, poll_seconds: float = POLL_SECONDS):
        several = device if isinstance(device, Iterable) and not isinstance(device, str) else [device]
        self.devices, self.poll_seconds = [str(one) for one in several], poll_seconds
        self.idle_watts: float | None = None
        self.idle_seconds: float | None = None
        self._counter: Counter | None = None
        try:
            self._counter = open_counters(self.devices, Path(powercap))
            self.source = self._counter.source
        except NoCounter as reason:
            self.source = f"not available: {reason}"
        self.energy = NOTHING

    def measure_idle(self, seconds: float = 5.0) -> float | None:
        """Watts of the devices over `seconds` of waiting; stands beside the joules of later windows. None: not available."""
        if not seconds > 0:
            raise InputError(f"seconds of idling: expected a number above 0, got {seconds}")
        self.idle_watts = self.idle_seconds = None
        with self:
            sleep(seconds)
        if self.energy.joules is not None:
            self.idle_seconds = self.energy.seconds
            self.idle_watts = self.energy.joules / self.energy.seconds
        self.energy = NOTHING
        return self.idle_watts

    def __enter__(self) -> EnergyMeter:
        self._stop = threading.Event()
        self._start = self._read()
        if self._counter is not None and self._counter.wraps:
            threading.Thread(target=_follow, args=(self._counter, self._stop, self.poll_seconds), daemon=True).start()
        self._started = perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = self._read()
        seconds = perf_counter() - self._started
        self._stop.set()
        if isinstance(self._start, str) or isinstance(end, str):
            reason = self._start if isinstance(self._start, str) else end
            self.energy = Energy(None, None, seconds, str(reason))
            return
        self.energy = Energy(end - self._start, self.idle_watts, seconds, self.source, self.idle_seconds)

    def synchronize(self) -> None:
        """Wait for what was queued on the GPUs among the devices, if torch is in use."""
        torch = sys.modules.get("torch")
        for device in self.devices:
            if device.startswith("cuda") and torch is not None and torch.cuda.is_available():
                torch.cuda.synchronize(device)

    def _read(self) -> float | str:
        """The counter after all work that was queued; or why there is none."""
        if self._counter is None:
            return self.source
        self.synchronize()
        try:
            return self._counter.joules()
        except NoCounter as reason:
            return f"not available: {reason}"


def open_counters(devices: Sequence[str], powercap: Path = POWERCAP) -> Counter:
    """The counters of devices as one. Raises NoCounter with the reason if one of them has none."""
    named = list(dict.fromkeys(map(_full_name, devices)))
    counters: list[Counter] = []
    for device in named:
        try:
            counters.append(open_counter(device, powercap))
        except NoCounter as reason:
            raise NoCounter(str(reason) if len(named) == 1 else f"{device}: {reason}") from None
    return counters[0] if len(counters) == 1 else Sum(counters)


def open_counter(device: str, powercap: Path = POWERCAP) -> Counter:
    """The counter of a device. Raises NoCounter with the reason if there is none."""
    kind, _, index = _full_name(device).partition(":")
    if kind == "cpu":
        return Rapl(powercap)
    if kind != "cuda":
        raise NoCounter(f"no energy counter is known for the device {device!r}")
    _refuse_slices(int(index))
    reasons = []
    for make in (Zeus, Nvml):
        try:
            return make(int(index))
        except NoCounter as reason:
            reasons.append(str(reason))
    raise NoCounter("; ".join(reasons))


def _full_name(device: str) -> str:
    """One name per device: "cuda" is the current GPU, all processors are "cpu"."""
    kind, _, index = device.partition(":")
    if kind == "cuda":
        return device if index else f"cuda:{_current_gpu()}"
    return kind if kind == "cpu" else device


# -- counters ---------------------------------------------------------------------------------------------------------


class Sum:
    """Several counters as one, for models that are spread over devices."""

    def __init__(self, counters: Sequence[Counter]):
        if not counters:
            raise NoCounter("no device was named")
        self._counters = counters
        self.wraps = any(counter.wraps for counter in counters)
        sources = [counter.source for counter in counters]
        times = {source: sources.count(source) for source in sources}
        self.source = " + ".join(source if n == 1 else f"{n} x {source}" for source, n in times.items())

    def joules(self) -> float:
        """Of all of them, each since its own fixed moment."""
        return sum(counter.joules() for counter in self._counters)


class Rapl:
    """Intel's and AMD's running average power limit: one counter per package, summed; each wraps at its own range.

    Sub-domains (cores, memory) are parts of their package, and `psys` is the whole machine: neither is added.
    """

    wraps = True

    def __init__(self, root: Path = POWERCAP):
        found = sorted(folder for folder in root.glob("intel-rapl:*") if folder.name.count(":") == 1)
        packages = [folder for folder in found if _text(folder / "name").startswith("package")]
        if not packages:
            raise NoCounter(f"no RAPL package domain in {root}")
        self._files = [folder / "energy_uj" for folder in packages]
        self._ranges = [_microjoules(folder / "max_energy_range_uj") for folder in packages]
        self._last = [_microjoules(file) for file in self._files]
        self._total = 0
        self._lock = threading.Lock()
        self.source = "RAPL " + "+".join(_text(folder / "name") for folder in packages)

    def joules(self) -> float:
        """Since this object was made. A counter below its last reading has wrapped, once."""
        with self._lock:
            now = [_microjoules(file) for file in self._files]
            for before, after, span in zip(self._last, now, self._ranges, strict=True):
                self._total += after - before + (span if after < before else 0)
            self._last = now
            return self._total / 1e6


class Nvml:
    """The counter of a whole NVIDIA GPU (Volta and later), in millijoules since the driver was loaded."""

    wraps = False

    def __init__(self, index: int):
        try:
            import pynvml
        except ImportError:
            raise NoCounter("nvidia-ml-py is not installed (pip install 'acceptance-toolkit[energy]')") from None
        self._nvml = pynvml
        self._handle = self._call(lambda: nvml_handle(pynvml, index))
        self._call(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        name = self._call(lambda: pynvml.nvmlDeviceGetName(self._handle))
        self.source = f"NVML {name.decode() if isinstance(name, bytes) else name}"

    def joules(self) -> float:
        """Since the driver was loaded."""
        return self._call(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000

    def _call(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except self._nvml.NVMLError as error:
            raise NoCounter(f"NVML: {error}") from None


class Zeus:
    """The same through zeus, which numbers GPUs as CUDA_VISIBLE_DEVICES does and reads AMD's, too."""

    wraps = False

    def __init__(self, index: int):
        try:
            from zeus.device import get_gpus
        except ImportError:
            raise NoCounter("zeus is not installed") from None
        self._index = index
        try:
            self._gpus = get_gpus()
            supported = self._gpus.supports_get_total_energy_consumption(index)
        except Exception as error:  # of zeus, of the driver's library, of an index that is none
            raise NoCounter(f"zeus: {first_line(error)}") from None
        if not supported:
            raise NoCounter(f"zeus: GPU {index} has no energy counter")
        self.joules()
        self.source = f"zeus, GPU {index}"

    def joules(self) -> float:
        """Since the driver was loaded."""
        try:
            return float(self._gpus.get_total_energy_consumption(self._index)) / 1000
        except Exception as error:
            raise NoCounter(f"zeus: {first_line(error)}") from None


# -- which GPU --------------------------------------------------------------------------------------------------------


def nvml_handle(pynvml: Any, index: int) -> Any:
    """NVML's handle of what CUDA calls GPU `index`. By its identity if torch is there to ask: the orders may differ.

    Without torch the order of the bus is assumed, as with CUDA_DEVICE_ORDER=PCI_BUS_ID. Raises NVMLError, NoCounter.
    """
    pynvml.nvmlInit()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        identity = str(torch.cuda.get_device_properties(index).uuid)
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{identity.removeprefix('GPU-')}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    if names is not None and index >= len(names):
        raise NoCounter(f"CUDA_VISIBLE_DEVICES={visible} hides GPU {index}")
    name = str(index) if names is None else names[index]
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    if name.startswith("MIG-"):
        raise NoCounter(SLICED.format(index))
    return pynvml.nvmlDeviceGetHandleByUUID(name)


def _refuse_slices(index: int) -> None:
    """Raises NoCounter on a GPU cut into slices (MIG): its counter is the whole card's."""
    try:
        import pynvml

        current, _ = pynvml.nvmlDeviceGetMigMode(nvml_handle(pynvml, index))
    except ImportError:
        return
    except pynvml.NVMLError:  # a card that cannot be cut, or a driver that the counters will speak of
        return
    if current:
        raise NoCounter(SLICED.format(index))


def _current_gpu() -> int:
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_available() else 0


# -- small things -----------------------------------------------------------------------------------------------------


def _follow(counter: Counter, stop: threading.Event, seconds: float) -> None:
    """Look at a wrapping counter until stopped, so that no turn is missed."""
    while not stop.wait(seconds):
        with suppress(NoCounter):  # the reading at the end will say it
            counter.joules()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except PermissionError:
        raise NoCounter(f"{path} may not be read by this user (an administrator can allow it: chmod a+r)") from None
    except OSError as error:
        raise NoCounter(f"{path}: {error.strerror or error}") from None


def _microjoules(path: Path) -> int:
    text = _text(path)
    try:
        return int(text)
    except ValueError:
        raise NoCounter(f"{path}: expected a number, found {text!r}") from None

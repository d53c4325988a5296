"""Energy of a window of work, read by zeus (the extra `energy`) from the devices' own counters; never an estimate.

    meter = EnergyMeter(pair.devices)
    meter.measure_idle(5)            # seconds of doing nothing, before the work
    with meter:
        work()
    meter.energy                     # Energy(joules=..., idle_watts=..., seconds=..., source="zeus ...")

A counter sees the whole GPU (not a MIG slice of it) or processor, other programs included, and advances in steps of up to a
tenth of a second: windows should be long. If one device has no counter, there is no sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import torch

from toolkit.costs.clock import now
from toolkit.errors import InputError
from toolkit.files.text import first_line

ZONES = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Energy:
    """What a window took: joules of all devices (None: `source` says why not), and idle watts (None: not measured)."""

    joules: float | None
    idle_watts: float | None
    seconds: float
    source: str

    @property
    def idle_joules(self) -> float | None:
        """What doing nothing takes in the same time; None: not measured."""
        return None if self.idle_watts is None else self.idle_watts * self.seconds


class EnergyMeter:
    """Context manager around work on some devices; afterwards `energy` says what the work took. Can be used again.

    monitor  a ZeusMonitor of these devices; None: it is opened. Without one `energy` holds seconds alone
    """

    def __init__(self, devices: Sequence[str], monitor: Any = None):
        self.devices = list(devices)
        self.idle_watts: float | None = None
        try:
            self._monitor = monitor or open_monitor(self.devices)
            self.source = f"zeus, {' + '.join(self.devices)}"
        except InputError as reason:
            self._monitor, self.source = None, f"not available: {reason}"
        self.energy = Energy(None, None, 0.0, self.source)

    def measure_idle(self, seconds: float) -> float | None:
        """Watts of the devices over `seconds` of waiting, kept for later windows. None: not available."""
        if self._monitor is not None:
            with self:
                sleep(seconds)
            self.idle_watts = (self.energy.joules or 0.0) / self.energy.seconds
        return self.idle_watts

    def __enter__(self) -> EnergyMeter:
        if self._monitor is not None:
            self._monitor.begin_window("work", sync_execution=False, restart=True)
        self._started = now(self.devices)
        return self

    def __exit__(self, *_: object) -> None:
        seconds, joules = now(self.devices) - self._started, None
        if self._monitor is not None:
            window = self._monitor.end_window("work", sync_execution=False)
            joules = sum(window.gpu_energy.values()) + sum((window.cpu_energy or {}).values())
        self.energy = Energy(joules, self.idle_watts, seconds, self.source)


def open_monitor(devices: Sequence[str]) -> Any:
    """A ZeusMonitor of devices. Raises InputError, one line, if zeus is not installed or a device has no counter."""
    named = [torch.device(device) for device in devices]
    gpus = sorted({device.index or 0 for device in named if device.type == "cuda"})
    zones = sorted(ZONES.glob("intel-rapl:?/name")) if any(device.type == "cpu" for device in named) else []
    packages = [int(zone.parent.name[-1]) for zone in zones if zone.read_text().startswith("package")]
    for device in named:
        if device.type not in ("cuda", "cpu") or (device.type == "cpu" and not packages):
            raise InputError(f"the device {device} has no energy counter that zeus reads")
    try:
        from zeus.monitor import ZeusMonitor
    except ImportError:
        raise InputError("zeus is not installed (pip install 'acceptance-toolkit[energy]')") from None
    try:
        monitor = ZeusMonitor(gpus, packages)
        monitor.begin_window("work", sync_execution=False)
        monitor.end_window("work", sync_execution=False)
    except Exception as error:  # of zeus or the driver, for a device that is hidden, sliced or protected
        raise InputError(f"zeus: {first_line(error)}") from None
    if monitor.power_monitor is not None:
        raise InputError("the GPU counts no energy, and power samples are not integrated")
    return monitor

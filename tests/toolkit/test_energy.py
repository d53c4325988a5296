"""Energy: what a monitor reads is summed over devices, and what cannot be read is said in one line and never estimated."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from toolkit.costs.energy import Energy, EnergyMeter, open_monitor
from toolkit.errors import InputError


class Monitor:
    """A ZeusMonitor whose devices take the next of `readings` in every window: (joules by GPU, joules by processor)."""

    power_monitor = None

    def __init__(self, *readings):
        self.readings, self.open = list(readings), False

    def begin_window(self, key, sync_execution=True, restart=False):
        self.open = True

    def end_window(self, key, sync_execution=True):
        assert self.open
        self.open = False
        gpus, cpus = self.readings.pop(0)
        return SimpleNamespace(gpu_energy=gpus, cpu_energy=cpus)


def test_joules_are_summed_over_devices_and_idle_power_stands_beside():
    meter = EnergyMeter(["cpu"], Monitor(({0: 1.0}, None), ({0: 30.0, 1: 90.0}, {0: 5.0})))
    watts = meter.measure_idle(0.01)
    assert 0 < watts <= 100
    with meter:
        pass
    assert meter.energy == Energy(125.0, watts, meter.energy.seconds, "zeus, cpu")
    assert meter.energy.idle_joules == pytest.approx(watts * meter.energy.seconds)


def test_an_error_inside_comes_out_and_the_energy_is_there():
    meter = EnergyMeter(["cpu"], Monitor(({0: 2.0}, None)))
    with pytest.raises(KeyError), meter:
        raise KeyError
    assert meter.energy.joules == 2.0 and meter.energy.idle_joules is None


def test_without_a_counter_there_are_seconds_alone_and_a_reason():
    meter = EnergyMeter(["cpu", "mps"])
    assert meter.measure_idle(60) is None  # without waiting
    with meter:
        pass
    assert meter.energy.joules is None and meter.energy.idle_joules is None and meter.energy.seconds > 0
    assert meter.energy.source.startswith("not available: ") and "\n" not in meter.energy.source


def zeus(monkeypatch, make):
    package = ModuleType("zeus.monitor")
    package.ZeusMonitor = make
    monkeypatch.setitem(sys.modules, "zeus", ModuleType("zeus"))
    monkeypatch.setitem(sys.modules, "zeus.monitor", package)


def test_what_zeus_cannot_read_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "zeus", None)
    with pytest.raises(InputError, match=r"zeus is not installed \(pip install 'acceptance-toolkit\[energy\]'\)"):
        open_monitor(["cuda:0"])
    with pytest.raises(InputError, match="the device mps has no energy counter"):
        open_monitor(["cuda:0", "mps"])
    zeus(monkeypatch, lambda gpus, cpus: 1 / 0)
    with pytest.raises(InputError, match="zeus: division by zero"):
        open_monitor(["cuda:0"])
    old = Monitor(({}, None))
    old.power_monitor = "integrates samples"
    zeus(monkeypatch, lambda gpus, cpus: old)
    with pytest.raises(InputError, match="the GPU counts no energy"):
        open_monitor(["cuda:0"])


def test_zeus_is_asked_for_each_gpu_once(monkeypatch):
    asked = []
    zeus(monkeypatch, lambda gpus, cpus: (asked.append((gpus, cpus)), Monitor(({}, None)))[1])
    open_monitor(["cuda:1", "cuda:0", "cuda:1"])
    assert asked == [([0, 1], [])]

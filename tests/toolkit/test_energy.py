"""Energy: counters that are read right, wrap right, and say plainly when they cannot be read."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from toolkit import energy
from toolkit.energy import Energy, EnergyMeter, Rapl
from toolkit.errors import InputError


class Clock:
    """A clock that stands still unless somebody waits, and what drew power meanwhile."""

    def __init__(self, monkeypatch):
        self.now, self.waiting = 100.0, lambda seconds: None
        monkeypatch.setattr(energy, "perf_counter", lambda: self.now)
        monkeypatch.setattr(energy, "sleep", self.sleep)

    def sleep(self, seconds):
        self.now += seconds
        self.waiting(seconds)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def domain(root, name, label, microjoules, span=262_143_328_850):
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{label}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{span}\n")
    return folder / "energy_uj"


def advance(file, microjoules):
    file.write_text(f"{int(file.read_text()) + microjoules}\n")


@pytest.fixture
def no_gpu_libraries(monkeypatch):
    """As on a machine without zeus, nvidia-ml-py and a GPU, whatever is installed here."""
    for name in ("zeus", "zeus.device", "pynvml"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


class FakeNvml(ModuleType):
    """nvidia-ml-py over two cards whose counters are lists of millijoules, the last one staying."""

    class NVMLError(Exception):
        pass

    def __init__(self, readings, mig=0):
        super().__init__("pynvml")
        self.readings, self.mig, self.asked = {k: list(v) for k, v in readings.items()}, mig, []

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        return self._known(index)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._known(uuid)

    def _known(self, handle):
        if handle not in self.readings:
            raise self.NVMLError("Not Found")
        self.asked.append(handle)
        return handle

    def nvmlDeviceGetMigMode(self, handle):
        return self.mig, self.mig

    def nvmlDeviceGetName(self, handle):
        return b"Fake 100"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if not self.readings[handle]:
            raise self.NVMLError("Not Supported")
        return self.readings[handle].pop(0) if len(self.readings[handle]) > 1 else self.readings[handle][0]


def install(monkeypatch, nvml):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


# -- RAPL -------------------------------------------------------------------------------------------------------------


def test_packages_are_summed_and_nothing_else(tmp_path, clock):
    first = domain(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    core = domain(tmp_path, "intel-rapl:0:0", "core", 0)
    second = domain(tmp_path, "intel-rapl:1", "package-1", 9_000_000)
    psys = domain(tmp_path, "intel-rapl:2", "psys", 0)
    twin = domain(tmp_path, "intel-rapl-mmio:0", "package-0", 0)
    meter = EnergyMeter("cpu", tmp_path)
    with meter:
        clock.sleep(4)
        for file, joules in ((first, 3), (core, 100), (second, 5), (psys, 1000), (twin, 3)):
            advance(file, joules * 1_000_000)
    assert meter.energy == Energy(8.0, None, 4.0, "RAPL package-0+package-1")
    assert meter.energy.idle_joules is None and meter.energy.above_idle is None


def test_a_wrapped_counter_goes_on(tmp_path, clock):
    file = domain(tmp_path, "intel-rapl:0", "package-0", 900_000_000, span=1_000_000_000)
    other = domain(tmp_path, "intel-rapl:1", "package-1", 100_000_000, span=500_000_000)
    meter = EnergyMeter("cpu", tmp_path)
    with meter:
        file.write_text("50000000")  # 100 J up to the range, 50 J beyond
        advance(other, 7_000_000)
    assert meter.energy.joules == pytest.approx(157.0)
    with meter:  # the next window starts where the last one ended
        advance(file, 1_000_000)
    assert meter.energy.joules == pytest.approx(1.0)


def test_several_turns_are_seen_if_each_is_looked_at(tmp_path):
    file = domain(tmp_path, "intel-rapl:0", "package-0", 0, span=1_000_000)
    counter = Rapl(tmp_path)
    for reading in (900_000, 400_000, 800_000, 300_000):  # .9, 1.4, 1.8, 2.3 J
        file.write_text(str(reading))
        last = counter.joules()
    assert last == pytest.approx(2.3)


def test_a_wrapping_counter_is_followed_during_a_long_window(tmp_path):
    file = domain(tmp_path, "intel-rapl:0", "package-0", 0, span=1_000_000)
    meter = EnergyMeter("cpu", tmp_path, poll_seconds=0.002)
    with meter:
        for reading in (900_000, 400_000, 800_000, 300_000):
            temporary = tmp_path / "next"
            temporary.write_text(str(reading))
            temporary.replace(file)
            deadline = time.monotonic() + 10
            while meter._counter._last != [reading] and time.monotonic() < deadline:
                time.sleep(0.001)
    assert meter.energy.joules == pytest.approx(2.3)


def test_idle_power_stands_beside_and_is_not_subtracted(tmp_path, clock):
    file = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = EnergyMeter("cpu", tmp_path)
    clock.waiting = lambda seconds: advance(file, int(seconds * 40e6))  # 40 W of doing nothing
    assert meter.measure_idle(2.5) == pytest.approx(40.0)
    assert meter.energy.joules is None  # idling is no result
    clock.waiting = lambda seconds: advance(file, int(seconds * 100e6))
    with meter:
        clock.sleep(3)
    assert meter.energy.joules == pytest.approx(300.0) and meter.energy.above_idle == pytest.approx(180.0)
    assert meter.energy.idle_joules == pytest.approx(120.0)
    assert (meter.energy.idle_watts, meter.energy.idle_seconds, meter.energy.seconds) == pytest.approx((40, 2.5, 3))
    clock.waiting = lambda seconds: advance(file, int(seconds * 10e6))
    assert meter.measure_idle(1) == pytest.approx(10.0)  # anew
    assert meter.energy.above_idle is None  # idling is no result


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_idling_for_no_time_is_refused(seconds, tmp_path):
    with pytest.raises(InputError, match="above 0"):
        EnergyMeter("cpu", tmp_path).measure_idle(seconds)


def test_no_counter_is_said_plainly_and_work_goes_on(tmp_path, clock):
    meter = EnergyMeter("cpu", tmp_path / "none")
    assert meter.measure_idle(1) is None
    with meter:
        clock.sleep(2)
    assert meter.energy == Energy(None, None, 2.0, f"not available: no RAPL package domain in {tmp_path}/none")
    assert meter.energy.above_idle is None
    (tmp_path / "psys").mkdir()
    domain(tmp_path / "psys", "intel-rapl:0", "psys", 0)
    assert "no RAPL package" in EnergyMeter("cpu", tmp_path / "psys").source


def test_a_counter_that_breaks_off_gives_no_number(tmp_path):
    file = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = EnergyMeter("cpu", tmp_path)
    with meter:
        file.write_text("nonsense")
    assert meter.energy.joules is None and "expected a number, found 'nonsense'" in meter.energy.source
    with meter:
        file.unlink()
    assert meter.energy.joules is None and meter.energy.source.startswith("not available: ")


def test_a_counter_for_root_only(tmp_path, monkeypatch):
    domain(tmp_path, "intel-rapl:0", "package-0", 0)
    read = Path.read_text

    def guarded(path, *given, **named):
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read(path, *given, **named)

    monkeypatch.setattr(Path, "read_text", guarded)
    source = EnergyMeter("cpu", tmp_path).source
    assert source.startswith("not available: ") and "energy_uj may not be read by this user" in source


def test_an_error_inside_comes_out_and_the_energy_is_there(tmp_path):
    file = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = EnergyMeter("cpu", tmp_path)

    def work():
        with meter:
            advance(file, 2_000_000)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert meter.energy.joules == 2.0


# -- GPUs -------------------------------------------------------------------------------------------------------------


def test_nvml_counts_millijoules(no_gpu_libraries, monkeypatch, clock):
    install(monkeypatch, FakeNvml({0: [1_000, 1_000, 21_000, 30_000, 90_000]}))
    meter = EnergyMeter("cuda:0")
    assert meter.measure_idle(2) == pytest.approx(10.0)  # from 1 J to 21 J
    with meter:
        clock.sleep(3)
    assert meter.energy == Energy(pytest.approx(60.0), 10.0, 3.0, "NVML Fake 100", 2.0)
    assert meter.energy.above_idle == pytest.approx(30.0)


def test_a_model_on_two_gpus_takes_what_both_take(no_gpu_libraries, monkeypatch, clock):
    readings = {0: [1_000, 1_000, 5_000, 6_000, 36_000], 1: [500_000, 500_000, 516_000, 520_000, 610_000]}
    install(monkeypatch, FakeNvml(readings))
    meter = EnergyMeter(["cuda:0", "cuda:1", "cuda:0"])  # twice named, once counted
    assert meter.source == "2 x NVML Fake 100"
    assert meter.measure_idle(2) == pytest.approx(10.0)  # 4 J and 16 J in two seconds
    with meter:
        clock.sleep(3)
    assert meter.energy.joules == pytest.approx(30 + 90) and meter.energy.above_idle == pytest.approx(90.0)


def test_a_gpu_and_the_processor_beside_it(no_gpu_libraries, monkeypatch, clock, tmp_path):
    install(monkeypatch, FakeNvml({0: [1_000, 2_000, 9_000]}))
    file = domain(tmp_path, "intel-rapl:0", "package-0", 5_000_000, span=10_000_000)
    meter = EnergyMeter(["cuda", "cpu"], tmp_path)
    assert meter.source == "NVML Fake 100 + RAPL package-0" and meter._counter.wraps
    with meter:
        file.write_text("1000000")  # 5 J up to the range, 1 J beyond
    assert meter.energy.joules == pytest.approx(7 + 6)


def test_without_one_of_the_counters_there_is_no_sum(no_gpu_libraries, monkeypatch, tmp_path):
    install(monkeypatch, FakeNvml({0: [1_000], 1: []}))
    meter = EnergyMeter(["cuda:0", "cuda:1"])
    with meter:
        pass
    assert meter.energy.joules is None
    assert meter.source.startswith("not available: cuda:1: ") and "NVML: Not Supported" in meter.source
    assert "not available: cpu: no RAPL" in EnergyMeter(["cuda:0", "cpu"], tmp_path).source
    assert "no device was named" in EnergyMeter([]).source


def test_the_gpu_is_the_one_cuda_sees(no_gpu_libraries, monkeypatch):
    nvml = install(monkeypatch, FakeNvml({0: [1], 3: [1], "GPU-abc": [1]}))
    for visible, device, handle in (("3,0", "cuda", 3), ("3,0", "cuda:1", 0), ("GPU-abc", "cuda:0", "GPU-abc")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert EnergyMeter(device).source == "NVML Fake 100"
        assert nvml.asked[-1] == handle
    assert "CUDA_VISIBLE_DEVICES=GPU-abc hides GPU 1" in EnergyMeter("cuda:1").source
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert "cut into slices" in EnergyMeter("cuda").source


def test_torch_is_asked_for_identity_and_its_queue_is_emptied(no_gpu_libraries, monkeypatch):
    nvml, waited = install(monkeypatch, FakeNvml({"GPU-0a1b": [1]})), []
    cuda = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 2,
        get_device_properties=lambda index: SimpleNamespace(uuid={2: "0a1b"}[index]),
        synchronize=waited.append,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    with EnergyMeter("cuda"):
        assert waited == ["cuda"]
    assert nvml.asked[-1] == "GPU-0a1b" and waited == ["cuda", "cuda"]
    install(monkeypatch, FakeNvml({"GPU-0a1b": [1], "GPU-2c3d": [1]}))
    cuda.get_device_properties = lambda index: SimpleNamespace(uuid={2: "0a1b", 3: "2c3d"}[index])
    del waited[:]
    with EnergyMeter(["cuda", "cuda:3"]):
        assert waited == ["cuda", "cuda:3"]  # before any of the counters is read


@pytest.mark.parametrize(
    "nvml, reason",
    [
        (FakeNvml({0: []}), "NVML: Not Supported"),
        (FakeNvml({}), "NVML: Not Found"),
        (FakeNvml({0: [1]}, mig=1), "its counter is the whole card's"),
        (None, "nvidia-ml-py is not installed"),
    ],
)
def test_gpus_without_a_counter(no_gpu_libraries, monkeypatch, nvml, reason):
    install(monkeypatch, nvml)
    meter = EnergyMeter("cuda:0")
    with meter:
        pass
    assert meter.energy.joules is None
    assert meter.energy.source.startswith("not available: ") and reason in meter.energy.source


def test_zeus_comes_first(no_gpu_libraries, monkeypatch):
    install(monkeypatch, FakeNvml({0: [0], 1: [0]}))
    readings = {0: [5.0], 1: [1_000.0, 1_500.0, 4_000.0]}
    gpus = SimpleNamespace(
        supports_get_total_energy_consumption=lambda index: index == 1,
        get_total_energy_consumption=lambda index: readings[index].pop(0),
    )
    package, device = ModuleType("zeus"), ModuleType("zeus.device")
    device.get_gpus = lambda: gpus
    monkeypatch.setitem(sys.modules, "zeus", package)
    monkeypatch.setitem(sys.modules, "zeus.device", device)
    meter = EnergyMeter("cuda:1")
    with meter:
        pass
    assert meter.energy.joules == 2.5 and meter.energy.source == "zeus, GPU 1"
    assert EnergyMeter("cuda:0").source == "NVML Fake 100"  # zeus has no counter there
    device.get_gpus = lambda: 1 / 0
    assert EnergyMeter("cuda:1").source == "NVML Fake 100"
    install(monkeypatch, None)
    assert "zeus: division by zero; nvidia-ml-py is not installed" in EnergyMeter("cuda:1").source


def test_other_devices():
    assert EnergyMeter("mps").source == "not available: no energy counter is known for the device 'mps'"


def test_importing_it_needs_no_library():
    code = "import sys; import toolkit.energy; sys.exit(int(bool({'torch', 'pynvml', 'zeus'} & set(sys.modules))))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""Costs: the formula, cost tables and their files, and energy where a counter can be read."""

from __future__ import annotations

import json
import re
import sys
import warnings
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from toolkit import ModelPair, config, metrics
from toolkit.costs.energy import Energy, EnergyMeter, open_monitor
from toolkit.costs.load import LoadCost, grid_of
from toolkit.costs.measure import measure
from toolkit.costs.table import CostTable
from toolkit.errors import InputError
from toolkit.types import Counts, Generation, Round

POINTS = {(b, w, x): 1e-3 * (b + 2 * w) + 1e-6 * x for b in (1.0, 4.0) for w in (1.0, 3.0) for x in (0.0, 100.0)}


def test_numbers_and_arrays_have_the_same_cost_and_throughput():
    tokens, draft_calls, target_calls = np.array([[12.0, 0.0, 7.0], [8.0, 0.0, 5.0], [4.0, 0.0, 6.0]])
    assert metrics.cost(draft_calls, target_calls, 0.2).tolist() == pytest.approx([5.6, 0.0, 7.0])
    rates = metrics.tokens_per_cost(tokens, draft_calls, target_calls, 0.2)
    assert rates.tolist() == pytest.approx([12 / 5.6, 0.0, 1.0])
    assert [metrics.throughput(Counts(num_draft_calls=8, num_target_calls=4, num_generated=12), 0.2)] == rates[:1]


def test_shares_of_sources_are_of_all_rounds():
    rounds = [Round(0, 0, 0, 1, True), Round(3, 0, 1, 2, False), Round(2, 2, 2, 3, True), Round(0, 1, 0, 1, True)]
    assert [r.source for r in rounds] == ["nothing", "copy", "draft", "draft"]
    generations = [Generation(0, [1], [], rounds=rounds[:3]), Generation(1, [1], [], rounds=rounds[3:])]
    assert metrics.source_shares(generations) == {"copy_share": 0.25, "draft_share": 0.5}
    assert metrics.source_shares([]) == {"copy_share": 0.0, "draft_share": 0.0}


# -- cost tables ----------------------------------------------------------------------------------------------------------


def test_a_table_is_linear_between_its_points_and_beyond():
    grid = grid_of(POINTS, "here")
    for batch, width, context in ((1, 1, 0), (2, 2, 50), (4, 3, 100), (16, 9, 400)):
        assert grid(batch, width, context) == pytest.approx(1e-3 * (batch + 2 * width) + 1e-6 * context)
    assert grid(0.5, 1, 0) == grid(1, 1, 0), "below the first point: its value"


def table(batches: tuple[float, ...], widths: tuple[float, ...], draft_widths: tuple[float, ...] = (1.0,)) -> LoadCost:
    """A file's table at these points: seconds grow with both."""
    draft, target = (
        {(b, w, 0.0): 1e-3 * (b + w) for b in batches for w in chosen} for chosen in (draft_widths, widths)
    )
    return LoadCost(grid_of(draft, "draft"), grid_of(target, "target"), "mine.csv")


@pytest.mark.parametrize(
    ("costs", "batches", "widest", "words"),
    [
        (table((1.0,), (1.0, 6.0)), [1, 64], 6, "draft at batch size 64, too, got those at batch size 1 alone"),
        (table((1.0,), (1.0, 6.0)), [1], 6, None),
        (table((1.0, 64.0), (1.0,)), [1, 64], 6, "target at width 6, too, got those at width 1 alone"),
        (table((1.0, 64.0), (1.0,)), [1, 64], 1, None),
        (table((1.0, 64.0), (2.0, 6.0)), [64], 6, "target at width 1, too, got those at width 2 and 6 alone"),
        (table((1.0, 64.0), (1.0, 6.0), (4.0,)), [64], 6, "draft at width 1, too, got those at width 4 alone"),
        (table((4.0, 64.0), (1.0, 6.0)), [1], 6, "draft at batch size 1, too, got those at batch size 4 and 64 alone"),
        (table((4.0, 64.0), (1.0, 6.0)), [4, 7, 100], 9, None),
        (LoadCost.ratio(0.2, column=0.1), [64], 20, None),
    ],
)
def test_what_would_be_read_as_flat_is_named(costs, batches, widest, words):
    lacking = costs.lacks(batches, widest)
    assert lacking == (words and f"expected times of the {words}")


def test_what_is_beyond_the_table_is_named():
    costs = table((1.0, 4.0), (1.0, 6.0))
    assert costs.beyond(4, 6) is None and LoadCost.ratio(0.2).beyond(64, 20) is None
    assert costs.beyond(64) == "batch size 64 is beyond the cost table, which ends at 4"
    assert costs.beyond(1, 7) == "width 7 is beyond the cost table, which ends at 6"


def test_times_that_fall_with_the_width_are_named_and_never_continued_to_nothing():
    points = {(b, w, 0.0): s * b for b in (1.0, 2.0) for w, s in ((1.0, 0.01), (2.0, 0.008), (3.0, 0.0079))}
    grid = grid_of(points, "here")
    costs = LoadCost(grid_of(POINTS, "a"), grid, "measured")
    assert (
        costs.fall is not None and "the target's times fall from 0.01 s at width 1 to 0.008 s at width 2" in costs.fall
    )
    assert grid(1, 2.5) == pytest.approx(0.00795), "between its points it is what it was measured to be"
    assert grid(1, 500) == pytest.approx(0.0079) and grid(4, 500) == pytest.approx(4 * 0.0079)
    assert LoadCost(grid_of(POINTS, "a"), grid_of(POINTS, "b"), "measured").fall is None


@pytest.mark.parametrize("name, slots", [("lookup_rate", 1), ("best_source", 1), ("batch_rate", 2)])
def test_a_rule_warns_of_a_table_that_does_not_tell_what_it_weighs(name, slots, tmp_path):
    """Its texts stay right: what it takes for free is only not what it costs."""
    pair, live = ModelPair.toy(), torch.ones(slots, dtype=torch.bool)

    def warned(costs: LoadCost) -> list[str]:
        words = [f"policy.costs={costs.save(tmp_path / 'costs.json')}"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            policy = config.method(name, words).bind(pair).policy
            policy.begin(live, policy.init(slots, live.device))
        return sorted({str(warning.message).partition(": ")[2] for warning in caught})

    assert warned(table((1.0, 2.0), (1.0, 21.0))) == []
    (width,) = warned(table((1.0, 2.0), (1.0,)))
    assert re.match(r"expected times of the target at width \d+, too, got those at width 1 alone", width)
    (batch,) = warned(table((8.0,), (1.0, 21.0)))
    assert batch.startswith(f"expected times of the draft at batch size {slots}, too, got those at batch size 8 alone")


def test_tables_of_several_batch_sizes_are_costs_under_load(tmp_path):
    tables = [CostTable(size, (1, 3), (10, 20), ((size, 2 * size), (size, 4 * size)), (0.1, 0.2)) for size in (1, 4)]
    costs = LoadCost.of(tables)
    assert [costs.target(4, 3, 10), costs.target(4, 2, 20), costs.target(2, 1, 10)] == [8, 10, 2]
    assert costs.draft(4, 1, 20) == 0.2 and costs.draft(4, 3, 20) == pytest.approx(0.8), "it reads as the target does"
    alone = LoadCost.of([CostTable(1, (1, 3), (10,), ((1, 2),))])
    assert alone.draft(1, 3, 10) == alone.target(1, 3, 10) == 2, "the target's forwards stand for a draft's"
    assert LoadCost.load(tables[1].save(tmp_path / "costs.json")).target(4, 3, 10) == 8


def test_a_batch_that_was_measured_at_shorter_contexts_is_read_by_its_own_curve():
    small = CostTable(1, (1, 3), (128, 512), ((1, 2), (1, 2)), (0.1, 0.1))
    large = CostTable(64, (1, 3), (128, 256), ((10, 20), (14, 28)), (2.0, 3.0))
    largest = CostTable(256, (1, 3), (64,), ((50, 60),), (7.0,))
    costs = LoadCost.of([small, large, largest])
    assert costs.contexts == (64, 128, 256, 512)
    for table in (small, large, largest):
        for context in (64, 128, 200, 256, 400, 512, 900):
            for width in (1, 2, 3):
                assert costs.target(table.batch_size, width, context) == pytest.approx(table.target(width, context))
            assert costs.draft(table.batch_size, 1, context) == pytest.approx(table.draft(context))


def test_contexts_that_a_large_batch_cuts_lie_apart(monkeypatch):
    monkeypatch.setattr("toolkit.costs.measure.HELD", 2**10)
    pair = ModelPair.toy()
    measured = {size: list(measure(pair, size, (1,), repeats=1)[0].contexts) for size in (1, 4, 6, 16)}
    assert measured == {1: [128, 512], 4: [128, 256], 6: [170], 16: [64]}


def test_a_ratio_is_a_table_that_no_batch_changes():
    costs = LoadCost.ratio(0.2, column=0.1)
    for batch in (1, 32):
        assert costs.round(batch, 3) == pytest.approx(3 * 0.2 + 1 + 3 * 0.1)


def test_what_is_saved_is_loaded(tmp_path):
    costs = LoadCost(grid_of(POINTS, "a"), grid_of(POINTS, "b"), "measured", {"machine": "here"})
    again = LoadCost.load(costs.save(tmp_path / "costs.json"))
    assert again.source == "measured" and dict(again.about) == {"machine": "here"}
    np.testing.assert_array_equal(again.target.seconds, costs.target.seconds)
    assert again.round(3, 2, 70) == costs.round(3, 2, 70)
    assert again.middle == 50.0


def lines(*rows: str) -> str:
    return "\n".join(["model,batch,width,context,seconds", *rows]) + "\n"


def table_json(batch, seconds):
    one = {"batch": [1], "width": [1], "context": [0], "seconds": [[[0.1]]]}
    return json.dumps({"source": "mine", "draft": one, "target": {**one, "batch": batch, "seconds": seconds}})


def test_a_table_that_calls_itself_a_ratio_is_not_read_as_flat(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(table_json([1], [[[1.0]]]).replace("mine", "ratio"))
    assert LoadCost.load(path).lacks([64]) is not None
    ratio = LoadCost.load(LoadCost.ratio(0.2, 0.1).save(path))
    assert ratio.lacks([64], 5) is None


def test_a_csv_of_ones_own(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(lines("draft,1,1,0,0.001", "target,1,1,0,0.01", "target,1,5,0,0.012"))
    costs = LoadCost.load(path)
    assert costs.round(1, 4) == pytest.approx(4 * 0.001 + 0.012) and costs.source == str(path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", lines("draft,1,1,0,0.001", "target,1,1,0,0.01", "target,2,5,0,0.012"), "hole at batch=1 width=5"),
        ("a.csv", lines("draft,1,1,0,-0.001", "target,1,1,0,0.01"), "expected seconds above 0 at batch=1 width=1"),
        ("a.csv", lines("draft,1,1,0,nan", "target,1,1,0,0.01"), "expected seconds above 0"),
        ("a.csv", lines("draft,1,1,0,0.001"), "expected at least one time"),
        ("a.csv", lines("drat,1,1,0,0.001"), "line 2: expected model draft or target"),
        ("a.csv", "", "expected a CSV with the columns"),
        (
            "a.csv",
            lines("draft,1,1,0,0.001", "target,1,1,0,0.01", "target,1,1,0,0.05"),
            "line 4: .*have a time already",
        ),
        ("a.csv", lines("draft,1,1,0,0.001", "target,-4,1,0,0.01"), "expected batch and width of at least 1"),
        (
            "a.json",
            table_json([1, 4, 64], [[[1.0]], [[2.0]]]),
            r"shape \[2, 1, 1\] for \[3, 1, 1\]",
        ),
        ("a.json", table_json([1, 1], [[[1.0]], [[2.0]]]), "different points"),
        ("a.json", table_json("14", [[[1.0]], [[2.0]]]), "expected lists of numbers"),
        ("a.json", table_json([1, float("nan")], [[[1.0]], [[2.0]]]), "all of them numbers"),
        ("a.json", "{}", "not a cost table"),
        ("a.json", json.dumps({**json.loads(table_json([1], [[[1.0]]])), "about": ["a", "b"]}), "about as an object"),
        (
            "a.json",
            json.dumps({**json.loads(table_json([1], [[[1.0]]])), "source": "published/a"}),
            "about with source and date",
        ),
        ("none.json", None, "expected a cost table"),
    ],
)
def test_bad_tables_are_refused(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=words):
        LoadCost.load(path)


# -- energy -----------------------------------------------------------------------------------------------------------------


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


def test_zeus_is_asked_for_each_gpu_once_and_what_it_cannot_read_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "zeus", None)
    with pytest.raises(InputError, match="zeus is not installed"):
        open_monitor(["cuda:0"])
    calls = []
    zeus(monkeypatch, lambda gpus, cpus: (calls.append((gpus, cpus)), Monitor(({}, None)))[1])
    open_monitor(["cuda:1", "cuda:0", "cuda:1"])
    assert calls == [([0, 1], [])]
    with pytest.raises(InputError, match="mps has no energy counter"):
        open_monitor(["cuda:0", "mps"])
    zeus(monkeypatch, lambda gpus, cpus: 1 / 0)
    with pytest.raises(InputError, match="division by zero"):
        open_monitor(["cuda:0"])
    old = Monitor(({}, None))
    old.power_monitor = "integrates samples"
    zeus(monkeypatch, lambda gpus, cpus: old)
    with pytest.raises(InputError, match="counts no energy"):
        open_monitor(["cuda:0"])

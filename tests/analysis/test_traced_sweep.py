"""Sweeps on traces: the same cells and columns as live ones; the same counts at temperature 0, the same rates above it."""

import pytest

from analysis import cells, sweep
from analysis.rows import COUNTS
from analysis.tables import read_table
from tests.analysis.table_sweeps import sweep_config
from toolkit.errors import InputError

GRID = {
    "speculative": {"policy.num_drafted": [1, 3]},
    "confidence": {"policy.threshold": [0.3]},
    "heuristic": {},
    "block": {},
    "oracle": {"max_drafted": [None]},
}


def rows_of(folder):
    return read_table(folder, "rows").set_index(["method", "setting", "prompt"]).sort_index()


def test_at_temperature_zero_a_replayed_sweep_counts_what_a_live_one_counts(tmp_path):
    live, traced = (
        rows_of(sweep.run(sweep_config(tmp_path, grid=GRID, source=source, sampling={"temperature": 0.0})))
        for source in ("live", "traces")
    )
    shared = live.index.intersection(traced.index)
    assert len(shared) == len(live)
    for name in COUNTS:
        assert (live.loc[shared, name] == traced.loc[shared, name]).all(), name
    assert [list(x) for x in live.loc[shared].accepted_lengths] == [
        list(x) for x in traced.loc[shared].accepted_lengths
    ]


def test_above_it_the_rates_agree(tmp_path):
    live, traced = (
        rows_of(sweep.run(sweep_config(tmp_path, grid=GRID, source=s, limit=300))) for s in ("live", "traces")
    )
    for cell in (("speculative", "K=3"), ("confidence", "h=0.3"), ("heuristic", "")):
        for name in ("num_drafted", "num_target_calls", "num_discarded"):
            one, other = live.loc[cell, name], traced.loc[cell, name]
            spread = ((one.var() + other.var()) / 300) ** 0.5
            assert abs(one.mean() - other.mean()) < 4 * spread + 1e-9, (cell, name)


def test_only_what_cannot_be_replayed_is_decoded_and_the_trace_is_kept(tmp_path, monkeypatch):
    decoded = []
    decode = cells.decode
    monkeypatch.setattr(
        cells,
        "decode",
        lambda pair, prompts, method, *a, **k: (decoded.append(method.name), decode(pair, prompts, method, *a, **k))[1],
    )
    folder = sweep.run(sweep_config(tmp_path, grid=GRID, source="traces"))
    assert decoded == ["autoregressive", "block"]
    (trace,) = (folder / "cells").glob("trace-*.safetensors")
    made = trace.stat().st_mtime_ns
    more = {**GRID, "speculative": {"policy.num_drafted": [1, 2, 3]}}
    sweep.run(sweep_config(tmp_path, grid=more, source="traces"))
    assert decoded == ["autoregressive", "block"]
    assert trace.stat().st_mtime_ns == made


def test_a_wrong_source_is_named(tmp_path):
    with pytest.raises(InputError, match="unknown source 'trace'.*did you mean traces"):
        sweep.run(sweep_config(tmp_path, grid=GRID, source="trace"))

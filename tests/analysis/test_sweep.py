"""Sweeps: rows that add up, finished settings that are kept, failing settings that cost nothing but themselves."""

import json

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from analysis import sweep
from analysis.figures import plots
from analysis.tables import sweep_context
from analysis.tables.files import read_table
from analysis.tables.rows import COUNTS, FACTS, SETTING, labels
from tests.analysis.table_sweeps import IdPrompts, sweep_config
from tests.offline_runs import inventory
from tests.toolkit.trace.plain import small_trace
from toolkit.errors import InputError
from toolkit.runs.stage import read_manifest

SMALL = {"autoregressive": {}, "speculative": {"policy.num_drafted": [2]}}


@pytest.fixture
def decoded(monkeypatch):
    """Names of the methods that were decoded; figures, which take longer here, are not drawn."""
    monkeypatch.setattr(plots, "pareto", lambda settings, path, title: path)
    names = []
    decode = sweep_context.decode
    monkeypatch.setattr(sweep_context, "decode", lambda pair, prompts, method, *a, **k: (
        names.append(method.name), decode(pair, prompts, method, *a, **k))[1])  # fmt: skip
    return names


def test_one_row_per_cell_and_prompt(sweeps, head):
    rows = read_table(sweeps["dev"], "rows")
    assert [*rows.columns] == [*SETTING, "policy.num_drafted", "policy.threshold", "head", "max_drafted", *FACTS]
    assert len(rows) == 8 * 9
    assert not rows.duplicated(["method", "setting", "prompt"]).any()
    assert set(rows.dataset) == {"ids"}
    assert set(rows.split) == {"dev"}
    assert set(rows[rows.method == "specdec_pp"]["head"]) == {head}
    assert list(rows[rows.method == "speculative"]["policy.num_drafted"].unique()) == [1, 3, 5]
    written = pd.read_csv(sweeps["dev"] / "rows.csv")
    assert list(written.columns) == list(rows.columns)
    assert json.loads(written.accepted_lengths[0]) == list(rows.accepted_lengths[0])
    assert (sweeps["dev"] / "figures" / "pareto.png").read_bytes().startswith(b"\x89PNG")
    (run,) = (sweeps["dev"] / "wandb").glob("offline-run-*")
    media = {path.name.split("_")[0] for path in (run / "files" / "media" / "table" / "sweep").iterdir()}
    assert media == {"rows", "summary", "by", "settings", "curves"}
    assert len(list((run / "files" / "media" / "images" / "sweep").iterdir())) == 3
    assert not (sweeps["test"] / "wandb").exists()


def test_counts_add_up_in_every_row(sweeps):
    for folder in sweeps.values():
        rows = read_table(folder, "rows")
        gap = rows.num_drafted + rows.num_target_calls - rows.num_generated - rows.num_discarded
        assert gap.abs().max() < 1e-9
        live = rows[rows.method != "oracle"]
        rounds = [sum(lengths) for lengths in live.accepted_lengths]
        accepted = [sum(n * count for n, count in enumerate(lengths)) for lengths in live.accepted_lengths]
        assert rounds == live.num_target_calls.tolist()
        assert (pd.Series(accepted, index=live.index) <= live.num_drafted).all()
        assert (live[live.method == "autoregressive"].num_drafted == 0).all()
        summary = read_table(folder, "summary").set_index(["method", "setting"])
        oracle, capped = summary.loc[("oracle", "")], summary.loc[("oracle", "max_drafted=2")]
        assert capped.throughput < oracle.throughput == summary.throughput.max() and oracle.num_discarded == 0


@pytest.mark.parametrize(("prompts", "said", "expected"), [
    ({"domain": "math", "split": "dev"}, {}, ("math", "dev")),
    ({"name": "gsm8k", "split": "test"}, {"dataset": "g", "split": "a"}, ("g", "a")),
    ({"domain": "math", "split": "test", "path": "some/file.jsonl"}, {}, ("file", "")),
])  # fmt: skip
def test_rows_are_called_after_their_prompts(prompts, said, expected):
    cfg = OmegaConf.create({"prompts": prompts, "dataset": None, "split": None, **said})
    assert tuple(labels(cfg).values()) == expected


def test_finished_cells_are_skipped_and_a_larger_grid_goes_on(tmp_path, decoded, monkeypatch):
    folder = sweep.run(sweep_config(tmp_path, grid=SMALL))
    assert decoded == ["autoregressive", "speculative"]
    before = read_table(folder, "rows")
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "_publish", lambda *_: pytest.fail("published again"))
        assert sweep.run(sweep_config(tmp_path, grid=SMALL)) == folder
    pd.testing.assert_frame_equal(read_table(folder, "rows"), before)
    assert len(decoded) == 2
    larger = {**SMALL, "tail": {}}
    assert sweep.run(sweep_config(tmp_path, grid=larger)) == folder
    assert decoded[2:] == ["tail"]
    assert len(read_table(folder, "rows")) == 3 * 7
    assert sweep.run(sweep_config(tmp_path, grid=SMALL)) == folder  # the table is that of the last grid
    pd.testing.assert_frame_equal(
        read_table(folder, "rows").drop(columns="setting_seconds"), before.drop(columns="setting_seconds")
    )
    broken = next(iter((folder / "settings").iterdir()))
    broken.write_bytes(broken.read_bytes()[:100])
    sweep.run(sweep_config(tmp_path, grid=larger))
    assert len(decoded) == 4, "a broken file is made again"


def test_cells_whose_rows_decide_together_are_decoded_again_at_another_batch_size(tmp_path, decoded):
    grid = {"autoregressive": {}, "batch_rate": {}, "rate": {}}
    for size in (1, 3, 3):
        sweep.run(sweep_config(tmp_path, grid=grid, source="live", batch_size=size))
    assert decoded == ["autoregressive", "batch_rate", "rate", "batch_rate"]


def test_the_summary_names_no_part_that_there_is_not_and_no_seconds_of_replays(tmp_path, capsys, decoded, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # all columns fit
    replayed = sweep_config(tmp_path, grid=SMALL, source="traces")
    replayed.prompts.split = ""
    folder = sweep.run(replayed)
    said = capsys.readouterr().out
    assert "ids, 7 prompts, c = 0.2" in said and "seconds" not in said and "seconds" in read_table(folder, "summary")
    sweep.run(sweep_config(tmp_path, grid=SMALL))
    said = capsys.readouterr().out
    assert "ids dev, 7 prompts, c = 0.2" in said and "seconds" in said


def test_a_failing_cell_is_reported_and_the_others_are_kept(tmp_path, monkeypatch, capsys):
    """Its run ends as failed and publishes no artifact; traces are uploaded by the run that finishes."""
    decode, decoded = sweep_context.decode, []

    def fails_twice(pair, prompts, method, *args, **kwargs):
        decoded.append(method.name)
        if method.name == "tail" and decoded.count("tail") < 3:
            raise RuntimeError("out of memory\nand more")
        return decode(pair, prompts, method, *args, **kwargs)

    monkeypatch.setattr(sweep_context, "decode", fails_twice)
    wanted = sweep_config(tmp_path, grid={"tail": {}, **SMALL}, track=True, artifacts=True)
    with pytest.raises(InputError, match=r"^1 of 3 settings failed \(tail: RuntimeError: out of memory\)[^\n]*$"):
        sweep.run(wanted)
    assert "tail failed: RuntimeError: out of memory" in capsys.readouterr().err
    (folder,) = tmp_path.iterdir()
    assert set(read_table(folder, "rows").method) == {"autoregressive", "speculative"}
    small_trace(count=2, hidden=True).save(folder / "settings" / "traces-0.safetensors")
    with pytest.raises(InputError, match="1 of 3 settings failed"):
        sweep.run(wanted)
    run = inventory(folder)
    assert run["exit"] == 1 and run["artifacts"] == [] and run["scalars"]["failed_settings"] == 1
    assert "sweep/summary" in run["tables"]
    sweep.run(wanted)
    assert sorted(decoded) == ["autoregressive", "speculative", "tail", "tail", "tail"]
    run = inventory(folder)
    assert run["exit"] == 0 and run["artifacts"] == ["traces-0"] and run["job_type"] == "sweep"
    assert set(run["charts"]) == {"sweep/settings", "sweep/curves"}
    summary = read_table(folder, "summary")
    assert run["scalars"]["throughput"] == pytest.approx(summary[summary.method != "autoregressive"].throughput.max())


def test_an_interrupted_sweep_keeps_its_finished_cells(tmp_path, monkeypatch, decoded):
    counting, calls = sweep_context.decode, []

    def interrupts(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return counting(*args, **kwargs)

    monkeypatch.setattr(sweep_context, "decode", interrupts)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(sweep_config(tmp_path, grid=SMALL))
    sweep.run(sweep_config(tmp_path, grid=SMALL))
    assert decoded == ["autoregressive", "speculative"]


@pytest.mark.parametrize(("grid", "message"), [
    ({"speculative": {"policy.num_drafted": [-1]}}, "policy.num_drafted: expected at least 0, got -1"),
    ({"specdec_pp": {}}, "expected grid.specdec_pp.head=[FOLDER], or leave the method out with ~grid.specdec_pp"),
])  # fmt: skip
def test_cells_that_cannot_be_built_stop_the_sweep_before_any_work(tmp_path, decoded, grid, message):
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        sweep.run(sweep_config(tmp_path, grid={"autoregressive": {}, **grid}))
    assert message in str(error.value)
    assert decoded == []
    assert not list(tmp_path.iterdir())


def test_methods_without_their_head_are_left_out_beside_others(tmp_path, decoded, capsys):
    folder = sweep.run(sweep_config(tmp_path, grid={**SMALL, "specdec_pp": {}}))
    assert decoded == ["autoregressive", "speculative"] == list(dict.fromkeys(read_table(folder, "rows").method))
    assert "specdec_pp: left out, the pair has no trained head" in capsys.readouterr().out


def test_greedy_texts_do_not_depend_on_the_method(tmp_path):
    folder = sweep.run(sweep_config(tmp_path, grid={**SMALL, "oracle": {}}, sampling={"temperature": 0.0}))
    sequences = [pd.read_parquet(path).token_ids.map(list).tolist() for path in sorted((folder / "settings").iterdir())]
    written = [text for text in sequences if any(text)]
    assert len(written) == 2
    assert written[0] == written[1]
    rows = read_table(folder, "rows")
    assert (rows[rows.method == "oracle"][list(COUNTS)] % 1 == 0).all(axis=None), (
        "acceptance draws are certain at temperature 0"
    )


@pytest.mark.parametrize("source", ["live", "traces"])
def test_prompts_that_cannot_be_decoded_stay_visible(source, tmp_path, monkeypatch):
    load = IdPrompts.load
    monkeypatch.setattr(
        IdPrompts, "load", lambda self: [*load(self), type(load(self)[0])(id="empty", content=[], answer=None)]
    )
    grid = {"autoregressive": {}, "oracle": {}, "speculative": {}}
    rows = read_table(sweep.run(sweep_config(tmp_path, grid=grid, source=source)), "rows")
    assert set(rows.method) == set(grid)
    assert rows[rows.prompt == "empty"].error.str.contains("empty").all()
    assert rows[rows.prompt != "empty"].error.isna().all()
    assert torch.tensor(rows[rows.prompt == "empty"][list(COUNTS)].to_numpy(dtype=float)).sum() == 0


SHARED = {"speculative": {"policy.num_drafted": [1, 2, 3]}, "tail": {}, "oracle": {}}


@pytest.mark.parametrize("source", ["live", "traces"])
def test_ranks_share_the_settings_and_the_last_one_joins(tmp_path, decoded, source, capsys):
    grid = {"autoregressive": {}, **SHARED}
    whole = sweep.run(sweep_config(tmp_path / "whole", grid=grid, source=source))
    alone = list(decoded)
    decoded.clear()
    for rank in (1, 2, 0):
        folder = sweep.run(sweep_config(tmp_path / "shared", grid=grid, source=source, world_size=3, rank=rank))
        assert read_manifest(folder)["status"] == ("finished" if rank == 0 else "running")
    assert sorted(decoded) == sorted(alone)  # plain decoding once, and no setting twice
    for name in ("rows", "summary"):
        tables = [read_table(one, name) for one in (whole, folder)]
        seconds = {"setting_seconds", "seconds"}
        pd.testing.assert_frame_equal(*(table[[c for c in table if c not in seconds]] for table in tables))
    assert (folder / "tokens.json").exists() == (whole / "tokens.json").exists()
    assert not list(folder.glob(".lock*"))
    capsys.readouterr()
    sweep.run(sweep_config(tmp_path / "shared", grid=grid, source=source, world_size=3, rank=1))
    assert "finished before" in capsys.readouterr().out


def test_a_rank_with_a_failing_setting_says_so_and_another_try_ends_it(tmp_path, decoded, monkeypatch):
    config = {"grid": SMALL, "world_size": 2}
    with monkeypatch.context() as patch:
        patch.setattr(sweep_context, "decode", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("power cut")))
        with pytest.raises(InputError, match="every setting failed.*power cut"):
            sweep.run(sweep_config(tmp_path, rank=0, **config))
    sweep.run(sweep_config(tmp_path, rank=0, **config))
    folder = sweep.run(sweep_config(tmp_path, rank=1, **config))
    assert read_manifest(folder)["status"] == "finished" and len(read_table(folder, "rows")) == 2 * 7

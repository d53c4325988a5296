"""A multirun of four heads, offline: what the files hold that are synced later."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.offline_runs import inventory, table
from toolkit.files.atomic import read_json
from toolkit.runs.tracking import run_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["optimizer.lr=1e-2", "trainer.max_epochs=2", "data.batch_size=8", "trainer.log_every_n_steps=4"]


def run_command(folder, module, *words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_multirun_offline(tiny_overrides, tiny_responses, tmp_path):
    """Its data are made once, by a stage before the first job."""
    mix = [*tiny_overrides, f"responses={tiny_responses}", "paths.root_dir=out"]
    before = f"+before.mix={{run:data_gen.mix.run,config:mix,overrides:{json.dumps(mix)}}}"
    words = [*tiny_overrides, "data.path='{mix}'", *SMALL, "paths.root_dir=out", before]
    output = run_command(tmp_path, "toolkit.train", "-m", "head.depth=0,1", "loss.w_rej=1,6", *words)
    assert len(list((tmp_path / "out").glob("mix-*"))) == 1
    assert len(list((tmp_path / "out").glob("mix-*/hidden-*"))) == 1
    assert output.count("; 0 bytes to be written") == 3
    (multirun,) = (tmp_path / "out" / "multirun").iterdir()
    assert (multirun / "table.md").read_text().count("\n") == 6 and f"table: {multirun.relative_to(tmp_path)}" in output
    jobs = sorted((read_json(path) for path in multirun.glob("*/job.json")), key=lambda job: job["job"])
    heads = [tmp_path / job["folder"] for job in jobs]
    check_heads(heads, multirun.name)
    check_table(multirun, heads)


def check_heads(folders, group):
    """Four trainings: one group, each called by what sets it apart, curves and parameters as numbers."""
    runs = [inventory(folder) for folder in folders]
    assert [one["name"] for one in runs] == [f"acceptance_head depth={d} w_rej={w}" for d in (0, 1) for w in (1, 6)]
    for one in runs:
        assert (one["group"], one["job_type"], one["tags"], one["exit"]) == (group, "train", ["train"], 0)
        scores = {"train/loss", "val/auroc", "val/log_loss_calibrated", "parameters/head", "trainer/global_step"}
        assert scores <= set(one["scalars"]) and not one["tables"] and one["artifacts"] == []


def check_table(folder, heads):
    """The sweep's own run: the joint table, in the group of its jobs."""
    run = inventory(folder)
    assert (run["name"], run["group"]) == (f"multirun {folder.name}", folder.name)
    assert (run["job_type"], run["exit"], run["tables"]) == ("multirun", 0, ["multirun/table"])
    assert run["scalars"] == {"jobs": 4, "jobs_done": 4, "jobs_failed": 0}
    columns, rows = table(folder, "multirun/table")
    assert columns[:3] == ["job", "head.depth", "loss.w_rej"] and [row[:3] for row in rows] == [
        [0, 0, 1], [1, 0, 6], [2, 1, 1], [3, 1, 6],
    ]  # fmt: skip
    for row, head in zip(rows, heads, strict=True):
        scores = read_json(head / "metrics.json")
        assert row[columns.index("val/auroc")] == pytest.approx(scores["val/auroc"], rel=1e-5)
    assert len({run_of(head)["id"] for head in heads}) == 4

"""The main function of a stage: what it prints, how it ends on errors, and what a sweep's jobs leave behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import CompactHydraException

from toolkit.config import CONF
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.runs import stage

ROOT = CONF.parent


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Runs a stage's command with words as its command line, in an empty folder; errors are not shortened by Hydra."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def run(words, work, score=None):
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["mix", "responses=here", *words])
        stage.command("mix", work, score)

    yield run
    GlobalHydra.instance().clear()


def fails(error):
    def run(cfg):
        raise error

    return run


def test_a_command_runs_on_its_config_and_says_where_the_output_is(call, capsys, tmp_path):
    seen = []

    def work(cfg):
        seen.append((cfg.mixing_ratio, cfg.responses, stage.sweep_name(), stage.job_dir().resolve()))
        return Path("some") / "folder"

    call(["mixing_ratio=0.5"], work)
    assert seen == [(0.5, "here", None, tmp_path.resolve())]
    assert capsys.readouterr().out == "output: some/folder\n"
    assert not list(tmp_path.iterdir())  # only the jobs of a sweep leave a note


def test_a_result_that_is_no_folder_is_not_announced(call, capsys):
    call([], lambda cfg: 3)
    assert capsys.readouterr().out == ""


def test_a_score_is_asked_of_the_config_and_the_folder(call):
    seen = []

    def score(cfg, folder):
        seen.append((cfg.mixing_ratio, folder))
        return 1.0

    call(["mixing_ratio=0.5"], lambda cfg: Path("out"), score)
    assert seen == [(0.5, Path("out"))]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("seed: too large"), "error: seed: too large"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), r"error: could not read or write /x/y: Permission .*"),
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device; .*"),
    ],
)  # fmt: skip
def test_what_a_user_can_mend_is_one_line(call, error, line):
    with pytest.raises(SystemExit, match=f"^{line}$") as caught:
        call([], fails(error))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [OSError("no number"), ZeroDivisionError("a fault of ours")])
def test_other_errors_are_shown_whole(call, error):
    with pytest.raises(type(error), match=str(error)):
        call([], fails(error))


def test_the_config_is_checked_before_the_work(call):
    with pytest.raises(SystemExit, match="^error: mixing_ratio: expected .*, got 2"):
        call(["mixing_ratio=2"], lambda cfg: pytest.fail("the work has begun"))
    with pytest.raises(SystemExit, match="^error: .*seeed"):
        call(["seeed=2"], lambda cfg: pytest.fail("the work has begun"))


def test_each_job_of_a_sweep_notes_its_output_and_knows_the_sweeps_name(call, tmp_path, capsys):
    seen = []

    def work(cfg):
        seen.append((cfg.seed, stage.sweep_name()))
        return stage.output_dir("mix", {"paths": {"output_dir": "out"}}, f"hash{cfg.seed}")

    call(["-m", "seed=3,4", "hydra.sweep.dir=sweep"], work)
    assert seen == [(3, "sweep"), (4, "sweep")]
    for job in (0, 1):
        assert read_json(tmp_path / "sweep" / str(job) / stage.OUTPUT) == {"folder": f"out/hash{job + 3}"}
    assert "output: out/hash3\n" in capsys.readouterr().out


def test_a_bad_job_of_a_sweep_is_named_by_hydra(call):
    with pytest.raises(CompactHydraException, match="^error: seed: too large$"):
        call(["-m", "seed=3,4", "hydra.sweep.dir=sweep"], fails(InputError("seed: too large")))
    with pytest.raises(CompactHydraException, match="^error: mixing_ratio: expected"):
        call(["-m", "mixing_ratio=2,3", "hydra.sweep.dir=sweep"], lambda cfg: None)


def test_the_root_config_of_the_users_choice_is_checked_as_such(call):
    with pytest.raises(SystemExit, match="^error: .*responses"):  # conf/decode.yaml has no such key
        call(["--config-name", "decode"], lambda cfg: None)


# -- in processes of their own ------------------------------------------------------------------------------------------


def test_errors_on_the_command_line_are_one_line_each(tmp_path):
    for words, expected in (
        (["toolkit.decode", "method=specd"], "error: unknown method 'specd'"),
        (["toolkit.decode", "sampling.temperature=-1"], "error: sampling.temperature: expected at least 0, got -1"),
        (
            ["toolkit.decode", "prompts=jsonl", "prompts.path=none.jsonl"],
            "error: expected a prompts file at none.jsonl",
        ),
    ):
        command = [sys.executable, "-m", *words, f"paths.root_dir={tmp_path}"]
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        assert result.returncode == 1
        assert result.stderr.strip().splitlines()[-1].startswith(expected)
        assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_bad_job_of_a_sweep_is_one_line_and_the_others_run(tmp_path):
    words = ["toolkit.decode", "-m", "prompts=toy_math", "prompts.limit=1", "sampling.max_new_tokens=2",
             "sampling.temperature=-1,1", f"paths.root_dir={tmp_path}", f"hydra.sweep.dir={tmp_path}/sweep"]  # fmt: skip
    result = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1
    assert "sampling.temperature=-1" in result.stderr
    assert "error: sampling.temperature: expected at least 0, got -1" in result.stderr.splitlines()
    assert "Traceback" not in result.stderr
    assert len(list(tmp_path.glob("decode-*"))) == 1

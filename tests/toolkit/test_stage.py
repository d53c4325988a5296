"""Stages: folders named by content, stale work refused, clear lines for bad input, conf/ in an installed wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from toolkit import io, stage
from toolkit.config import CONF, choices, compose
from toolkit.errors import InputError, StaleError

ROOT = CONF.parent


def config_of(tmp_path: Path, **values):
    return OmegaConf.create({"paths": {"root_dir": str(tmp_path), "output_dir": None}, "overwrite": False, **values})


def test_folders_are_named_by_what_determines_their_content(tmp_path):
    one = stage.open_stage("demo", config_of(tmp_path, size=1, batch_size=4))
    same = stage.open_stage("demo", config_of(tmp_path, size=1, batch_size=9))
    other = stage.open_stage("demo", config_of(tmp_path, size=2, batch_size=4))
    assert one.folder == same.folder != other.folder
    assert not one.finished
    one.finish(rows=3)
    assert stage.open_stage("demo", config_of(tmp_path, size=1)).manifest["rows"] == 3


def test_whatever_is_not_declared_free_determines_the_content(tmp_path):
    """A seed above all: two seeds are two results. Folders of free keys alone are one."""
    values = {"seed": 0, "limit": 3, "sampling": {"seed": 0, "top_k": 1}, "name": "a"}
    changed = [{"seed": 1}, {"limit": 4}, {"sampling": {"seed": 1, "top_k": 1}}, {"sampling": {"seed": 0, "top_k": 2}},
               {"name": "b"}, {"new": None}]  # fmt: skip
    folders = [
        stage.open_stage("demo", config_of(tmp_path, **{**values, **change})).folder for change in ({}, *changed)
    ]
    assert len(set(folders)) == len(folders)
    free = {key: 5 for key in stage.FREE_KEYS if key not in ("paths", "overwrite")}
    assert stage.open_stage("demo", config_of(tmp_path, **values, **free)).folder == folders[0]
    assert "seed" not in stage.FREE_KEYS
    assert (
        stage.open_stage("demo", config_of(tmp_path, **{**values, "name": "c"}), ignore=["name"]).folder not in folders
    )


def test_inputs_count_by_their_content(tmp_path):
    source = tmp_path / "in.txt"
    source.write_text("a")
    cfg = OmegaConf.merge(config_of(tmp_path), {"paths": {"output_dir": str(tmp_path / "out")}})
    stage.open_stage("demo", cfg, inputs=[source]).finish()
    assert stage.open_stage("demo", cfg, inputs=[source]).finished
    source.write_text("b")
    with pytest.raises(StaleError, match="its inputs have changed .*in.txt"):
        stage.open_stage("demo", cfg, inputs=[source])
    cfg.overwrite = True
    assert not stage.open_stage("demo", cfg, inputs=[source]).finished


def test_foreign_folders_are_not_overwritten(tmp_path):
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    cfg = OmegaConf.merge(config_of(tmp_path), {"paths": {"output_dir": str(folder)}, "overwrite": True})
    with pytest.raises(InputError, match="was not made by this toolkit"):
        stage.open_stage("demo", cfg)
    stage.open_stage("other", OmegaConf.merge(cfg, {"paths": {"output_dir": str(tmp_path / "b")}, "overwrite": False}))
    with pytest.raises(StaleError, match="it was made by other, not demo"):
        stage.open_stage(
            "demo", OmegaConf.merge(cfg, {"paths": {"output_dir": str(tmp_path / "b")}, "overwrite": False})
        )
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_files_are_whole_or_absent(tmp_path):
    def half(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    io.write_text(tmp_path / "a.txt", "old")
    with pytest.raises(InputError, match="could not write .*a.txt: No space left on device; nothing was changed there"):
        io.write_atomic(tmp_path / "a.txt", half)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_tidy_overrides_take_the_templates_spelling_and_put_debug_last():
    words = ["debug=fdr", "experiment=a", "x=1", "+hparams_search=g"]
    assert stage.tidy_overrides(words) == ["+experiment=a", "x=1", "+hparams_search=g", "+debug=fdr"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("+experiment=quickstrat", "unknown experiment 'quickstrat': did you mean quickstart"),
        ("method=specdecpp", "unknown method 'specdecpp': did you mean specdec_pp"),
        ("prompts=toy_mth", "unknown prompts 'toy_mth': did you mean toy_math"),
        ("method=speculative,blok", "unknown method 'blok': did you mean block"),
    ],
)
def test_unknown_choices_suggest_the_near_ones(word, message):
    with pytest.raises(InputError, match=message):
        stage.check_choices([word])
    stage.check_choices(["experiment=glob(*)", "pair.target=x", "method=null"])


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


@pytest.mark.parametrize("root", [path.stem for path in sorted(CONF.glob("*.yaml"))])
def test_every_root_config_composes(root):
    assert compose(root) is not None


@pytest.mark.parametrize("name", choices("experiment"))
def test_every_experiment_composes(name):
    assert compose("distill" if name == "distill" else "train", [f"+experiment={name}"]) is not None


def test_a_bad_job_of_a_sweep_is_one_line_and_the_others_run(tmp_path):
    words = ["toolkit.decode", "-m", "prompts=toy_math", "prompts.limit=1", "sampling.max_new_tokens=2",
             "sampling.temperature=-1,1", f"paths.root_dir={tmp_path}", f"hydra.sweep.dir={tmp_path}/sweep"]  # fmt: skip
    result = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1
    assert "sampling.temperature=-1" in result.stderr
    assert "error: sampling.temperature: expected at least 0, got -1" in result.stderr.splitlines()
    assert "Traceback" not in result.stderr
    assert len(list(tmp_path.glob("decode-*"))) == 1


@pytest.mark.slow
def test_conf_is_found_from_an_installed_wheel_and_not_shadowed(tmp_path):
    """A wheel is a folder of packages with conf/ beside them; a user's own conf/ in the working folder is ignored."""
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(tmp_path), str(ROOT)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert (site / "toolkit" / "assets" / "toy" / "target" / "model.safetensors").exists()
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "conf").mkdir(parents=True)
    (elsewhere / "conf" / "decode.yaml").write_text("wrong: true\n")
    libraries = sysconfig.get_paths()["purelib"]
    result = subprocess.run(
        [sys.executable, "-S", "-m", "toolkit.decode", "--cfg", "job", "method=block"],
        capture_output=True, text=True, cwd=elsewhere, env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{libraries}"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "toolkit.verification.rules.block.Block" in result.stdout
    assert "wrong" not in result.stdout

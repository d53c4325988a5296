"""Hydra's launchers, run here: processes share a stage, and lost parts alone are made again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from data_gen import responses, traces
from toolkit.config import compose
from toolkit.runs.stage import read_manifest

pytestmark = pytest.mark.slow
# The classifiers of all three packages end at Python 3.10. They run on 3.11; Ray's needs a joblib below 1.6.
PLUGINS = {"joblib": "hydra_joblib_launcher", "submitit_local": "hydra_submitit_launcher", "ray": "hydra_ray_launcher"}


@pytest.fixture
def words(checkpoints, tmp_path) -> list[str]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": f"the cat {i}"}) + "\n" for i in range(9)))
    return [
        f"pair.target={checkpoints[0]}", f"pair.draft={checkpoints[1]}", "prompts=jsonl", f"prompts.path={path}",
        "shard_size=2", "sampling.max_new_tokens=5",
    ]  # fmt: skip


def launch(launcher: str, tmp_path: Path, words: list[str], *more: str) -> subprocess.CompletedProcess:
    """A multirun of responses below tmp_path; without the launcher's package the test is skipped."""
    pytest.importorskip("hydra_plugins." + PLUGINS[launcher])
    said = ["-m", f"hydra/launcher={launcher}", f"paths.root_dir={tmp_path / 'out'}", *words, *more]
    return subprocess.run(
        [sys.executable, "-m", "data_gen.responses", *said], capture_output=True, text=True, timeout=500
    )


def made(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "out").glob("responses-*")
    return folder


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}


@pytest.mark.parametrize("launcher", PLUGINS)
def test_jobs_share_a_stage_and_lost_parts_alone_are_made_again(launcher, tmp_path, words):
    ranks = ["world_size=2", "rank=0,1"]
    done = launch(launcher, tmp_path, words, *ranks)
    assert done.returncode == 0, done.stderr[-2000:]
    for _ in range(100):  # the last of two that end together joins; on a file system that tells late, another try does
        if read_manifest(made(tmp_path))["status"] == "finished":
            break
        time.sleep(0.1)
    whole = responses.run(compose("responses", [*words, f"paths.output_dir={tmp_path / 'whole'}"]))
    assert shards(made(tmp_path)) == shards(whole) and len(shards(whole)) == 5
    stamps = {path.name: path.stat().st_mtime_ns for path in made(tmp_path).iterdir()}
    (made(tmp_path) / "shard-00003.jsonl").unlink()
    assert launch(launcher, tmp_path, words, *ranks).returncode == 0
    assert shards(made(tmp_path)) == shards(whole)
    kept = {name for name, stamp in stamps.items() if (made(tmp_path) / name).stat().st_mtime_ns == stamp}
    assert {f"shard-0000{n}.jsonl" for n in (0, 1, 2, 4)} <= kept


def workers(folder: Path) -> list[int]:
    """The processes of submitit's jobs below a folder."""
    numbers = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            words = path.read_bytes()
            if b"submitit.core._submit" in words and str(folder).encode() in words:
                numbers.append(int(path.parent.name))
    return numbers


def run_with_one_killed(module: str, folder: Path, part: str, words: list[str]) -> Path:
    """Eight jobs, one killed once a part is there; the same line again makes what it lacked. Returns the stage's folder."""
    command = [
        sys.executable, "-m", module, "-m", "hydra/launcher=submitit_local", f"paths.root_dir={folder}", *words,
        "world_size=8", "rank=0,1,2,3,4,5,6,7",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(folder.glob(f"*/{part}")) and process.poll() is None:
        time.sleep(0.02)
    (killed, *_) = workers(folder)
    os.kill(killed, signal.SIGKILL)
    assert process.wait() != 0
    (stage,) = folder.glob(f"{module.rpartition('.')[2]}-*")
    assert read_manifest(stage)["status"] != "finished"
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return stage


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds the jobs' processes in /proc")
def test_eight_shards_of_responses_and_recordings_are_joined_after_one_is_killed(tmp_path, words):
    pytest.importorskip("hydra_plugins." + PLUGINS["submitit_local"])
    words = [*words, "prompts.limit=null", "shard_size=1", "sampling.max_new_tokens=20"]
    made_once = responses.run(compose("responses", [*words, f"paths.output_dir={tmp_path / 'once'}"]))
    stage = run_with_one_killed("data_gen.responses", tmp_path / "many", "shard-*", words)
    assert shards(stage) == shards(made_once) and len(shards(stage)) == 9
    pair = [word for word in words if word.startswith("pair.")]
    recorded = [*pair, f"responses={stage}", "shard_size=1", "max_drafted=3", "heads={}"]
    recorded_once = traces.run(compose("traces", [*recorded, f"paths.output_dir={tmp_path / 'recorded'}"]))
    again = run_with_one_killed("data_gen.traces", tmp_path / "many", "traces-*.safetensors", recorded)
    parts = [{path.name: path.read_bytes() for path in one.glob("traces-*")} for one in (again, recorded_once)]
    assert parts[0] == parts[1] and len(parts[0]) == 9

"""A training in several processes: equal to one process with as many times the batch; refusals; interruption."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from toolkit import distill, train
from toolkit.config import compose
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.training.batches import ExampleBatches, Examples
from toolkit.training.examples import Positions
from toolkit.training.processes import check_accelerator, check_number, check_processes, is_distributed
from toolkit.training.trainer import build_trainer

ROOT = Path(__file__).resolve().parents[3]
SMALL = [
    "head.depth=1", "trainer.max_epochs=3", "logger=csv", "trainer.log_every_n_steps=4", "trainer.precision=64-true",
    "callbacks.checkpoints.every_n_steps=2",
]  # fmt: skip
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


class Numbers(Examples):
    """Examples that are their own numbers."""

    def __init__(self, count):
        self.num_examples = count

    def batch(self, examples):
        number = torch.tensor(examples)
        return Positions(number.unsqueeze(1), number.double(), number.double())


@pytest.mark.parametrize(
    ("device", "devices", "expected"),
    [("cpu", 1, ("cpu", 1)), ("cuda", 1, ("gpu", [0])), ("cuda:2", 1, ("gpu", [2])), ("cuda", 2, ("cpu", 2))],
)
def test_one_process_trains_on_the_gpu_of_its_device(device, devices, expected, tmp_path):
    trainer = {"_target_": "builtins.dict", "_partial_": True, "accelerator": "cpu", "devices": devices}
    cfg = OmegaConf.create({"callbacks": None, "trainer": trainer})
    built: Any = build_trainer(cfg, tmp_path, [], torch.device(device))
    assert (built["accelerator"], built["devices"]) == expected


@pytest.mark.parametrize("seed", [3, 4096])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 12, 13, 23])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_processes_share_the_batches_of_one_process(count, world, seed):
    """Step for step, their batches together are one batch of the single process; none is left out or comes twice."""
    states = Numbers(count)
    shared = {"shuffle": True, "seed": seed, "even": True}
    whole = ExampleBatches(states, 2 * world, **shared)
    parts = [list(ExampleBatches(states, 2, rank=rank, world=world, **shared)) for rank in range(world)]
    assert {len(part) for part in parts} == {len(whole)}
    for batch, shares in zip(whole, zip(*parts, strict=True), strict=True):
        assert sorted(batch.hidden.squeeze(1).tolist()) == sorted(
            number for share in shares for number in share.hidden.squeeze(1).tolist()
        )
    for rank in range(world):
        one = ExampleBatches(states, 2, rank=rank, world=world, even=True)
        assert len(one) == len(whole) == len(list(one))


@pytest.mark.parametrize("seed", [3, 4096, 2**40])
def test_processes_take_their_shares_of_one_order(seed):
    order = ExampleBatches(Numbers(23), 2, shuffle=True, seed=seed).order(5)
    parts = [ExampleBatches(Numbers(23), 2, shuffle=True, seed=seed, rank=r, world=3).order(5) for r in range(3)]
    assert parts == [order[0::3], order[1::3], order[2::3]] and sorted(order) == list(range(23))


def test_validation_sees_every_example_once():
    batches = [ExampleBatches(Numbers(7), 2, rank=rank, world=3) for rank in range(3)]
    seen = [list(one) for one in batches]
    assert [len(one) for one in batches] == [len(one) for one in seen]
    numbers = [number for one in seen for batch in one for number in batch.hidden.squeeze(1).tolist()]
    assert sorted(numbers) == list(range(7))


@pytest.mark.parametrize(
    ("strategy", "multirun", "message"),
    [
        ("ddp", True, "expected one command per training"),
        ("fsdp", False, "splits the weights: expected ddp"),
        ("deepspeed_stage_3", False, "splits the weights: expected ddp"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_made(strategy, multirun, message):
    check_processes({"strategy": "ddp"}, multirun=False)
    check_processes({"strategy": "auto"}, multirun=multirun)
    with pytest.raises(InputError, match=message):
        check_processes({"strategy": strategy}, multirun=multirun)


def test_the_number_of_processes_is_that_of_the_config():
    check_number({"devices": 2, "num_nodes": 2}, 4)
    check_number({"devices": "auto"}, 3)
    with pytest.raises(InputError, match="expected their product to be 4"):
        check_number({"devices": 3}, 4)


@pytest.mark.parametrize("name", ["ddp", "ddp_sim"])
def test_the_trainers_of_several_processes_compose(name):
    for command_name in ("train", "distill"):
        assert compose(command_name, [f"trainer={name}"]).trainer.strategy == "ddp"


def command(words, launcher=("-m",), module="toolkit.train"):
    """A command line that trains in several processes."""
    return [sys.executable, *launcher, *([] if launcher == ("-m",) else ["-m"]), module, *words]


def finished(words, cwd, variables=(), **how):
    """The output of a command that ends well."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
        **dict(variables),
    }
    done = subprocess.run(command(words, **how), cwd=cwd, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def assert_same(folder, other, tolerance=1e-10):
    """Weights and scores of two trainings."""
    left, right = (load_file(one / "head" / "head.safetensors") for one in (folder, other))
    assert left.keys() == right.keys()
    for name, values in left.items():
        torch.testing.assert_close(values, right[name], rtol=0, atol=max(tolerance, 1e-7))  # saved in float32
    metrics, theirs = read_json(folder / "metrics.json"), read_json(other / "metrics.json")
    assert metrics.keys() == theirs.keys()
    for name, value in metrics.items():
        assert value == pytest.approx(theirs[name], rel=1e-6, abs=1e-9), name


@pytest.fixture(scope="module")
def alone(tiny_overrides, tiny_mix, tmp_path_factory):
    """One process, batches of 14 of 47 examples: the last one has 5; the learning rate is found."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    words = [*tiny_overrides, f"data.path={tiny_mix}", *SMALL, "data.batch_size=14", f"paths.output_dir={folder}"]
    return train.run(compose("train", words))


def shares(tiny_overrides, tiny_mix, folder):
    """The same in two processes."""
    return [
        *tiny_overrides,
        f"data.path={tiny_mix}",
        *SMALL,
        "data.batch_size=7",
        "trainer=ddp_sim",
        f"paths.output_dir={folder}",
    ]


TORCHRUN_LEFT = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


def test_one_process_ignores_variables_that_launchers_have_left(tiny_overrides, tiny_mix, tmp_path):
    """It shows and writes what it does without them; Lightning reads some of them when it is imported."""
    short = ["trainer=cpu", "trainer.max_epochs=1", "optimizer.lr=1e-2", f"paths.output_dir={tmp_path / 'run'}"]
    words = [*tiny_overrides, f"data.path={tiny_mix}", *SMALL, *short]
    output = finished(words, tmp_path, variables={**TORCHRUN_LEFT, "SLURM_NTASKS": "4", "SLURM_PROCID": "2"})
    assert f"output: {tmp_path / 'run'}" in output
    assert {"metrics.csv", "config.yaml", "head"} <= {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize(
    ("trainer", "several"),
    [
        ({}, False), ({"devices": 2}, True), ({"devices": [1]}, False), ({"devices": [0, 1]}, True), ({"devices": "2"}, True),
        ({"devices": "auto", "accelerator": "cpu"}, False), ({"strategy": "ddp"}, True), ({"num_nodes": 2}, True),
    ],
)  # fmt: skip
def test_a_trainers_config_says_whether_there_are_several_processes(trainer, several):
    assert is_distributed(trainer) == several


@pytest.mark.slow
def test_two_processes_train_the_head_of_one_with_twice_the_batch(alone, tiny_overrides, tiny_mix, tmp_path):
    """Started by one command, as a user would, another launcher's rank or not; weights, scores and curves."""
    output = finished(
        shares(tiny_overrides, tiny_mix, tmp_path / "run"), tmp_path, variables={"RANK": "1", "WORLD_SIZE": "2"}
    )
    assert output.count("next: ") == 1 and output.count("output: ") == 1
    assert_same(tmp_path / "run", alone)
    curves = [
        pd.read_csv(folder / "metrics.csv").drop(columns="perf/tokens_per_second")
        for folder in (alone, tmp_path / "run")
    ]
    assert "train/loss" in curves[0]
    pd.testing.assert_frame_equal(*curves, rtol=1e-6)


@pytest.mark.slow
def test_torchrun_starts_a_training_with_its_data(alone, tiny_overrides, tiny_responses, tmp_path):
    """The first process makes the data, the second one waits for them and finds them."""
    mix = [*tiny_overrides, f"responses={tiny_responses}", "validation_fraction=0.2", "paths.root_dir=out"]
    words = [word for word in shares(tiny_overrides, "'{mix}'", tmp_path / "run") if "ddp_sim" not in word]
    before = f"+before.mix={{run:data_gen.mix.run,config:mix,overrides:{json.dumps(mix)}}}"
    finished([*words, "trainer=ddp_sim", "paths.root_dir=out", before], tmp_path, launcher=TORCHRUN)
    assert_same(tmp_path / "run", alone)
    assert len(list((tmp_path / "out").glob("mix-*"))) == 1


@pytest.mark.slow
def test_a_killed_training_in_two_processes_goes_on(alone, tiny_overrides, tiny_mix, tmp_path):
    words, folder = shares(tiny_overrides, tiny_mix, tmp_path / "run"), tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(words), cwd=tmp_path, env=environment, start_new_session=True)
    last = folder / "checkpoints" / "last.ckpt"
    while not last.exists() and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "head").exists(), "finished before it could be killed"
    finished(words, tmp_path)
    assert_same(folder, alone)


@pytest.mark.slow
def test_two_processes_distil_the_draft_of_one_with_twice_the_batch(tiny_overrides, tiny_responses, tmp_path):
    common = [
        *tiny_overrides, f"responses=[{tiny_responses}]", "trainer.max_epochs=2", "optimizer.lr=1e-3", "pair.dtype=float64",
    ]  # fmt: skip
    one = distill.run(compose("distill", [*common, "data.batch_size=8", f"paths.output_dir={tmp_path / 'one'}"]))
    finished(
        [*common, "data.batch_size=4", "trainer=ddp_sim", f"paths.output_dir={tmp_path / 'two'}"],
        tmp_path,
        module="toolkit.distill",
    )
    left, right = (load_file(folder / "draft" / "model.safetensors") for folder in (one, tmp_path / "two"))
    for name, values in left.items():
        torch.testing.assert_close(values, right[name], rtol=0, atol=1e-6)  # losses are computed in float32
    metrics, theirs = (read_json(folder / "metrics.json") for folder in (one, tmp_path / "two"))
    assert metrics == pytest.approx(theirs, rel=1e-6)


def test_an_accelerator_that_is_not_there_is_one_line_before_anything_is_made():
    for wanted in ("auto", "cpu"):
        check_accelerator({"accelerator": wanted})
    for wanted in ("tpu", "gpuu", *([] if torch.cuda.is_available() or torch.backends.mps.is_available() else ["gpu"])):
        with pytest.raises(InputError, match=rf"^trainer.accelerator: expected auto, .*, got {wanted}$"):
            check_accelerator({"accelerator": wanted})

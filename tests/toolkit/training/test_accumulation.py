"""Steps of several batches, and bfloat16: the same weights as one large batch, scores in float32."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.toolkit.training.runs import curves, same_weights, weights
from toolkit.files.atomic import read_json
from toolkit.training.module import HeadTraining

pytestmark = pytest.mark.usefixtures("undrawn")

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["head.depth=1", "trainer.max_epochs=3", "logger=csv", "callbacks.checkpoints.every_n_steps=1"]


@pytest.mark.parametrize("more", [[], ["optimizer.lr=1e-2", "trainer.gradient_clip_val=.01"]])
def test_accumulated_batches_are_one_large_batch(run, more):
    """In float64, with rows of unequal counts, a last step of fewer rows, without and with a rate in the config."""
    precise = ["trainer.precision=64-true", "pair.dtype=float64", "trainer.log_every_n_steps=1", *more]
    large = run("large", *SMALL, "data.batch_size=8", *precise)
    parts = run("parts", *SMALL, "data.batch_size=2", "trainer.accumulate_grad_batches=4", *precise)
    left, right = (torch.load(one / "checkpoints/last.ckpt", weights_only=True) for one in (large, parts))
    assert left["global_step"] == right["global_step"] == 18
    for name, tensor in left["state_dict"].items():
        assert torch.allclose(tensor.double(), right["state_dict"][name].double(), atol=1e-8, rtol=0), name
    assert [row["step"] for row in curves(large)] == [row["step"] for row in curves(parts)]
    for one, other in zip(curves(large), curves(parts), strict=True):
        assert float(one["train/loss"]) == pytest.approx(float(other["train/loss"]), rel=1e-6)


@pytest.mark.slow
def test_several_processes_are_one_large_batch(run, tiny_overrides, tiny_mix, tmp_path):
    """Two processes that each accumulate two batches of two rows, against one with batches of eight."""
    words = ["optimizer.lr=1e-2", "trainer.precision=64-true", "pair.dtype=float64"]
    parts = ["trainer=ddp", "trainer.accelerator=cpu", "data.batch_size=2", "trainer.accumulate_grad_batches=2"]
    every = [*tiny_overrides, f"data.path={tiny_mix}", *SMALL, *parts, *words, f"paths.output_dir={tmp_path}/parts"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "toolkit.train", *every]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    folders = run("large", *SMALL, "data.batch_size=8", *words), tmp_path / "parts"
    left, right = (torch.load(one / "checkpoints/last.ckpt", weights_only=True) for one in folders)
    assert left["global_step"] == right["global_step"] == 18
    heads = [name for name in left["state_dict"] if name.startswith("head.")]
    assert all(torch.allclose(left["state_dict"][n], right["state_dict"][n], atol=1e-8, rtol=0) for n in heads)


def test_an_accumulating_training_is_resumed_between_steps(run, tmp_path, monkeypatch):
    words = ["data.batch_size=4", "trainer.accumulate_grad_batches=3", "optimizer.lr=1e-2"]
    whole = run("whole", *SMALL, *words)
    step, made = HeadTraining.training_step, []

    def fails_later(self, batch, batch_idx):
        made.append(batch_idx)
        if len(made) == 8:
            raise RuntimeError("power cut")
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(HeadTraining, "training_step", fails_later)
        with pytest.raises(RuntimeError, match="power cut"):
            run("cut", *SMALL, *words)
        made.clear()
        with pytest.raises(RuntimeError, match="power cut"):
            run("cut", *SMALL, *words)
    cut = run("cut", *SMALL, *words)
    assert same_weights(whole, cut) and curves(whole) == curves(cut)


def test_bfloat16_trains_and_is_scored_in_float32(run, monkeypatch):
    seen = set()
    loss_of, update = HeadTraining.loss_of, HeadTraining.add_scores

    def watched(self, head, batch):
        with torch.no_grad():
            inner = head.blocks[0].linear(batch.hidden.float())
        total, weight = loss_of(self, head, batch)
        seen.add(("loss", inner.dtype, total.dtype, weight.dtype))
        return total, weight

    def scored(self, scores, batch, head=None):
        seen.add(("score", (head or self.head).blocks[0].linear(batch.hidden.float()).dtype))
        return update(self, scores, batch, head)

    monkeypatch.setattr(HeadTraining, "loss_of", watched)
    monkeypatch.setattr(HeadTraining, "add_scores", scored)
    words = ["data.batch_size=8", "optimizer.lr=1e-2"]
    half = run("half", *SMALL, *words, "trainer.precision=bf16-mixed")
    single, double = torch.float32, torch.bfloat16
    assert seen == {("loss", double, single, single), ("score", single)}
    assert all(value.dtype == torch.float32 for value in weights(half).values())
    full = run("full", *SMALL, *words)
    one, other = (read_json(folder / "metrics.json") for folder in (half, full))
    assert one["val/log_loss_calibrated"] == pytest.approx(other["val/log_loss_calibrated"], abs=5e-3)
    assert weights(half).keys() == weights(full).keys() and not same_weights(half, full)
    best = min(float(row["val/log_loss_calibrated"]) for row in curves(half) if row["val/log_loss_calibrated"])
    assert one["val/log_loss_calibrated"] == pytest.approx(best, rel=1e-6)

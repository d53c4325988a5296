"""Stages killed at random moments: run again, they end with the uninterrupted output, and no file of others is deleted.

SOAK_KILLS  kills per stage (default 2); `make soak` takes more
"""

from __future__ import annotations

import multiprocessing
import os
import random
import runpy
import signal
import sys
import time
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from toolkit.config import quoted

KILLS = int(os.environ.get("SOAK_KILLS", "2"))
MOMENTS = 5  # moments that are tried for each kill, before a stage counts as too quick to be hit
ODD = "soak, a=b [c] {d} 'e' \"f\" ü"  # a folder's name
FEW = ["prompts.limit=8", "sampling.max_new_tokens=24", "max_drafted=6", "track=false", "grid=quickstart_live"]
# Module, words ({NAME}: folder of an earlier stage) and the files that hold the result, in the order in which they run.
STAGES: dict[str, tuple[str, list[str], str]] = {
    "responses": ("data_gen.responses", ["prompts=toy_instruct", "prompts.split=train", "prompts.limit=24", "shard_size=4",
                  "sampling.max_new_tokens=24"], "shard-*.jsonl"),
    "mix": ("data_gen.mix", ["responses={responses}", "batch_size=8"], "summary.json"),
    "traces": ("data_gen.traces", ["responses={responses}", "hidden=true", "max_drafted=6", "shard_size=4"],
               "traces-*.safetensors"),
    "train": ("toolkit.train", ["data.path={mix}", "trainer.max_epochs=6", "head.depth=1", "optimizer.lr=.002", "logger=csv"],
              "head/*.safetensors"),
    "sweep": ("analysis.sweep", ["prompts=toy_math", "prompts.split=dev", *FEW], "rows.csv"),
}  # fmt: skip


def work(module: str, words: list[str], folder: str) -> None:
    """What `python -m MODULE WORDS` does, in a process that has imported most of it already."""
    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    warnings.simplefilter("ignore")
    sys.argv = [module, *words, f"paths.output_dir={quoted(folder)}"]
    runpy.run_module(module, run_name="__main__")


class Chain:
    """The folders of the uninterrupted stages so far, and ways to run one more."""

    def __init__(self, root: Path):
        self.root, self.folders = root, dict[str, Path]()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([module for module, _, _ in STAGES.values()])

    def start(self, name: str, folder: Path) -> multiprocessing.process.BaseProcess:
        module, words, _ = STAGES[name]
        known = {key: quoted(str(value)) for key, value in self.folders.items()}
        process = self.context.Process(
            target=work, args=(module, [word.format(**known) for word in words], str(folder))
        )
        process.start()
        return process

    def finish(self, name: str, folder: Path) -> list[Path]:
        """Run to the end; the files that hold the result."""
        process = self.start(name, folder)
        process.join(300)
        assert process.exitcode == 0, (name, process.exitcode)
        files = sorted(folder.glob(STAGES[name][2]))
        assert files, (name, os.listdir(folder))
        return files


def same(one: Path, other: Path) -> bool:
    """Whether two files hold the same: bytes; in tables all columns but seconds; in tensors up to float32 rounding.

    Two uninterrupted processes may differ in a float's last bits.
    """
    if one.name != other.name:
        return False
    if one.suffix == ".csv":
        tables = [pd.read_csv(path) for path in (one, other)]
        return tables[0].filter(regex="^(?!.*seconds)").equals(tables[1].filter(regex="^(?!.*seconds)"))
    if one.suffix == ".safetensors":
        tensors, others = load_file(one), load_file(other)
        return tensors.keys() == others.keys() and all(
            torch.allclose(tensor.double(), others[key].double(), rtol=1e-4, atol=1e-4, equal_nan=True)
            for key, tensor in tensors.items()
        )
    return one.read_bytes() == other.read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_killed_stages_go_on_and_end_with_the_uninterrupted_output(tmp_path):
    rng, root, hits = random.Random(1), tmp_path / ODD, 0
    root.mkdir()
    chain = Chain(root)
    chain.finish("responses", root / "first")  # the server of processes imports everything before its first one
    for name in STAGES:
        started = time.monotonic()
        expected = chain.finish(name, root / "whole" / name)
        seconds = time.monotonic() - started
        for number in range(KILLS):
            folder = root / "killed" / f"{name} {number}"
            for _ in range(MOMENTS):
                process = chain.start(name, folder)
                process.join(rng.uniform(0.1, 0.9) * seconds)
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                    process.join()
                    hits += 1
                    break
                process.join()
            foreign = (
                [folder / "mine.txt", folder / "mine" / "too.jsonl"] if (folder / "manifest.json").exists() else []
            )
            for path in foreign:  # in a folder without a manifest the stage would rightly refuse to begin
                path.parent.mkdir(exist_ok=True)
                path.write_text("not the stage's")
            for path, wanted in zip(chain.finish(name, folder), expected, strict=True):
                assert same(path, wanted), path
            assert all(path.read_text() == "not the stage's" for path in foreign), (name, number)
        chain.folders[name] = root / "whole" / name
    assert hits > 0

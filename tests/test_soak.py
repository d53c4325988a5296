"""Stages killed again and again at random moments end with the uninterrupted output, and no file of others is deleted.

SOAK_KILLS  kills per stage (default 3), at most three of each folder; `make soak` takes more
"""

from __future__ import annotations

import json
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

from data_gen.domains.instruct import examples
from toolkit.config import quoted

KILLS = int(os.environ.get("SOAK_KILLS", "3"))
TIMES = 3  # kills of one folder, unless it is finished before
MOMENTS = 5  # moments that are tried for the first kill, before a stage counts as too quick to be hit
ODD = "soak, a=b [c] {d} 'e' \"f\" ü"  # a folder's name
SHORT = ["trainer.max_epochs=3", "data.batch_size=4", "callbacks.checkpoints.every_n_steps=2", "logger=csv",
         "paths.root_dir={root}"]  # fmt: skip
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
    "train_heads": ("toolkit.train_heads", ["data.path={mix}", "depths=[0,1]", "w_rejs=[1,6]", "max_epochs=4",
                    "optimizer.lr=.002"], "depth-*/head/*.safetensors"),
    "distill": ("toolkit.distill", ["responses=[{responses}]", "lmbda=.3", *SHORT], "draft/*.safetensors"),
    "distill_cached": ("toolkit.distill", ["responses=[{responses}]", "pair.draft=null", "layers=1", "vocabulary=100",
                       "teacher=cached", "exports=[plain]", *SHORT], "draft*/*.safetensors"),
    "distill_eagle3": ("toolkit.distill", ["responses=[{responses}]", "kind=eagle3", "vocabulary=100", "teacher=cached",
                       *SHORT], "draft/*.safetensors"),
    "draft": ("toolkit.train", ["+experiment=draft", "prompts.path={prompts}", "prompts.limit=24",
              "sampling.max_new_tokens=16"], "distill-*/draft*/*.safetensors"),
    "sweep": ("analysis.sweep", ["prompts=toy_math", "prompts.split=dev", *FEW], "rows.csv"),
}  # fmt: skip


def work(module: str, words: list[str]) -> None:
    """What `python -m MODULE WORDS` does, in a process that has imported most of it already."""
    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    warnings.simplefilter("ignore")
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__")


class Chain:
    """The folders of the uninterrupted stages so far, and ways to run one more."""

    def __init__(self, root: Path):
        self.root, self.folders = root, dict[str, Path]()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([module for module, _, _ in STAGES.values()])

    def start(self, name: str, folder: Path) -> multiprocessing.process.BaseProcess:
        module, words, _ = STAGES[name]
        own = Path(f"{folder} root")  # so that what stages share is made, too
        output = (
            f"paths.root_dir={quoted(str(folder))}" if name == "draft" else f"paths.output_dir={quoted(str(folder))}"
        )
        paths = {**self.folders, "root": own, "prompts": self.root / "prompts.jsonl"}
        known = {key: quoted(str(path)) for key, path in paths.items()}
        process = self.context.Process(target=work, args=(module, [*(word.format(**known) for word in words), output]))
        process.start()
        return process

    def finish(self, name: str, folder: Path) -> dict[Path, Path]:
        """Run to the end; the files that hold the result, by their path in the folder."""
        process = self.start(name, folder)
        process.join(900)
        assert process.exitcode == 0, (name, process.exitcode)
        files = sorted(folder.glob(STAGES[name][2]))
        assert files, (name, os.listdir(folder))
        return {path.relative_to(folder): path for path in files}


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
    lines = [json.dumps({"id": f"{i}", "prompt": example.prompt}) for i, example in enumerate(examples("train", 60))]
    (root / "prompts.jsonl").write_text("\n".join(lines))
    chain = Chain(root)
    chain.finish("responses", root / "first")  # the server of processes imports everything before its first one
    for name in STAGES:
        started = time.monotonic()
        expected = chain.finish(name, root / "whole" / name)
        seconds = time.monotonic() - started
        for number in range(-(-KILLS // TIMES)):
            folder, kills = root / "killed" / f"{name} {number}", 0
            for _ in range(MOMENTS):
                process = chain.start(name, folder)
                process.join(rng.uniform(0.1, 0.9) * seconds)
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                    kills += 1
                process.join()
                if kills == min(TIMES, KILLS):
                    break
            hits += kills
            foreign = (
                [folder / "mine.txt", folder / "mine" / "too.jsonl"] if (folder / "manifest.json").exists() else []
            )
            for path in foreign:  # in a folder without a manifest the stage would rightly refuse to begin
                path.parent.mkdir(exist_ok=True)
                path.write_text("not the stage's")
            files = chain.finish(name, folder)
            common = files.keys() & expected.keys()
            assert len(files) == len(expected), name
            assert len(common) == len(files) or (
                name == "draft" and len(common) >= 3
            )  # whose best shape is one of seconds
            assert all(same(files[path], expected[path]) for path in common), name
            assert all(path.read_text() == "not the stage's" for path in foreign), (name, number)
        chain.folders[name] = root / "whole" / name
    assert hits > 0

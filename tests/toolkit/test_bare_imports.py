"""The engine and most of `make gpu` need torch, transformers and safetensors (with what these need) and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HIDDEN = ("hydra", "omegaconf", "wandb", "datasets", "pytorch_lightning", "lightning", "torchmetrics", "sklearn", "scipy",
          "pandas", "pyarrow", "matplotlib", "rich", "jinja2", "accelerate", "pytest")  # fmt: skip
OURS = ("toolkit", "benchmarks", "data_gen", "tests")

HIDE = f"""
import builtins, sys

HIDDEN, OURS = {HIDDEN!r}, {OURS!r}


class Hiding:
    '''A finder that some packages are hidden from, as if they were not installed.'''

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


def only_for_others(name, globals=None, *args, original=builtins.__import__, **named):
    '''transformers brings tqdm along, but nothing of ours may build on that.'''
    importer = str((globals or {{}}).get("__name__")).partition(".")[0]
    if name.partition(".")[0] == "tqdm" and importer in OURS:
        raise ModuleNotFoundError("tqdm is imported by " + globals["__name__"])
    return original(name, globals, *args, **named)


sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
builtins.__import__ = only_for_others
"""
CODE = """
try:
    import pandas
except ModuleNotFoundError:
    print("pandas is hidden")

from benchmarks.gpu import main
from toolkit import ModelPair
from toolkit.decoding import Method, Sampling, decode
from toolkit.stopping import Fixed
from toolkit.verification import get

method = Method("speculative", Fixed(2), get("rejection"), max_drafted=2)
(generation,) = decode(ModelPair.toy(), ["Q: Repeat coral 5 times.\\nA:"], method, Sampling(max_new_tokens=3))
print(len(generation.token_ids), "tokens")
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
assert main(["exactness", "--device", "cpu", "--quick", "--only", "distribution: ", "--out", sys.argv[1]]) == 0
assert not set(HIDDEN) & {name.partition('.')[0] for name in sys.modules}, 'something hidden was imported'
"""


def test_the_engine_and_the_checks_run_without_the_rest(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", "")}
    result = subprocess.run(
        [sys.executable, "-c", HIDE + CODE, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    report = result.stdout
    assert "pandas is hidden\n3 tokens\n" in report and "--preset" in report
    assert "| distribution: importance_lp | reported | needs scipy, which is not installed |" in report
    assert "checks passed.**" in report and "FAILED" not in report

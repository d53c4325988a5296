"""The engine and most of `make gpu-check` need torch, transformers and safetensors (with what these need) and nothing else."""

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
LOADED = "assert not set(HIDDEN) & {name.partition('.')[0] for name in sys.modules}, 'something hidden was imported'\n"


def run(code: str) -> str:
    """Output of Python code with most packages hidden."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", "")}
    result = subprocess.run(
        [sys.executable, "-c", HIDE + code + LOADED], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_hidden_packages_are_hidden():
    code = "try:\n    import pandas\nexcept ModuleNotFoundError:\n    print('hidden')\n"
    assert run(code) == "hidden\n"


def test_the_engine_decodes_without_the_rest():
    assert "3 tokens" in run("""
from toolkit import ModelPair
from toolkit.decoding import Method, Sampling, decode
from toolkit.stopping import Fixed
from toolkit.verification import get

pair = ModelPair.toy()
method = Method("speculative", Fixed(2), get("rejection"), max_drafted=2)
(generation,) = decode(pair, ["Q: Repeat coral 5 times.\\nA:"], method, Sampling(max_new_tokens=3))
print(len(generation.token_ids), "tokens")
""")


def test_the_checks_run_without_the_rest():
    report = run("""
from benchmarks.gpu_check import main

try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
assert main(["--device", "cpu", "--quick", "--skip", "speed", "--only", "distribution: "]) == 0
""")
    assert "--preset" in report
    assert "| distribution: importance_lp | reported | needs scipy, which is not installed |" in report
    assert "checks passed.**" in report
    assert "FAILED" not in report

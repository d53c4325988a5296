"""What runs where packages are missing: decoding with the required ones alone, the engine with torch's and transformers'."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from toolkit.errors import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ENGINE = ["torch", "transformers", "safetensors"]
MODULES = {name: {*map(canonicalize_name, owners)} for name, owners in packages_distributions().items()}


def hidden_without(requirements: list[str]) -> list[str]:
    """Top-level modules of this environment that neither these packages nor what they require bring along."""
    brought, waiting = set[str](), [*map(Requirement, requirements)]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in brought or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        brought.add(name)
        try:
            waiting += map(Requirement, requires(name) or ())
        except PackageNotFoundError:  # of torch with CUDA, say
            continue
    ours = ("toolkit", "analysis", "data_gen", "conf", "hydra_plugins", "benchmarks", "tests")
    return [module for module, owners in MODULES.items() if not owners & brought and module not in ours]


HIDE = """
import builtins, json, sys

HIDDEN, OURS = set(json.loads(sys.argv.pop(1))), ("toolkit", "benchmarks", "data_gen", "tests")


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
    importer = str((globals or {}).get("__name__")).partition(".")[0]
    if name.partition(".")[0] == "tqdm" and importer in OURS:
        raise ModuleNotFoundError("tqdm is imported by " + globals["__name__"])
    return original(name, globals, *args, **named)


sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""
CODE = """
builtins.__import__ = only_for_others
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


DECODING = """
import runpy, torch
from transformers import AutoTokenizer
from toolkit import ModelPair, generate
from toolkit.integrations.custom_generate import custom_generate
from toolkit.models.pair import resolve

pair, prompt = ModelPair.toy(), "Q: Repeat coral 5 times.\\nA:"
(generation,) = generate(pair, [prompt], "rate", max_new_tokens=6)
print("generate:", len(generation.token_ids))
inputs = AutoTokenizer.from_pretrained(resolve("toy/target"))(prompt, return_tensors="pt")
options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
own = pair.target.generate(**inputs, **options)
ids = pair.target.generate(**inputs, **options, custom_generate=custom_generate, draft="toy/draft", method="rate")
print("custom_generate:", torch.equal(ids, own))


def command(*words):
    sys.argv[:] = ["command", *words[1:]]
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print(words[0], "ends:", end.code)


command("toolkit.decode", "method=rate", "prompts.limit=2", "sampling.max_new_tokens=6", "export=true")
command("toolkit.decode", "prompts=gsm8k")
command("toolkit.train", "+experiment=quickstart")
command("data_gen.responses")
command("analysis.sweep")
"""


def without(requirements: list[str], code: str, folder: Path, **variables: str) -> str:
    """The output of a program, run where only these packages and what they require can be imported."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    words = [sys.executable, "-c", HIDE + code, json.dumps(hidden_without(requirements)), str(folder)]
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_the_engine_and_the_checks_run_without_the_rest(tmp_path):
    report = without(ENGINE, CODE, tmp_path)
    assert "pandas is hidden\n3 tokens\n" in report and "--preset" in report
    assert "| distribution: importance_lp | reported | needs scipy, which is not installed |" in report
    assert "checks passed.**" in report and "FAILED" not in report


def test_decoding_needs_the_required_packages_alone_and_others_name_their_extra(tmp_path):
    output = without(PROJECT["dependencies"], DECODING, tmp_path)
    assert "generate: 6\ncustom_generate: True\n" in output and "toolkit.decode ends: 0\n" in output
    for line in (
        r"toolkit.decode ends: error: datasets is not installed: pip install 'acceptance-toolkit\[train\]'",
        r"toolkit.train ends: error: .*pytorch_lightning is not installed: pip install 'acceptance-toolkit\[train\]'",
        r"data_gen.responses ends: error: httpx is not installed: pip install 'acceptance-toolkit\[train\]'",
        r"analysis.sweep ends: error: \w+ is not installed: pip install 'acceptance-toolkit\[analysis\]'",
    ):
        assert re.search(f"^{line}$", output, re.MULTILINE), output


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_modules_of_an_extra_are_those_of_its_packages(extra):
    packages = {canonicalize_name(Requirement(text).name) for text in PROJECT["optional-dependencies"][extra]}
    assert set().union(*(MODULES[name] for name in EXTRAS[extra])) == packages

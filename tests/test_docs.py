"""The documentation's examples run as they stand; its commands compose; links and lengths hold."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit import config
from toolkit.config import compose
from toolkit.errors import InputError
from toolkit.lines import lines_of
from toolkit.stage import read_manifest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Language, title and text of every block of code."""
    return [(found[1], found[2] or "", found[3]) for found in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def test_the_examples_of_extending_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known, namespace = set(sys.modules), {}
    for language, title, text in blocks(DOCS / "extending.md"):
        if title:
            (tmp_path / title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / title).write_text(text)
        elif language == "python":
            exec(compile(text, "docs/extending.md", "exec"), namespace)
    for name in set(sys.modules) - known:
        if name.startswith("my_"):
            del sys.modules[name]
    assert "metric" in namespace and "method" in namespace


@pytest.mark.parametrize("number", range(4))
def test_the_command_lines_of_extending_compose(tmp_path, number):
    for _, title, text in blocks(DOCS / "extending.md"):
        if title:
            (tmp_path / title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / title).write_text(text)
    texts = [text for language, _, text in plain_blocks(DOCS / "extending.md") if not language]
    lines = [shlex.split(line) for text in texts for line in lines_of(text) if line.startswith("python -m")]
    assert len(lines) == 4
    known = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    shown = subprocess.run(
        [sys.executable, *lines[number][1:], "--cfg", "job"], cwd=tmp_path, env=known, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr


def test_the_readmes_python_runs():
    (text,) = [text for language, _, text in blocks(ROOT / "README.md") if language == "python"]
    namespace = {}
    exec(compile(text, "README.md", "exec"), namespace)
    assert namespace["generation"].counts.num_generated > 0


def test_the_readme_is_short():
    assert len(lines_of((ROOT / "README.md").read_text(encoding="utf-8"))) <= 130


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_to_files(page):
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    for found in LINK.finditer(text):
        if "://" not in found[1]:
            assert (page.parent / found[1]).exists(), found[1]


def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((DOCS / "first_look.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) == 5
    namespace = {}
    for text in code:
        exec(compile(text, "docs/first_look.ipynb", "exec"), namespace)
    assert len(namespace["table"]) == 4


# What makes a command small; the folders that words in capitals stand for are made by the commands above it.
TINY = {
    "data_gen.responses": ["prompts.limit=6", "sampling.max_new_tokens=8"],
    "data_gen.mix": ["validation_fraction=.5"],
    "data_gen.traces": ["max_drafted=4"],
    "toolkit.train": ["trainer.max_epochs=1", "optimizer.lr=.001"],
    "toolkit.train_heads": ["depths=[0,1]", "w_rejs=[1]", "max_epochs=1", "optimizer.lr=.001"],
    "toolkit.distill": ["trainer.max_epochs=1", "optimizer.lr=.0001"],
    "toolkit.decode": ["prompts.limit=2", "sampling.max_new_tokens=8"],
    "analysis.sweep": ["prompts.limit=3", "sampling.max_new_tokens=8", "max_drafted=4"],
    "analysis.drafts": ["depth=2", "max_drafted=3"],
    "analysis.acceptance": ["prompts.limit=2", "sampling.max_new_tokens=6", "num_drafts=[2]", "draws=8", "positions=2"],
    "analysis.compare": ["prompts.limit=2", "sampling.max_new_tokens=6", "idle_seconds=0"],
    "analysis.timing": ["prompts.limit=4", "sampling.max_new_tokens=6", "batch_sizes=[]", "num_drafted=[1,2]"],
    "analysis.advise": ["sampling.max_new_tokens=8", "hardware=h100", "batch_sizes=[1]"],
    "analysis.serving": ["sampling.max_new_tokens=8", "requests=2", "users=[1]"],
    "analysis.calibration": ["max_depth=3"],
}


def documented() -> list[list[str]]:
    """The command lines of docs/commands.md, as words."""
    texts = [text for language, _, text in plain_blocks(DOCS / "commands.md") if not language]
    return [shlex.split(line) for text in texts for line in lines_of(text) if line.startswith("python -m")]


def plain_blocks(page: Path) -> list[tuple[str, str, str]]:
    """Blocks of code, those without a language, too."""
    found = re.finditer(
        r'^```(\w*)(?: title="[^"]+")?\n(.*?)^```$', page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return [(one[1], "", one[2]) for one in found]


def test_every_command_is_documented():
    from toolkit.config.commands import COMMANDS

    modules = {kind.module for kind in COMMANDS.values() if hasattr(kind, "module")}
    internal = {"data_gen.toy"}  # made the embedded pair
    assert modules - internal == {words[2] for words in documented()}


@pytest.mark.slow
def test_every_documented_command_runs(tmp_path, monkeypatch):
    """In order, on a few tokens; each is found finished where a later line repeats it."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": n, "prompt": f"Q: {n} + 1 =\nA:"}) for n in range(24)]
    prompts.write_text("\n".join(lines) + "\n")
    known = {"TARGET": "toy/target", "DRAFT": "toy/draft", "PROMPTS": str(prompts), "outputs": str(tmp_path)}
    for words in documented():
        if words[2] == "toolkit.sync":  # needs a run to upload
            monkeypatch.setenv("WANDB_MODE", "offline")
            call("analysis.standing", ["dev=[SWEEP]", "cost_ratios=[.3]"], known, tmp_path)
        run_documented(words, known, tmp_path)


ANSWER = {
    "metrics": {
        "speculative_decoding": {
            "num_spec_tokens": 2, "num_spec_steps": 6, "num_draft_tokens": 12, "num_accepted_draft_tokens": 5,
            "acceptance_histogram": [3, 1, 2],
        }
    }
}  # fmt: skip
PLACEHOLDER = re.compile(r"\b[A-Z_]{3,}\b")


def run_documented(words: list[str], known: dict[str, str], root: Path) -> None:
    """Run one line below `root`, small, and remember its folder under the word that later lines use."""
    module, arguments = words[2], [word for word in words[3:] if word != "-m"]
    if "source=live" not in arguments and module == "analysis.agreement":
        known["LIVE"] = str(
            call("analysis.sweep", ["prompts=toy_math", "prompts.split=dev", "source=live"], known, root)
        )
    if any(word.startswith(("endpoints=", "+hparams_search=")) for word in arguments):  # a server; a multirun
        told = [PLACEHOLDER.sub(lambda found: known.get(found[0], found[0]), word) for word in arguments]
        compose(module.rpartition(".")[2], told)
        return
    if module == "analysis.calibration":
        answers = call("data_gen.responses", ["prompts=toy_instruct", "prompts.split=dev"], known, root)
        others = ["responses=" + config.quoted(str(answers)), "hidden=true"]
        known["OTHER_TRACES"] = str(call("data_gen.traces", others, known, root))
    if module == "analysis.observed":
        (root / "answers.jsonl").write_text((json.dumps(ANSWER) + "\n") * 3)
        known["ANSWERS"] = str(root / "answers.jsonl")
    if any(word.startswith("+experiment=") for word in arguments) and "dry_run=true" not in arguments:
        arguments.append("dry_run=true")
    if words[3:4] == ["-m"]:
        arguments = [word.split(",")[0] for word in arguments]
    folder = call(module, arguments, known, root)
    manifest = read_manifest(folder) if folder != root else None
    if manifest is not None:
        name = {"train": "HEAD"}.get(manifest["stage"], manifest["stage"].upper())
        known.setdefault("OTHER" if name in known and name == "SWEEP" else name, str(folder))


def call(module: str, arguments: list[str], known: dict[str, str], root: Path) -> Path:
    """The command's `run` on its composed config."""
    told = [PLACEHOLDER.sub(lambda found: known.get(found[0], found[0]), word) for word in arguments]
    told = [known["outputs"].join(word.split("outputs")) if word == "folder=outputs" else word for word in told]
    tiny = [word for word in TINY.get(module, []) if word.split("=")[0] not in {one.split("=")[0] for one in told}]
    if module == "toolkit.train" and "dry_run=true" in told:
        tiny = []
    if module == "analysis.sweep":
        compose("sweep", told)  # the line as it stands
        told = [word for word in told if not word.startswith("grid=")] + ["grid=quickstart_live"]
    command = importlib.import_module(module)
    config_name = module.rpartition(".")[2]
    words = [f"paths.root_dir={config.quoted(str(root))}", *tiny, *told]
    try:
        return Path(command.run(compose(config_name, words)))
    except (
        InputError
    ) as error:  # this machine is busy with other tests, and the command says so: then without measuring
        if module != "analysis.timing" or "use a quieter machine" not in str(error):
            raise
        return Path(command.run(compose(config_name, [*words, "batch_sizes=[]"])))

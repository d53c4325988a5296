"""The documentation's examples run as they stand; its links, files and commands exist."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.pages import FORMATS, TABLE, written
from tests.analysis.diagnosis.engine import Engine, texts
from toolkit import ModelPair, config
from toolkit.config import compose
from toolkit.config.command_line import prepare
from toolkit.errors import InputError
from toolkit.files.text import lines_of
from toolkit.runs.stage import read_manifest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
FILE = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.py)`")
OBJECT = re.compile(r"`((?:toolkit|data_gen|analysis|benchmarks)(?:\.(?!py`|txt`)\w+)+)(?:\([^`]*\))?`")
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PAGES += sorted(DOCS.rglob("*.md"))
MAIN = re.compile(r'^if __name__ == "__main__":.*\n    from toolkit\.runs\.command import main$', re.MULTILINE)
INTERNAL = {"data_gen.toy"}  # made the embedded pair
OF_READERS = {"my_parts.py", "analysis.py"}  # files that a page imagines
HISTORY = {"log.md"}  # it names what is gone


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Language, title and text of every block of code."""
    return [(block[1], block[2] or "", block[3]) for block in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def command_lines(page: Path) -> list[list[str]]:
    """The command lines of a page's plain blocks, as words."""
    texts = [text for language, title, text in blocks(page) if not language and not title]
    return [shlex.split(line) for text in texts for line in lines_of(text) if line.startswith("python -m")]


def write_examples(folder: Path) -> None:
    """The titled blocks of docs/extending.md, as files."""
    for _, title, text in blocks(DOCS / "extending.md"):
        if title:
            (folder / title).parent.mkdir(parents=True, exist_ok=True)
            (folder / title).write_text(text)


def anchor(heading: str) -> str:
    """The name that mkdocs and GitHub give a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-")


def commands() -> set[str]:
    """Modules that are commands."""
    paths = [path for package in ("toolkit", "data_gen", "analysis") for path in (ROOT / package).glob("*.py")]
    texts = {f"{path.parent.name}.{path.stem}": path.read_text(encoding="utf-8") for path in paths}
    return {name for name, text in texts.items() if MAIN.search(text)}


def test_the_examples_of_extending_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_examples(tmp_path)
    modules, namespace = set(sys.modules), {}
    for language, title, text in blocks(DOCS / "extending.md"):
        if language == "python" and not title:
            exec(compile(text, "docs/extending.md", "exec"), namespace)
    for name in set(sys.modules) - modules:
        if name.startswith("my_"):
            del sys.modules[name]
    assert "metric" in namespace and "method" in namespace


def test_the_command_lines_of_extending_compose(tmp_path, monkeypatch):
    """Here, and one of them in a process of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_examples(tmp_path)
    lines = command_lines(DOCS / "extending.md")
    for words in lines:
        prepare(words[2].rpartition(".")[2], words[3:])
    config.use_folders()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    shown = subprocess.run(
        [sys.executable, *lines[0][1:], "--cfg", "job"], env=environment, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr


def test_the_readmes_python_runs():
    (text,) = [text for language, _, text in blocks(ROOT / "README.md") if language == "python"]
    namespace = {}
    exec(compile(text, "README.md", "exec"), namespace)
    assert namespace["generation"].counts.num_generated > 0


def test_the_readmes_commands_compose(tmp_path):
    (tmp_path / "FILE.jsonl").write_text('{"id": 1, "prompt": "?"}\n')
    for words in command_lines(ROOT / "README.md"):
        arguments = [re.sub(r"\bFILE\.jsonl", str(tmp_path / "FILE.jsonl"), word) for word in words[3:]]
        compose(words[2].rpartition(".")[2], arguments)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_files_and_commands_exist(page):
    text = page.read_text(encoding="utf-8")
    for path, heading in LINK.findall(CODE.sub("", text)):
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), path
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {anchor(line) for line in headings}, f"{path}#{heading}"
    names = set(re.findall(r"python -m ((?:toolkit|data_gen|analysis|benchmarks)\.\w+)", text))
    paths = {name: ROOT / name.replace(".", "/") for name in names}
    missing = {
        name
        for name, path in paths.items()
        if not any(map(Path.exists, (path.with_suffix(".py"), path / "__main__.py")))
    }
    assert not missing


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=lambda page: page.name)
def test_modules_and_objects_that_pages_name_exist(page):
    """A file by the end of its path, as `beams.py` in a section on a folder; an object by its whole name."""
    text = page.read_text(encoding="utf-8")
    folders = ("toolkit", "data_gen", "analysis", "benchmarks", "tests", "examples", "hydra_plugins")
    sources = [path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for name in set(FILE.findall(text)) - OF_READERS:
        if not re.search(r"\b[A-Z]{3,}\b", name):  # NAME.py stands for any file
            assert any(f"/{source}".endswith(f"/{name}") for source in sources), name
    for name in OBJECT.findall(text):
        pkgutil.resolve_name(name)


def test_every_page_and_figure_is_shown():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES) + (ROOT / "mkdocs.yml").read_text("utf-8")
    files = [path for path in DOCS.rglob("*") if path.suffix in (".png", ".svg", ".pdf", ".md")]
    assert not [path.name for path in files if path.name not in text]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if TABLE.search(page.read_text("utf-8"))], ids=lambda page: page.name
)
def test_tables_are_those_of_the_result_files(page):
    """`python -m benchmarks.pages` writes them; no table of figures is written by hand beside these."""
    text = page.read_text(encoding="utf-8")
    assert text == written(text)
    assert re.findall(r"^\|.*\d.*\|$", CODE.sub("", TABLE.sub("", text)), re.MULTILINE) == []


def test_every_result_file_is_shown_or_linked():
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    shown = {name for text in texts for _, name, _ in TABLE.findall(text)}
    linked = {name for text in texts for name in re.findall(r"\]\((?:[.\w]+/)*tables/([\w-]+)\.csv\)", text)}
    assert shown == set(tomllib.loads(FORMATS.read_text(encoding="utf-8")))
    assert shown | linked == {path.stem for path in (DOCS / "tables").iterdir()}


def test_every_folder_of_the_packages_has_its_room():
    page = (ROOT / "docs" / "architecture.md").read_text()
    folders = [path.parent for package in ("toolkit", "analysis") for path in (ROOT / package).glob("*/__init__.py")]
    assert folders and [folder.name for folder in folders if f"`{folder.name}/`" not in page] == []


def test_every_command_is_documented():
    assert commands() - INTERNAL == {words[2] for words in command_lines(DOCS / "commands.md")}


# What makes a command small; the folders that words in capitals stand for are made by the commands above it.
TINY = {
    "data_gen.responses": ["prompts.limit=8", "sampling.max_new_tokens=12"],
    "data_gen.mix": ["validation_fraction=.5"],
    "data_gen.traces": ["max_drafted=4"],
    "toolkit.train": ["trainer.max_epochs=1", "optimizer.lr=.001"],
    "toolkit.train_heads": ["depths=[0,1]", "w_rejs=[1]", "max_epochs=1", "optimizer.lr=.001"],
    "toolkit.distill": ["trainer.max_epochs=1", "optimizer.lr=.0001"],
    "toolkit.decode": ["prompts.limit=2", "sampling.max_new_tokens=8"],
    "analysis.sweep": ["prompts.limit=3", "sampling.max_new_tokens=8", "max_drafted=4"],
    "analysis.acceptance": ["prompts.limit=2", "sampling.max_new_tokens=6", "num_drafts=[2]", "draws=8", "positions=2"],
    "analysis.compare": ["prompts.limit=2", "sampling.max_new_tokens=6", "idle_seconds=0"],
    "analysis.timing": ["prompts.limit=4", "sampling.max_new_tokens=6", "batch_sizes=[]", "num_drafted=[1,2]"],
    "analysis.advise": ["sampling.max_new_tokens=8", "hardware=h100", "batch_sizes=[1]"],
    "analysis.serving": ["sampling.max_new_tokens=8", "requests=2", "users=[1]"],
    "analysis.heads": ["depth=2", "max_drafted=3"],
}
ANSWER = {  # with a vLLM server's counts
    "metrics": {
        "speculative_decoding": {
            "num_spec_tokens": 2, "num_spec_steps": 6, "num_draft_tokens": 12, "num_accepted_draft_tokens": 5,
            "acceptance_histogram": [3, 1, 2],
        }
    }
}  # fmt: skip
ENGINE_ANSWERS = [  # of two tokens a round, and of none
    {"rounds": 40 + n, "drafted": k * (40 + n), "seconds": (40 + n) * (1 + k / 2), "source": "draft" if k else "none"}
    for k in (0, 2) for n in range(3)
]  # fmt: skip
PLACEHOLDER = re.compile(r"\b[A-Z_]{3,}\b")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_documented_command_runs(tmp_path, monkeypatch):
    """In order, on a few tokens; each is found finished where a later line repeats it."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": n, "prompt": f"Q: {n} + 1 =\nA:"}) for n in range(24)]
    prompts.write_text("\n".join(lines) + "\n")
    folders = {"TARGET": "toy/target", "DRAFT": "toy/draft", "PROMPTS": str(prompts), "outputs": str(tmp_path)}
    for words in command_lines(DOCS / "commands.md"):
        if words[2] == "toolkit.sync":  # needs a run to upload
            monkeypatch.setenv("WANDB_MODE", "offline")
            call("analysis.frontier", ["dev=[SWEEP]", "cost_ratio=.3"], folders, tmp_path)
        run_documented(words, folders, tmp_path)


def run_documented(words: list[str], folders: dict[str, str], root: Path) -> None:
    """Run one line below `root`, small, and remember its folder under the word that later lines use."""
    module, arguments = words[2], [word for word in words[3:] if word != "-m"]
    skipped = ("endpoints=", "+hparams_search=", *(["+experiment="] if module == "toolkit.distill" else []))
    if any(word.startswith(skipped) for word in arguments):  # a server; a multirun; minutes
        compose(module.rpartition(".")[2], filled(arguments, folders))
        return
    if "OTHER_TRACES" in " ".join(arguments):
        answers = call("data_gen.responses", ["prompts=toy_instruct", "prompts.split=dev"], folders, root)
        others = ["responses=" + config.quoted(str(answers)), "hidden=true"]
        folders["OTHER_TRACES"] = str(call("data_gen.traces", others, folders, root))
    if "GREEDY_RESPONSES" in " ".join(arguments):
        greedy = ["prompts=toy_instruct", "sampling.temperature=0"]
        folders["GREEDY_RESPONSES"] = str(call("data_gen.responses", greedy, folders, root))
    if "responses=ANSWERS" in arguments:
        (root / "answers.jsonl").write_text((json.dumps(ANSWER) + "\n") * 3)
        folders["ANSWERS"] = str(root / "answers.jsonl")
        if module == "analysis.diagnose":
            Engine(toy := ModelPair.toy()).answer(texts(toy, 7, 32), root / "answers.jsonl")
    if "engine=[ENGINE_ANSWERS]" in arguments:
        (root / "engine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ENGINE_ANSWERS))
        folders["ENGINE_ANSWERS"] = str(root / "engine.jsonl")
    if any(word.startswith("+experiment=") for word in arguments) and "dry_run=true" not in arguments:
        arguments.append("dry_run=true")
    if words[3:4] == ["-m"]:
        arguments = [word.split(",")[0] for word in arguments]
    folder = call(module, arguments, folders, root)
    manifest = read_manifest(folder) if folder != root and folder.is_dir() else None  # a rehearsal has none
    if manifest is not None:
        name = {"train": "HEAD"}.get(manifest["stage"], manifest["stage"].upper())
        if name != "HEADS" or (folder / "heads.parquet").exists():  # other jobs of that command have other tables
            folders.setdefault("OTHER" if name in folders and name == "SWEEP" else name, str(folder))


def filled(arguments: list[str], folders: dict[str, str]) -> list[str]:
    """Arguments with the folders that stand for words in capitals."""
    return [PLACEHOLDER.sub(lambda word: folders.get(word[0], word[0]), argument) for argument in arguments]


def call(module: str, arguments: list[str], folders: dict[str, str], root: Path) -> Path:
    """The command's `run` on its composed config."""
    words = [word.replace("folder=outputs", f"folder={folders['outputs']}") for word in filled(arguments, folders)]
    if module == "analysis.sweep":
        compose("sweep", words)  # the line as it stands
        words = [word for word in words if not word.startswith("grid=")] + ["grid=quickstart_live"]
    keys = {word.split("=")[0] for word in words}
    tiny = [word for word in TINY.get(module, []) if word.split("=")[0] not in keys]
    if module == "toolkit.train" and "dry_run=true" in words:
        tiny = []
    command, name = importlib.import_module(module), module.rpartition(".")[2]
    words = [f"paths.root_dir={config.quoted(str(root))}", *tiny, *words]
    try:
        return Path(command.run(compose(name, words)))
    except InputError as error:  # this machine is busy with other tests: then without measuring
        if module != "analysis.timing" or "use a quieter machine" not in str(error):
            raise
        return Path(command.run(compose(name, [*words, "batch_sizes=[]"])))

"""`make wheel-test`: the wheel and the sdist, used from an empty folder, where nothing of the repository can be imported.

    make wheel-test                       a fresh environment, the quickstart, decoding, a policy of one's own: 15 minutes
    make wheel-test ARGS=--import-only    built and imported, without dependencies: what CI does, in half a minute

Everything lies in outputs/wheel/, which is made anew. The package registry is needed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "outputs" / "wheel"
EXAMPLE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
IMPORTED = """
import sys
from pathlib import Path
import toolkit, analysis, data_gen
from toolkit import ModelPair, generate

site = Path(sys.argv[1])
for package in (toolkit, analysis, data_gen):
    assert Path(package.__file__).is_relative_to(site), package.__file__
(generation,) = generate(ModelPair.toy(), ["Q: Repeat coral 5 times.\\nA:"], "rate", max_new_tokens=6)
print("wheel:", toolkit.__version__, "decoded", len(generation.token_ids), "tokens")
"""


def main() -> None:
    """Build, install and use; a command that fails ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--import-only", action="store_true", help="with the packages of this environment")
    options = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    empty = FOLDER / "empty"
    empty.mkdir(parents=True)
    wheel = build()
    if options.import_only:
        site = FOLDER / "site"
        run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)])
        run([sys.executable, "-c", IMPORTED, str(site)], empty, {"PYTHONPATH": str(site)})
        return
    environment = FOLDER / "environment"
    run([sys.executable, "-m", "venv", str(environment)])
    python = str(environment / "bin" / "python")
    run([python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), f"{wheel}[all]"])
    run([python, "-c", IMPORTED, str(environment)], empty)
    run([python, "-m", "toolkit.decode", "--help"], empty, quiet=True)
    own_policy(python, empty)
    run([python, "-m", "toolkit.train", "+experiment=quickstart"], empty)
    print("wheel: installed, decoded, a policy of one's own swept, the quickstart run", flush=True)


def build() -> Path:
    """The wheel; it holds what the one made of the sdist holds."""
    tools = FOLDER / "tools"
    run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tools), "hatchling>=1.27"])
    run([sys.executable, "-m", "hatchling", "build", "-d", str(FOLDER)], variables={"PYTHONPATH": str(tools)})
    (wheel,), (sdist,) = FOLDER.glob("*.whl"), FOLDER.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(FOLDER / "sdist", filter="data")
    (source,) = (FOLDER / "sdist").iterdir()
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(FOLDER / "again")]
    run(words, source, {"PYTHONPATH": str(tools)})
    (again,) = (FOLDER / "again").glob("*.whl")
    names, names_again = (set(zipfile.ZipFile(path).namelist()) for path in (wheel, again))
    if names != names_again:
        sys.exit(f"wheel: expected the same files from the sdist, these differ: {sorted(names ^ names_again)[:5]}")
    return wheel


def own_policy(python: str, folder: Path) -> None:
    """The first example of docs/extending.md, as files: checked, decoded with, swept."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    section = text.split("\n## ")[1]
    for language, title, block in EXAMPLE.findall(section):
        if title:
            (folder / title).parent.mkdir(parents=True, exist_ok=True)
            (folder / title).write_text(block, encoding="utf-8")
        elif language == "python":
            run([python, "-c", block], folder)
    words = ["--config-dir", "conf", "~grid", "+grid={margin: {policy.threshold: [.1,.2]}}", "prompts.limit=4"]
    run([python, "-m", "analysis.sweep", *words, "sampling.max_new_tokens=8"], folder)


def run(
    words: Sequence[str], folder: Path = ROOT, variables: dict[str, str] | None = None, quiet: bool = False
) -> None:
    """Run a command in a folder. Ends this process with its exit status if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | (variables or {})
    output = subprocess.DEVNULL if quiet else None
    finished = subprocess.run(list(words), cwd=folder, env=environment, stdout=output)
    if finished.returncode:
        sys.exit(f"wheel: {' '.join(words[:4])} ... failed with exit status {finished.returncode}")


if __name__ == "__main__":
    main()

"""python -m benchmarks.papers [NAME...]: run the experiments of the papers' tables and figures, and write docs/papers/.

Each entry of a `conf/papers/PAPER.yaml` is an experiment (`python -m toolkit.train +experiment=PAPER_table1`), which ends with
a page. The page goes to docs/papers/NAME.md, its figure to docs/papers/NAME.png. docs/papers/index.md then says for every table
and figure of the five papers: reproduced here, or why not (`papers.toml`); equations.md says which file implements which
equation. Finished stages below --root are found again.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence import machine
from toolkit import papers as entries_of
from toolkit.config import CONF, choices
from toolkit.io import write_atomic, write_text

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "papers"
LISTED = Path(__file__).with_suffix(".toml")
MISSING = "neither made nor explained"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, copies, writes the index; 1 if an experiment failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="PAPER_table1, ... (default: all)")
    parser.add_argument("--root", type=Path, default=ROOT / "outputs" / "papers", help="where the runs go")
    parser.add_argument("--index", action="store_true", help="write the index alone")
    args = parser.parse_args(argv)
    failed = []
    for name in [] if args.index else args.names or names():
        started = time.perf_counter()
        folder = run(name, args.root)
        if folder is None:
            failed.append(name)
            continue
        publish(name, folder, time.perf_counter() - started)
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    write_text(DOCS / "index.md", index())
    write_text(DOCS / "equations.md", equations())
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def names() -> list[str]:
    """Every table and figure that has an experiment."""
    return choices("table")


def run(name: str, root: Path) -> Path | None:
    """Run an experiment in a process of its own; its last stage's folder, or None if it failed."""
    words = [sys.executable, "-m", "toolkit.train", f"+experiment={name}", f"paths.root_dir={root}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{name}: {(done.stderr.strip().split(chr(10)) or [''])[-1]}", file=sys.stderr)
        return None
    return Path(done.stdout.rpartition("output: ")[2].strip())


def publish(name: str, folder: Path, seconds: float) -> None:
    """Copy the page of a run, and its figure, into the documentation."""
    text = (folder / "page.md").read_text(encoding="utf-8").replace("figure.png", f"{name}.png")
    made = f"Made by `python -m toolkit.train +experiment={name}` ({seconds:.0f} s with what was finished before). {machine()}"
    write_text(DOCS / f"{name}.md", f"{text}\n{made}\n")
    if (folder / "figure.png").exists():
        write_atomic(DOCS / f"{name}.png", lambda path: shutil.copyfile(folder / "figure.png", path))


def index() -> str:
    """One table per paper: every table and figure of it, and where it is."""
    told = listed()
    parts = [
        "# The papers' tables and figures",
        "One command makes each table and figure of the five papers on the toy pair, with the published figures beside ours. "
        "Where that is not done, the reason is given. Add `pair=NAME` for a paper's own models; `dry_run=true` prints the "
        "plan. [Where each equation is](equations.md) in the code.",
    ]
    for key, paper in told["items"].items():
        lines = ["| | what | where |", "| --- | --- | --- |"]
        lines += [f"| {item} | {what} | {where} |" for item, what, where in entries(key, paper, told["elsewhere"])]
        parts += [f"## {paper['name']}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def entries(key: str, paper: Mapping[str, Any], elsewhere: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Item, its title, and the page or the reason; MISSING for an item that is neither made nor explained."""
    for kind in ("table", "figure"):
        for number in range(1, paper[f"{kind}s"] + 1):
            name = f"{key}_{kind}{number}"
            item = f"{kind.capitalize()} {number}"
            if name in elsewhere:
                yield item, "", elsewhere[name]
                continue
            if name not in names():
                yield item, "", MISSING
                continue
            table = table_config(name)
            pairs = ", ".join(f"`pair={pair}`" for pair in table["pairs"])
            page = f"[page]({name}.md)" if (DOCS / f"{name}.md").exists() else "no page yet"
            yield item, table["title"], f"{page}, `+experiment={name}`; real models: {pairs}"


def equations() -> str:
    """Which file implements what of which paper, as the files' own first lines say."""
    lines = ["| file | paper and equation |", "| --- | --- |"]
    for package in ("toolkit", "analysis", "data_gen"):
        for path in sorted((ROOT / package).rglob("*.py")):
            said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            paragraphs = [" ".join(part.split()) for part in said.split("\n\n")]
            about = next((part for part in paragraphs if part.startswith(("Paper: ", "Papers: "))), None)
            if about is not None:
                lines.append(f"| `{path.relative_to(ROOT)}` | {_sources(about)} |")
    title = (
        "# Where each equation is\n\nEvery file names its source, renamed symbols and deviations in its first lines."
    )
    return f"{title}\n\n" + "\n".join(lines) + "\n"


def _sources(said: str) -> str:
    """What a docstring says of its papers, up to the renamed symbols."""
    text = said.partition(": ")[2]
    for end in (" theirs ->", " Deviation", " Ours"):
        text = text.partition(end)[0]
    return text.rstrip(".").replace("|", "\\|")


def table_config(name: str) -> dict[str, Any]:
    """The table that `table=NAME` chooses."""
    key, _, item = name.rpartition("_")
    return entries_of.table(key, item, dict(entries_of.read(CONF))[key])


def listed() -> dict[str, Any]:
    """What `papers.toml` says."""
    return tomllib.loads(LISTED.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())

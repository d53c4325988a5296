"""`make papers`: run the experiments of the papers' tables and figures, and write their pages to outputs/papers/.

    python -m benchmarks.papers                                    all of them: hours
    python -m benchmarks.papers specdecpp_table1 mcsd_figure3      some of them
    python -m benchmarks.papers limits_figure2 KEY=VALUE           with overrides of the experiments

Each experiment (`python -m toolkit.train +experiment=NAME`) ends with a page. It goes to outputs/papers/NAME.md, its figure to
NAME.png. index.md says for every table and figure of the five papers where it is, or why it is not made (`papers.toml`).
equations.md says which file implements which equation. Finished stages below --root are found again.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.evidence import ROOT, made_by
from toolkit.config import choices
from toolkit.errors import answer_signals
from toolkit.files.atomic import write_atomic, write_text

LISTED = Path(__file__).with_suffix(".toml")
MISSING = "neither made nor explained"


def main(argv: Sequence[str] | None = None) -> int:
    """Run, copy, write the index; 1 if an experiment failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="experiments, then overrides (KEY=VALUE); default: all"
    )
    parser.add_argument("--root", type=Path, default=ROOT / "outputs" / "papers", help="for the runs and the pages")
    parser.add_argument("--index", action="store_true", help="write the index alone")
    options = parser.parse_args(argv)
    overrides = [word for word in options.names if "=" in word]
    chosen = [word for word in options.names if "=" not in word] or names()
    if unknown := [name for name in chosen if name not in names()]:
        parser.error(f"expected names among {', '.join(names())}, got {', '.join(unknown)}")
    failed = []
    for name in [] if options.index else chosen:
        started = perf_counter()
        words = [f"+experiment={name}", f"paths.root_dir={options.root}", *overrides]
        done = subprocess.run([sys.executable, "-m", "toolkit.train", *words], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            print(f"{name}: {(done.stderr.strip().split(chr(10)) or [''])[-1]}", file=sys.stderr)
            failed.append(name)
            continue
        folder = Path(done.stdout.rpartition("output: ")[2].strip())
        text = (folder / "page.md").read_text(encoding="utf-8").replace("figure.png", f"{name}.png")
        write_text(options.root / f"{name}.md", f"{text}\n{made_by(f'benchmarks.papers {name}', started)}\n")
        if (folder / "figure.png").exists():
            write_atomic(options.root / f"{name}.png", lambda path, at=folder: shutil.copyfile(at / "figure.png", path))
        print(f"{name}: {perf_counter() - started:.0f} s", flush=True)
    write_text(options.root / "index.md", index(options.root))
    write_text(options.root / "equations.md", equations())
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def names() -> list[str]:
    """Every table and figure that has an experiment."""
    pattern = re.compile(rf"({'|'.join(listed()['items'])})_(table|figure)\d+")
    return sorted(name for name in choices("experiment") if pattern.fullmatch(name))


def index(folder: Path) -> str:
    """One table per paper: every table and figure of it, and where it is."""
    papers = listed()
    parts = [
        "# The papers' tables and figures",
        "One command makes each table and figure of the five papers on the toy pair, with the published figures beside ours. "
        "Where that is not done, the reason is given. Add `pair=NAME` for a paper's own models; `dry_run=true` prints the "
        "plan. [Where each equation is](equations.md) in the code.",
    ]
    for key, paper in papers["items"].items():
        lines = ["| | where |", "| --- | --- |"]
        lines += [f"| {item} | {where} |" for item, where in entries(key, paper, papers["elsewhere"], folder)]
        parts += [f"## {paper['name']}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def entries(
    key: str, paper: Mapping[str, Any], elsewhere: Mapping[str, str], folder: Path
) -> Iterator[tuple[str, str]]:
    """Each table and figure, and its command and page, or the reason; MISSING if it is neither made nor explained."""
    for kind in ("table", "figure"):
        for number in range(1, paper[f"{kind}s"] + 1):
            name = f"{key}_{kind}{number}"
            where = elsewhere.get(name, MISSING)
            if name in names():
                page = f", [page]({name}.md)" if (folder / f"{name}.md").exists() else ""
                where = f"`+experiment={name}`{page}"
            yield f"{kind.capitalize()} {number}", where


def equations() -> str:
    """Which file implements what of which paper, as the files' own first lines say."""
    lines = ["| file | paper and equation |", "| --- | --- |"]
    for package in ("toolkit", "analysis", "data_gen"):
        for path in sorted((ROOT / package).rglob("*.py")):
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            paragraphs = [" ".join(part.split()) for part in docstring.split("\n\n")]
            source = next((part for part in paragraphs if part.startswith(("Paper: ", "Papers: "))), None)
            if source is not None:
                lines.append(f"| `{path.relative_to(ROOT)}` | {_sources(source)} |")
    title = (
        "# Where each equation is\n\nEvery file names its source, renamed symbols and deviations in its first lines."
    )
    return f"{title}\n\n" + "\n".join(lines) + "\n"


def _sources(source: str) -> str:
    """What a docstring says of its papers, up to the renamed symbols."""
    text = source.partition(": ")[2]
    for end in (" theirs ->", " Deviation", " Ours"):
        text = text.partition(end)[0]
    return text.rstrip(".").replace("|", "\\|")


def listed() -> dict[str, Any]:
    """What `papers.toml` says."""
    return tomllib.loads(LISTED.read_text(encoding="utf-8"))


if __name__ == "__main__":
    answer_signals()
    sys.exit(main())

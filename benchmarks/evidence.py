"""make evidence: measure every figure that the documentation shows, and write it into docs/evidence/.

    python -m benchmarks.evidence            all of them
    python -m benchmarks.evidence distributions greedy    some of them, by name

Each figure is one function here that returns Markdown; a file names its command, the code's revision, the machine and the
seconds it took. `make test` holds reduced forms of the same checks.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from benchmarks import (
    advising,
    assisted,
    batches,
    beams,
    certificates,
    choice_rules,
    copying,
    distilling,
    escaping,
    exactness,
    families,
    feature_speed,
    head_inputs,
    head_kinds,
    head_training,
    interruption,
    mdp,
    memory,
    multi_draft,
    padded_ranks,
    replaying,
    standing,
    startup,
    timed_rounds,
)
from benchmarks.conclusions import COMMAND, opening
from benchmarks.processes import ROOT, run
from toolkit.io import write_text
from toolkit.lines import lines_of
from toolkit.stage import provenance

FOLDER = ROOT / "docs" / "evidence"

INDEX = "index.md"


def quickstart() -> str:
    """`make quickstart` from nothing: seconds, the table, the figures."""
    with tempfile.TemporaryDirectory() as scratch:
        started = perf_counter()
        words = ["-m", "toolkit.train", "+experiment=quickstart", f"paths.root_dir={scratch}"]
        output = run(words, WANDB_MODE="offline").replace(scratch, "outputs")
        seconds = perf_counter() - started
        frontier = next(Path(scratch).glob("frontier-*"))
        for figure in sorted((frontier / "figures").glob("*.png")):
            (FOLDER / "figures").mkdir(parents=True, exist_ok=True)
            shutil.copy(figure, FOLDER / "figures" / figure.name)
        for table in ("frontier.csv", "settings.csv", "costs.csv"):
            shutil.copy(frontier / table, FOLDER / table)
        scores = table_of(next(Path(scratch).glob("train-*")) / "MODEL_CARD.md")
        again = perf_counter()
        run(words, WANDB_MODE="offline")
        resumed = perf_counter() - again
    return "\n".join([
        f"From an empty output folder: {seconds:.0f} s; run again, with everything finished: {resumed:.0f} s.",
        "",
        "```",
        *[line for line in lines_of(output) if line.strip()][-90:],
        "```",
        "",
        "## The head",
        "",
        scores,
    ])  # fmt: skip


def multirun() -> str:
    """Four heads by one command: four jobs, four W&B runs, one table."""
    with tempfile.TemporaryDirectory() as scratch:
        started = perf_counter()
        run(
            ["-m", "toolkit.train", "-m", "+experiment=toy_head", "head.depth=0,2", "loss.w_rej=1,6",
             f"paths.root_dir={scratch}"],
            WANDB_MODE="offline",
        )  # fmt: skip
        seconds = perf_counter() - started
        (table,) = Path(scratch).rglob("table.md")
        runs = list(Path(scratch).rglob("offline-run-*"))
        heads = list(Path(scratch).rglob("head.safetensors"))
        lines = table.read_text().replace(scratch, "outputs")
        return f"{len(heads)} heads, {len(runs)} W&B runs (offline), {seconds:.0f} s.\n\n{lines}"


FIGURES: dict[str, Callable[[], str]] = {
    "certificates": certificates.certificates,
    "distributions": exactness.chain_distributions,
    "outputs": exactness.whole_outputs,
    "greedy": exactness.greedy_equals_target,
    "identity": exactness.counting_identity,
    "families": families.families,
    "optimality": multi_draft.optimality,
    "dirichlet": multi_draft.dirichlet,
    "importance": choice_rules.importance,
    "rule_cost": multi_draft.rule_cost,
    "trees": multi_draft.trees,
    "memory": memory.memory,
    "prompt_lookup": copying.prompt_lookup,
    "replay_speed": replaying.speed,
    "replay": replaying.agreement,
    "standing": standing.standings,
    "mdp": mdp.mdp,
    "ranks": padded_ranks.ranks,
    "inputs": head_inputs.inputs,
    "head_kinds": head_kinds.head_kinds,
    "head_defaults": head_training.head_defaults,
    "many_heads": feature_speed.many_heads,
    "calibration": head_training.calibrations,
    "distillation": distilling.distillation,
    "beams": beams.beams,
    "mtad": beams.mtad,
    "beam_depths": beams.beam_depths,
    "mtjd": beams.mtjd,
    "beam_memory": beams.beam_memory,
    "beam_texts": beams.beam_texts,
    "advice": advising.advice,
    "timed_rounds": timed_rounds.timed_rounds,
    "batches": batches.batches,
    "batches_padded": batches.batches_padded,
    "serving": batches.serving,
    "sandbox": escaping.sandbox,
    "transformers": assisted.assisted,
    "interruption": interruption.evidence,
    "startup": startup.startup,
    "multirun": multirun,
    "quickstart": quickstart,
}


def table_of(card: Path) -> str:
    """The tables of a model card."""
    return "\n".join(line for line in lines_of(card.read_text()) if line.startswith("|"))


def machine() -> str:
    """Processor and cores, without names of hosts."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, no GPU, {platform.system()}, Python {platform.python_version()}"
    )


def main() -> None:
    """Measure and write the chosen figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"which ones: {', '.join(FIGURES)}; default: all")
    parser.add_argument(
        "--openings", action="store_true", help="measure nothing: put the conclusions in front of the pages"
    )
    given = parser.parse_args()
    names = given.names or list(FIGURES)
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        parser.error(f"expected names among {', '.join(FIGURES)}, got {', '.join(unknown)}")
    for name in [] if given.openings else names:
        print(f"== {name}", flush=True)
        started = perf_counter()
        text = FIGURES[name]()
        about = provenance()
        head = opening(name, FIGURES[name].__doc__ or "", text) + (
            f"`python -m benchmarks.evidence {name}` on {machine()}; torch {about['versions']['torch']}, transformers "
            f"{about['versions']['transformers']}; revision {about['revision']}; {perf_counter() - started:.0f} s in all.\n\n"
        )
        write_text(FOLDER / f"{name}.md", head + text + "\n")
        print(text, flush=True)
    if given.openings:
        reopen(names)
    write_text(FOLDER / INDEX, index())


def reopen(names: list[str]) -> None:
    """Put the conclusions of today, and what the figures say of themselves, in front of pages as they are."""
    for path in (FOLDER / f"{name}.md" for name in names):
        if path.is_file():
            _, mark, rest = path.read_text(encoding="utf-8").partition(COMMAND)
            write_text(path, opening(path.stem, FIGURES[path.stem].__doc__ or "", rest) + mark + rest)


def index() -> str:
    """A list of all pages of the folder, each with its first sentence."""
    pages = sorted(path for path in FOLDER.glob("*.md") if path.name != INDEX)
    lines = [f"- [{path.stem}]({path.name}): {_first_sentence(path)}" for path in pages]
    about = "Every figure of the documentation, with the command that makes it. `make evidence` makes them again."
    return f"# Evidence\n\n{about}\n\n" + "\n".join(lines) + "\n"


def _first_sentence(path: Path) -> str:
    """The first line of text below a page's title."""
    lines = lines_of(path.read_text(encoding="utf-8"))
    return next((line.strip() for line in lines if line.strip() and not line.startswith(("#", "|", "`", "!"))), "")


if __name__ == "__main__":
    main()

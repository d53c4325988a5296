"""python -m benchmarks.mutants: do the tests notice when one line of the code is changed?

Each area of the code is mutated by mutmut (a number, an operator, an argument, a name changed; one change per mutant).
That happens in a copy of the tree below `outputs/mutants/`, and the area's own tests run on each mutant. A second call
goes on where the first one ended; functions that have changed since are tried again, and with `--again` whatever no
test noticed. What survives is held against `mutants_equivalent.toml`, where every mutant that changes nothing is listed
with the reason. Not mutated: texts of messages, type annotations and decorated functions (properties,
`@torch.no_grad()`), which mutmut leaves alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.io import write_text

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "outputs" / "mutants"
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.toml")
COPIED = (
    "toolkit",
    "analysis",
    "data_gen",
    "benchmarks",
    "conf",
    "tests",
    "docs",
    "README.md",
    "constraints.txt",
    "Makefile",
)
NOTICED = {1: "failed", 3: "crashed", 24: "timeout", 36: "timeout", -24: "timeout", 152: "timeout", 255: "timeout"}
SURVIVED, NO_TESTS = 0, 33
QUICK = {
    "PYTEST_ADDOPTS": "-p no:unraisableexception -p no:threadexception"
}  # no rounds of garbage collection per mutant
DEVICE = re.compile(r", device=[^,()\[\]]+(?=[,)])|, (?=\))")
STRICT = re.compile(r", (strict=\w+ ?)?(?=\)|$)")


@dataclass(frozen=True)
class Area:
    """Files to mutate (globs) and the tests that have to notice; `without`: slow ones among them about other code."""

    files: tuple[str, ...]
    tests: tuple[str, ...]
    without: tuple[str, ...] = ()


def _of(file: str, *names: str) -> tuple[str, ...]:
    """Tests of one file."""
    return tuple(f"tests/toolkit/{file}.py::test_{name}" for name in names)


SLOW = (  # whole outputs against distributions: minutes
    *_of(
        "test_decoding", "whole_outputs", "the_draft_may_have_its_own", "the_sequence_test_catches", "of_several_drafts"
    ),
    *_of("test_decoding", "a_row_does_not_depend", "launching_ahead", "counts[", "equal_batches_of_coupled_rows"),
    *_of(
        "test_trees",
        "whole_outputs",
        "different_drafts",
        "more_chains_accept",
        "likeliest_children_at",
        "trained_heads",
    ),
    *_of(
        "test_trees", "a_rule_under_another", "policies_leave_nodes", "repetition_penalty", "a_drafts_own_temperature"
    ),
    *_of("test_beams", "beams_follow_the", "beams_of_dynamic", "a_sampled_block", "a_block_from", "blocks_of_one"),
    *_of("test_beams", "the_beam_test_catches", "scores_are_the_likelihoods"),
    *_of("test_beam_stops", "beams_that_stop_follow", "the_test_tells_stopping"),
    *_of("test_beam_stops", "every_method_stops_where_the_string_is_complete[dsbd"),
    *_of("test_trees", "greedy_trees_hold"),
    *_of("test_prompt_lookup", "whole_outputs"),
    *_of("test_capture", "decoding_does_not_depend"),
    *_of("test_packing", "decoding_with_packed"),
)
OTHER_FAMILIES = ("gemma", "mistral", "olmo2", "opt", "phi3", "qwen3")


def _of_family(family: str) -> tuple[str, ...]:
    """Tests of sessions that are about one model family: a few families do for mutants."""
    replayed = f"replayed_forwards_equal_the_models_own[EagerTrace-{family}]"
    return *_of("test_capture", replayed), *_of("test_packing", f"packed_weights_compute_the_same[True-{family}]")


AREAS = {
    "sampling": Area(("toolkit/sampling.py",), ("tests/toolkit/test_sampling.py",)),
    "verification": Area(("toolkit/verification/*",), ("tests/toolkit/verification",)),
    "decoding": Area(
        ("toolkit/decoding/*",),
        tuple(
            f"tests/toolkit/test_{name}.py"
            for name in (
                *(
                    "decoding",
                    "trees",
                    "beams",
                    "beam_draft",
                    "beam_enumeration",
                    "prompt_lookup",
                    "adaptive_width",
                    "beam_blocks",
                    "beam_stops",
                    "beam_caches",
                    "draft_steps",
                    "text_rounds",
                    "proposers",
                ),
            )
        ),
        SLOW,
    ),
    "session": Area(
        ("toolkit/session/*",),
        tuple(
            f"tests/toolkit/test_{name}.py"
            for name in (
                "tree_index",
                "reasons",
                "capture_guard",
                "shrinking",
                "session",
                "capture",
                "packing",
                "selfcheck",
            )
        ),
        (*SLOW, *(test for family in OTHER_FAMILIES for test in _of_family(family))),
    ),
    "stopping": Area(("toolkit/stopping/*",), ("tests/toolkit/stopping",)),
    "acceptance": Area(
        ("toolkit/acceptance/*",),
        ("tests/toolkit/acceptance", "tests/analysis/test_calibration.py"),
        ("tests/toolkit/acceptance/test_preread.py::test_a_training_can_end_with_a_replayed_frontier",),
    ),
    "recording": Area(
        ("toolkit/trace/*", "data_gen/recording*"),
        (
            "tests/toolkit/test_trace.py",
            "tests/data_gen/test_recording.py",
            "tests/data_gen/test_traces.py::test_the_recorded_chances_are_those_of_the_distributions",
            "tests/data_gen/test_traces.py::test_one_impossible_token_is_refused_and_a_tie_is_not",
        ),
    ),
    "replay": Area(
        ("analysis/replay/*",),
        (
            "tests/analysis/replay",
            "tests/analysis/test_calibration.py::test_products_are_those_of_rounds_from_every_place",
        ),
        (
            "tests/analysis/replay/test_policies.py",  # whole decodings: minutes
            *(
                f"tests/analysis/replay/test_upper_bound.py::test_{name}"
                for name in (
                    "the_worth_of_a_heads_information",
                    "the_value_of_drafting_on_and_the_threshold_that_follows",
                )
            ),
        ),
    ),
    "mixing": Area(("data_gen/mixing.py", "data_gen/mix.py"), ("tests/data_gen/test_mix.py",)),
    "stage": Area(
        ("toolkit/stage.py",),
        tuple(f"tests/toolkit/test_{name}.py" for name in ("stage", "stage_command", "ownership", "contents")),
        (  # other processes do not see the change
            "tests/toolkit/test_stage_command.py::test_errors_on_the_command_line_are_one_line_each",
            "tests/toolkit/test_stage_command.py::test_a_bad_job_of_a_sweep_is_one_line_and_the_others_run",
            "tests/toolkit/test_stage.py::test_every_root_config_composes",
            "tests/toolkit/test_stage.py::test_every_experiment_composes",
        ),
    ),
}
LISTED = """
import json, sys
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.utils.file_utils import walk_mutatable_files
found = []
for path in walk_mutatable_files():
    data = SourceFileMutationData(path=path)
    data.load()
    for name, code in data.exit_code_by_key.items():
        diff = get_diff_for_mutant(name, path=path) if code in (0, 33) else ""
        found.append({"file": str(path), "name": name, "code": code, "diff": diff})
json.dump(found, sys.stdout)
"""


@dataclass(frozen=True)
class Mutant:
    """One changed line and what became of it."""

    file: str
    name: str
    code: int | None
    old: str
    new: str

    @property
    def function(self) -> str:
        return (
            self.name.rpartition("__mutmut_")[0]
            .rpartition(".")[2]
            .removeprefix("x_")
            .replace("xǁ", "")
            .replace("ǁ", ".")
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Mutates, tests and writes the page; 1 if fewer than 95 % of the mutants that count are noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--areas", nargs="*", default=list(AREAS), choices=list(AREAS))
    parser.add_argument(
        "--minutes",
        type=float,
        default=60,
        help="for all areas together (default 60); 0: write the page of what was tried",
    )
    parser.add_argument(
        "--digits", default="", help="try only mutants whose number ends in one of these digits: 3 is a tenth"
    )
    parser.add_argument("--again", action="store_true", help="try what no test noticed once more: after adding tests")
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--out", type=Path, help="Markdown page to write")
    args = parser.parse_args(argv)
    until = time.monotonic() + 60 * args.minutes
    found = {}
    for name in args.areas:
        if args.minutes > 0:
            workspace = prepare(name, AREAS[name])
            if args.again:
                forget_survivors(workspace, known_equivalents())
            run(workspace, args.children, max(1.0, until - time.monotonic()), args.digits)
        elif not (FOLDER / name / "mutants").is_dir():
            continue
        found[name] = mutants_of(FOLDER / name)
        print(row_of(name, found[name], known_equivalents()), flush=True)
    text = page(found, known_equivalents())
    if args.out:
        write_text(args.out, text)
    share = _share([mutant for mutants in found.values() for mutant in mutants], known_equivalents())
    print(f"noticed: {share:.1%} of the mutants that are tried and change something")
    return 0 if share >= 0.95 else 1


def prepare(name: str, area: Area) -> Path:
    """A copy of the tree with mutmut's settings for one area; files of an earlier call are brought up to date."""
    workspace = FOLDER / name
    workspace.mkdir(parents=True, exist_ok=True)
    for entry in COPIED:
        source, target = ROOT / entry, workspace / entry
        if source.is_file():
            shutil.copy2(source, target)
            continue
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    settings = {
        "source_paths": ["toolkit", "analysis", "data_gen"],
        "only_mutate": list(area.files),
        "also_copy": [entry for entry in COPIED if entry not in ("toolkit", "analysis", "data_gen", "tests")],
        "do_not_mutate_patterns": [r"raise \w+\(", r"warn\w*\(", r"^\s*f?\"", r"^\s*\w+ = f\""],
        "pytest_add_cli_args_test_selection": list(area.tests),
        "pytest_add_cli_args": [
            *("-m", "not slow", "-p", "no:cacheprovider"),
            *(f"--deselect={test}" for test in area.without),
        ],
        "timeout_multiplier": 5.0,
        "timeout_constant": 5.0,
        "use_git_change_detection": False,
        # A process that has run tests has threads (Arrow's above all) that its forks lack: they would wait for ever.
        "process_isolation": "forkserver",
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8") + "\n[tool.mutmut]\n" + "\n".join(lines) + "\n"
    write_text(workspace / "pyproject.toml", text)
    return workspace


def forget_survivors(workspace: Path, known: Sequence[dict[str, Any]]) -> None:
    """Marks mutants that nothing noticed, or whose run was cut, as not tried; which tests reach which function is asked again.

    Equivalent ones (`known`) stay as they are. A workspace that was never run is left alone.
    """
    if not (workspace / "mutants").is_dir():
        return
    left = [m for m in mutants_of(workspace) if m.code not in NOTICED]
    names = {m.name for m in left if m.code not in (SURVIVED, NO_TESTS) or reason_of(m, known) is None}
    for path in (workspace / "mutants").rglob("*.meta"):
        said = json.loads(path.read_text(encoding="utf-8"))
        codes = said["exit_code_by_key"]
        codes.update(dict.fromkeys(names & codes.keys()))
        write_text(path, json.dumps(said))
    (workspace / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)


def run(workspace: Path, children: int, seconds: float, digits: str = "") -> None:
    """`mutmut run`, ended when its time is up; raises RuntimeError with its last lines if the unchanged code fails."""
    log, chosen = workspace / "mutmut.log", [f"*__mutmut_*{digit}" for digit in digits]
    temporary = workspace / "tmp"  # of its own: pytest tidies up after other processes, too
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    if chosen and (workspace / "mutants").is_dir():  # mutants asked for by name are tried again: ask for the others
        left = [mutant for mutant in mutants_of(workspace) if mutant.code is None]
        chosen = [mutant.name for mutant in left if mutant.name[-1] in digits]
        if not chosen:
            return
    with log.open("w", encoding="utf-8") as file:
        started = subprocess.Popen(
            [sys.executable, "-m", "mutmut", "run", "--max-children", str(children), *chosen],
            cwd=workspace,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": "",
                **QUICK,
                "PYTEST_DEBUG_TEMPROOT": str(temporary),
            },
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = started.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, 9)
            started.wait()
            return
    if code != 0:
        raise RuntimeError(f"mutmut failed in {workspace}: {log.read_text(encoding='utf-8')[-2000:]}")


def mutants_of(workspace: Path) -> list[Mutant]:
    """Every mutant of a workspace with its exit code (None: not tried yet)."""
    listed = subprocess.run([sys.executable, "-c", LISTED], cwd=workspace, capture_output=True, text=True, check=True)
    return [_mutant(entry) for entry in json.loads(listed.stdout)]


def known_equivalents() -> list[dict[str, Any]]:
    """Entries {file, function, new, reason} of mutants that change nothing; `new` is the changed line, stripped.

    Without `new`: whatever is changed in the function.
    """
    if not EQUIVALENT.is_file():
        return []
    entries: list[dict[str, Any]] = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("mutant", [])
    return entries


def reason_of(mutant: Mutant, known: Sequence[dict[str, Any]]) -> str | None:
    """Why a mutant changes nothing, or None."""
    if STRICT.sub("", mutant.old) == STRICT.sub("", mutant.new):
        return "`zip` is only asked to check what always holds, that both are equally long"
    if DEVICE.sub("", mutant.old) == DEVICE.sub("", mutant.new):
        return "Only a second device could tell, and the tests have none."
    for entry in known:
        same = entry["file"] == mutant.file and entry.get("function", mutant.function) == mutant.function
        if same and mutant.new in entry.get("new", [mutant.new]):
            return str(entry["reason"])
    return None


def row_of(name: str, mutants: Sequence[Mutant], known: Sequence[dict[str, Any]]) -> str:
    """One row of the table: counts of an area."""
    tried = [mutant for mutant in mutants if mutant.code is not None]
    noticed = [mutant for mutant in tried if mutant.code not in (SURVIVED, NO_TESTS)]
    equivalent = [m for m in tried if m.code in (SURVIVED, NO_TESTS) and reason_of(m, known) is not None]
    left = len(tried) - len(noticed) - len(equivalent)
    return (
        f"| {name} | {len(mutants)} | {len(tried)} | {len(noticed)} | {len(equivalent)} | {left} "
        f"| {100 * _share(mutants, known):.1f} |"
    )


def page(found: dict[str, list[Mutant]], known: Sequence[dict[str, Any]]) -> str:
    """The Markdown page: a table by area, the equivalent mutants with reasons, the ones that nothing noticed."""
    everything = [mutant for mutants in found.values() for mutant in mutants]
    survivors = [mutant for mutant in everything if mutant.code in (SURVIVED, NO_TESTS)]
    lines = [
        "# Mutants",
        "",
        f"The tests notice {_share(everything, known):.1%} of the tried one-line changes that change anything.",
        "",
        "`make mutants`. Noticed counts failures, crashes and timeouts in the area's own tests (slow ones left out).",
        "Equivalent: the change has no effect that a caller could see on a machine without a GPU, as the tests' is. Each is",
        "listed below with the reason.",
        *([f"Not run yet: {', '.join(left)}."] if (left := [name for name in AREAS if name not in found]) else []),
        "",
        "| area | mutants | tried | noticed | equivalent | not noticed | noticed, % of those that count |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *[row_of(name, mutants, known) for name, mutants in found.items()],
        row_of("all", everything, known),
        "",
        "## Not noticed",
        "",
        *(_listed([m for m in survivors if reason_of(m, known) is None], known) or ["None."]),
        "",
        "## Equivalent",
        "",
        *(_listed([m for m in survivors if reason_of(m, known) is not None], known) or ["None."]),
    ]
    return "\n".join(lines) + "\n"


def _listed(mutants: Sequence[Mutant], known: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for mutant in mutants:
        reason = reason_of(mutant, known)
        ending = "" if reason is None else f": {reason}"
        lines.append(f"- `{mutant.file}` `{mutant.function}`: `{mutant.old}` -> `{mutant.new}`{ending}")
    return lines


def _share(mutants: Sequence[Mutant], known: Sequence[dict[str, Any]]) -> float:
    tried = [mutant for mutant in mutants if mutant.code is not None]
    noticed = sum(mutant.code not in (SURVIVED, NO_TESTS) for mutant in tried)
    counted = noticed + sum(m.code in (SURVIVED, NO_TESTS) and reason_of(m, known) is None for m in tried)
    return noticed / counted if counted else 1.0


def _mutant(entry: dict[str, Any]) -> Mutant:
    changed: dict[str, list[str]] = {"-": [], "+": []}
    for line in entry["diff"].split("\n"):
        if line[:1] in changed and not line.startswith(("---", "+++")):
            changed[line[0]].append(line[1:].strip())
    old, new = " ".join(changed["-"]), " ".join(changed["+"])
    return Mutant(entry["file"], entry["name"], entry["code"], old, new)


if __name__ == "__main__":
    sys.exit(main())

"""python -m benchmarks.soak --kills 100: every stage killed, run twice at once, on full disks, with damaged files.

A chain of all stages on the embedded pair runs once, uninterrupted, below a folder with blanks, commas and quotes in its name.
Then, at random points (seeded):

    killed   SIGKILL, and run again: the result is the uninterrupted one. A stage that ends sooner is tried afresh
    twice    two processes in one folder: one works. The other reports in one line that the folder is taken, or ends at
             once because the work is done
    full     files may not grow beyond a size, or writing fails from some moment on (ENOSPC): one line; run again: as above
    damaged  a file of the finished stage is changed by one bit, cut short or emptied. The stage that reads it and the
             stage itself end with the uninterrupted result or in one line. After the file is deleted, they end with
             that result
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.io import write_text
from toolkit.lines import first_line

ODD = "soak, a=b [c] {d} 'e' \"f\" \u2028ü"  # a folder's name
TINY = ["sampling.max_new_tokens=24", "prompts.limit=8", "max_drafted=6", "track=false", "grid=quickstart_live"]
STAGES: dict[str, tuple[str, str, list[str]]] = {
    "responses": (
        "data_gen.responses",
        "responses",
        [
            "prompts=toy_instruct",
            "prompts.split=train",
            "prompts.limit=24",
            "shard_size=4",
            "sampling.max_new_tokens=24",
        ],
    ),
    "mix": ("data_gen.mix", "mix", ['responses="{responses}"', "batch_size=8"]),
    "traces": (
        "data_gen.traces",
        "traces",
        ['responses="{responses}"', "hidden=true", "max_drafted=6", "shard_size=4"],
    ),
    "train": (
        "toolkit.train",
        "train",
        ['data.path="{mix}"', "trainer.max_epochs=6", "head.depth=1", "optimizer.lr=.002", "logger=csv"],
    ),
    "sweep": ("analysis.sweep", "sweep", ["prompts=toy_math", "prompts.split=dev", *TINY]),
    "other": ("analysis.sweep", "sweep", ["prompts=toy_math", "prompts.split=test", *TINY]),
    "frontier": (
        "analysis.frontier",
        "frontier",
        ['dev=["{sweep}"]', 'test=["{other}"]', "resamples=100", "track=false"],
    ),
    "report": ("analysis.report", "report", ['inputs=["{train}","{frontier}"]']),
}
TRIED = [name for name in STAGES if name != "other"]
READER = {"responses": "mix", "mix": "train", "train": "report", "sweep": "frontier", "frontier": "report"}
# What a stage's result is: files; times, code revisions and digests within them are left out.
RESULTS = {
    "responses": ["shard-*.jsonl"],
    "mix": ["summary.json"],
    "traces": ["traces-*.safetensors"],
    "train": ["head/*.safetensors", "metrics.json"],
    "sweep": ["rows.csv"],
    "frontier": ["frontier.csv", "settings.csv", "costs.csv"],
    "report": ["report.md"],
}
PRELOADED = [module for module, _, _ in STAGES.values()] + ["toolkit.training.sweep_table", "datasets", "transformers"]
WAIT = 120.0  # seconds before a process counts as hanging
MOMENTS = 20  # random moments that are tried for a kill before it counts as not hit


@dataclass
class Outcome:
    """How a process ended: done, line (one line), killed, or broken (anything else), and what it said."""

    kind: str
    said: str = ""


@dataclass
class Soak:
    """The chain's folders and the counts so far; `wrong` says what went wrong."""

    root: Path
    chance: random.Random
    deadline: float
    folders: dict[str, Path] = field(default_factory=dict)
    wanted: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    scratch: int = 0

    def prepare(self) -> None:
        """The uninterrupted chain."""
        self.run("responses", self.fresh("responses"))  # the server of processes begins with its first one
        for name in STAGES:
            folder = self.folders[name] = self.root / "whole" / name
            started = time.monotonic()
            outcome = self.run(name, folder)
            self.seconds[name] = time.monotonic() - started
            if outcome.kind != "done":
                raise InputError(f"soak: {name} failed uninterrupted: {outcome.said}")
            self.wanted[name] = result(name, folder)

    def fresh(self, name: str, copied: bool = False) -> Path:
        """A folder for one more try; copied: with the finished work in it."""
        self.scratch += 1
        folder = self.root / f"try {self.scratch}" / name
        folder.parent.mkdir()
        if copied:
            shutil.copytree(self.folders[name], folder, symlinks=True)
        return folder

    def run(self, name: str, folder: Path, **options: Any) -> Outcome:
        """One process to its end."""
        return finished(*self.start(name, folder, **options))

    def start(
        self,
        name: str,
        folder: Path,
        instead: dict[str, Path] | None = None,
        size: int | None = None,
        full: int | None = None,
    ) -> tuple[Any, Path]:
        """A process at work. instead: other folders of earlier stages; size, full: see `attempt`."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        said = self.root / f"said-{time.monotonic_ns()}.json"
        folders = {key: str(value) for key, value in {**self.folders, **(instead or {})}.items()}
        process = context.Process(target=attempt, args=(name, str(folder), folders, str(said), size, full))
        process.start()
        return process, said

    def ends_alike(self, name: str, folder: Path, kind: str, how: str) -> None:
        """Run to the end: the result must be the uninterrupted one."""
        outcome = self.run(name, folder)
        good = outcome.kind == "done" and result(name, folder) == self.wanted[name]
        self.note(name, kind, how if good else "wrong", f"{outcome.kind} {outcome.said}" if not good else "")
        if good:
            shutil.rmtree(folder.parent)

    def note(self, name: str, kind: str, how: str, said: str = "") -> None:
        """Count one try."""
        self.counts[name, kind, how] += 1
        if how == "wrong":
            self.wrong.append(f"{name}, {kind}: {said}")
            print(f"WRONG {self.wrong[-1]}", flush=True)

    # -- what is done to a stage -----------------------------------------------------------------------------------

    def killed(self, name: str) -> None:
        """A stage that ends before its moment has come is tried afresh, with moments as late as it takes at most."""
        for _ in range(MOMENTS):
            folder, started = self.fresh(name), time.monotonic()
            process, said = self.start(name, folder)
            process.join(self.chance.uniform(0.0, 1.0) * self.seconds[name])
            hit = process.is_alive()
            process.kill()
            process.join()
            said.unlink(missing_ok=True)
            if hit:
                break
            self.seconds[name] = min(self.seconds[name], time.monotonic() - started)
        self.ends_alike(name, folder, "killed", "same" if hit else "not hit")

    def twice(self, name: str) -> None:
        folder = self.fresh(name)
        first = self.start(name, folder)
        time.sleep(self.chance.uniform(0, 0.9) * self.seconds[name])
        outcomes = [finished(*self.start(name, folder)), finished(*first)]
        kinds = [outcome.kind for outcome in outcomes]
        lines = [outcome.said for outcome in outcomes if outcome.kind == "line"]
        if "done" not in kinds or "broken" in kinds or any("is in use by" not in line for line in lines):
            self.note(name, "twice", "wrong", str(outcomes))
            return
        self.ends_alike(name, folder, "twice", "line" if lines else "same")

    def full(self, name: str) -> None:
        folder = self.fresh(name)
        sizes = sorted(path.stat().st_size for path in self.folders[name].rglob("*") if path.is_file())
        if self.chance.random() < 0.5:
            outcome = self.run(name, folder, size=self.chance.randint(0, sizes[-1]))
        else:
            outcome = self.run(name, folder, full=self.chance.randint(0, 2 * len(sizes)))
        if outcome.kind == "broken":
            self.note(name, "full", "wrong", outcome.said)
            return
        self.ends_alike(name, folder, "full", "line" if outcome.kind == "line" else "same")

    def damaged(self, name: str) -> None:
        folder = self.fresh(name, copied=True)
        victim = self.chance.choice(
            sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        )
        what = damage(victim, self.chance)
        about = f"{victim.relative_to(folder)} {what}"
        if (reader := READER.get(name)) is not None:
            out = folder.parent / "reader" / reader
            outcome = self.run(reader, out, instead={name: folder})
            wrong = outcome.kind == "broken" or (outcome.kind == "done" and result(reader, out) != self.wanted[reader])
            if wrong:
                self.note(name, "damaged", "wrong", f"{about}: {reader} ended {outcome.kind} {outcome.said}")
                return
        outcome = self.run(name, folder)
        if outcome.kind == "broken":
            self.note(name, "damaged", "wrong", f"{about}: {outcome.said}")
            return
        if outcome.kind == "line":
            victim.unlink()
        self.ends_alike(name, folder, "damaged", "line" if outcome.kind == "line" else "same")


def attempt(name: str, folder: str, folders: dict[str, str], said: str, size: int | None, full: int | None) -> None:
    """The work of one process: what a command does, with its ending in a file.

    size  no file may grow beyond so many bytes (RLIMIT_FSIZE)
    full  from this flush on, writing fails with ENOSPC
    """
    import torch
    from hydra.utils import get_method

    from toolkit import io
    from toolkit.chain import compose_for
    from toolkit.stage import one_line

    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    report = os.open(said, os.O_WRONLY | os.O_CREAT)
    module, config, overrides = STAGES[name]
    try:
        cfg = compose_for(config, [*overrides, 'paths.output_dir="{here}"'], {**folders, "here": folder})
        if size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max(size, 512), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        if full is not None:
            io.os.fsync = _failing(io.os.fsync, full)  # type: ignore[assignment]
        get_method(f"{module}.run")(cfg)
        ending = {"kind": "done"}
    except BaseException as error:
        line = one_line(error) if isinstance(error, Exception) else None
        fine = line is not None and "\n" not in line
        ending = {
            "kind": "line" if fine else "broken",
            "said": str(line or f"{type(error).__name__}: {first_line(error)}"),
        }
    os.write(
        report,
        json.dumps(ending).encode()[:500]
        if len(json.dumps(ending)) < 500
        else json.dumps({**ending, "said": ending["said"][:200]}).encode(),
    )
    os._exit(0)


def _failing(flush: Callable[[int], None], after: int) -> Callable[[int], None]:
    calls = [0]

    def fails(handle: int) -> None:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(handle)

    return fails


def finished(process: Any, said: Path) -> Outcome:
    """How a process ended."""
    process.join(WAIT)
    if process.is_alive():
        process.kill()
        process.join()
        return Outcome("broken", f"still running after {WAIT:.0f} s")
    try:
        return Outcome(**json.loads(said.read_text()))
    except (OSError, ValueError):
        return Outcome("broken", f"exit code {process.exitcode}")
    finally:
        said.unlink(missing_ok=True)


def damage(path: Path, chance: random.Random) -> str:
    """Change one bit, cut short, or empty a file; returns which."""
    content, what = bytearray(path.read_bytes()), chance.choice(["flipped", "flipped", "cut", "emptied"])
    place = chance.randrange(len(content))
    if what == "flipped":
        content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(content if what == "flipped" else content[: place if what == "cut" else 0])
    return f"{what} at byte {place}"


def result(name: str, folder: Path) -> str:
    """A digest of what a stage is for, times left out."""
    sha = hashlib.sha256()
    for path in sorted(
        found for pattern in RESULTS[name if name != "other" else "sweep"] for found in folder.glob(pattern)
    ):
        text = path.read_bytes()
        if path.suffix == ".csv":
            import pandas as pd

            text = pd.read_csv(path).drop(columns=["setting_seconds", "seconds"], errors="ignore").to_csv().encode()
        if path.suffix == ".md":
            text = re.sub(rb"\d{4}-\d\d-\d\dT[\d:+]+|[0-9a-f]{7,64}[+]?", b"", text)
        sha.update(path.relative_to(folder).as_posix().encode() + b"\0" + text)
    return sha.hexdigest()


def soak(kills: int, minutes: float, seed: int = 0) -> tuple[str, list[str]]:
    """The table of counts, and what went wrong."""
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        root = Path(scratch) / ODD
        root.mkdir()
        run = Soak(root, random.Random(seed), time.monotonic() + 60 * minutes)
        run.prepare()
        plan = [("killed", kills), ("full", -(-kills // 2)), ("damaged", -(-kills // 2)), ("twice", -(-kills // 5))]
        tries = [(kind, TRIED[i % len(TRIED)]) for kind, count in plan for i in range(count)]
        run.chance.shuffle(tries)
        for done, (kind, name) in enumerate(tries):
            if time.monotonic() > run.deadline:
                print(f"stopped after {done} of {len(tries)} tries: {minutes:g} minutes are over", flush=True)
                break
            getattr(run, kind)(name)
        return table(run, len(tries)), run.wrong


def table(run: Soak, planned: int) -> str:
    """One line per stage and kind."""
    total = sum(run.counts.values())
    kills = sum(count for (_, kind, how), count in run.counts.items() if kind == "killed" and how != "not hit")
    wrong = sum(count for (_, _, how), count in run.counts.items() if how == "wrong")
    lines = [
        f"Of {total} tries, {kills} of them kills, {total - wrong} ended with the uninterrupted result.",
        "",
        f"{planned} tries were planned; fastest uninterrupted: "
        + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in run.seconds.items() if name in TRIED)
        + ".",
        "",
        "| what was done | stage | tries | result as uninterrupted | one line first, then that result | not hit | wrong |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for kind in ("killed", "twice", "full", "damaged"):
        for name in TRIED:
            found = [run.counts[name, kind, how] for how in ("same", "line", "not hit", "wrong")]
            if sum(found):
                lines.append(f"| {kind} | {name} | {sum(found)} | " + " | ".join(map(str, found)) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; exit with 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="half as many full disks and damages, a fifth twice")
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a Markdown file for the table")
    given = parser.parse_args(argv)
    text, wrong = soak(given.kills, given.minutes, given.seed)
    print(text)
    if given.out is not None:
        about = f"`python -m benchmarks.soak --kills {given.kills} --seed {given.seed}`"
        first, _, rest = text.partition("\n\n")
        told = "\n".join(__doc__.strip().split("\n")[2:])
        write_text(given.out, f"# Kills, full disks, damaged files\n\n{first}\n\n{told}\n\n{about}\n\n{rest}\n")
    if wrong:
        sys.exit("\n".join(["went wrong:", *wrong]))


if __name__ == "__main__":
    main()

"""Kill a stage at random moments, run it again until it finishes, and compare with an uninterrupted run."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent


def evidence() -> str:
    """data_gen.responses and toolkit.train killed (SIGKILL) at ten random moments each, against uninterrupted runs."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        data = [
            "-m", "data_gen.responses", "prompts=toy_instruct", "prompts.split=train", "prompts.limit=600", "shard_size=24",
            "batch_size=24",
        ]  # fmt: skip
        lines = [
            "| stage | kills that hit a running process | seconds of the uninterrupted run | compared | equal |",
            "|---|---|---|---|---|",
        ]
        lines.append(_row("data_gen.responses", data, root / "responses", "shard-*.jsonl", seed=1))
        mixed = root / "mix"
        finish(["-m", "data_gen.mix", f"responses={root / 'responses' / 'whole'}", f"paths.output_dir={mixed}"])
        training = [
            "-m", "toolkit.train", f"data.path={mixed}", "trainer.max_epochs=60", "optimizer.lr=.002", "head.depth=2",
        ]  # fmt: skip
        lines.append(_row("toolkit.train", training, root / "train", "head/head.safetensors", seed=2))
    return "\n".join(lines)


def _row(name: str, command: Sequence[str], root: Path, pattern: str, seed: int) -> str:
    whole, killed = root / "whole", root / "killed"
    started = perf_counter()
    finish([*command, f"paths.output_dir={whole}"])
    seconds = perf_counter() - started
    hits = run_with_kills([*command, f"paths.output_dir={killed}"], 10, seconds, random.Random(seed))
    files = sorted(path.relative_to(whole) for path in whole.glob(pattern))
    equal = bool(files) and all((whole / file).read_bytes() == (killed / file).read_bytes() for file in files)
    return f"| {name} | {hits} of 10 | {seconds:.0f} | {len(files)} x {pattern}, byte for byte | {'yes' if equal else 'NO'} |"


def run_with_kills(command: Sequence[str], kills: int, seconds: float, chance: random.Random) -> int:
    """Start the command again and again, killing it after a random part of `seconds`, then let it finish.

    Returns how many kills hit a process that was still running.
    """
    hits = 0
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(timeout=chance.uniform(0.1, 0.45) * seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            hits += 1
    finish(command)
    return hits


def finish(command: Sequence[str]) -> None:
    """Run a command to its end; its errors end this program."""
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")

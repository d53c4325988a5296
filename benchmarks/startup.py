"""What the checks cost at the start: `generate` on the toy pair, in fresh processes, with all checks and with none.

    cold  nothing is remembered: the architecture is tried on a tiny copy
    warm  the user's cache remembers it, as in every later run

Without: `self_check=off`, and the checks of configurations, arguments and ranges replaced by nothing. Processes take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROUNDS = 12
WARM_UP = 1
PROMPT = "Q: Join with dashes: door summer harbor.\nA:"


def worker(checks: bool) -> None:
    """One process: seconds of importing, loading and a first short generation, as JSON."""
    from time import perf_counter

    started = perf_counter()
    if not checks:
        _switch_off()
    from toolkit import ModelPair, generate
    from toolkit.pair import TOY

    imported = perf_counter()
    pair = ModelPair.from_pretrained(TOY / "target", TOY / "draft", self_check="auto" if checks else "off")
    generate(pair, [PROMPT], method="specdec_pp", head=str(TOY / "head"), max_new_tokens=16)
    print(json.dumps({"import": imported - started, "generate": perf_counter() - imported}))


def _switch_off() -> None:
    """The same code with checks that do nothing."""
    import warnings

    import toolkit.config.check as check
    import toolkit.config.values as arguments

    warnings.simplefilter("ignore")
    nothing: Any = lambda *given, **named: None
    arguments.checked = lambda function: function
    arguments.check_ranges = nothing
    check.check = nothing


def startup() -> str:
    """What all checks together cost at the start of a run: `generate` on the toy pair with and without them."""
    found: dict[tuple[str, bool], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS + WARM_UP):
            for kind in ("cold", "warm"):
                for checks in (True, False) if number % 2 else (False, True):
                    cache = Path(folder, f"{kind}-{number if kind == 'cold' else 0}-{checks}")
                    seconds = _process(checks, cache)
                    if number >= WARM_UP:
                        found.setdefault((kind, checks), []).append(seconds)
    lines = ["| | with checks (s) | without (s) | difference (s), paired | share |", "|---|---:|---:|---:|---:|"]
    shares = {}
    for kind in ("cold", "warm"):
        with_, without = found[kind, True], found[kind, False]
        extra = [one - other for one, other in zip(with_, without, strict=True)]
        shares[kind] = statistics.median(extra) / statistics.median(without)
        lines.append(f"| {kind} | {_spread(with_)} | {_spread(without)} | {_spread(extra)} | {shares[kind]:+.1%} |")
    verdict = f"The checks add {shares['warm']:+.1%} to a warm start and {shares['cold']:+.1%} to the first one.\n\n"
    about = f"\n\nImport, load and 16 tokens; medians of {ROUNDS} processes each, quartiles in brackets; processes take turns."
    return verdict + "\n".join(lines) + about


def _process(checks: bool, cache: Path) -> float:
    """Seconds of one process, Python's own start left out."""
    cache.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", f"from benchmarks.startup import worker; worker({checks})"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.strip().split("\n")[-1])
    return float(told["import"] + told["generate"])


def _spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"

"""python -m benchmarks.fuzz --inputs 3000 --seed 0: malformed command lines and calls, each right or refused in one line.

Half of the inputs are command lines of all commands (`benchmarks.fuzz_commands`), half are calls of the Python API
(`benchmarks.fuzz_calls`). All are drawn from the seed and run within this process. An input is

    refused    it ends with one line that a user can act on
    accepted   its stage has run on two prompts and four tokens; of a call, two prompts were decoded with what it returned.
               Commands that take longer (`COMPOSED`) have only their composed config checked
    traceback  it ends in any other error, or in a message of several lines
    hang       it does not end within its limit

Ends with 1 if there is a traceback or a hang. The table goes to --out, every accepted input to --accepted.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub.constants

from benchmarks.fuzz_calls import Calls
from benchmarks.fuzz_commands import COMPOSED, GOOD, RUN, Commands
from benchmarks.fuzz_outcomes import ACCEPTED, HANG, REFUSED, TRACEBACK, Outcome, outcome, quiet
from toolkit.io import write_text

LIMIT = 60.0  # seconds of computing per input
MEMORY = 24 * 2**30  # bytes of addresses: what is too large fails, and the machine goes on
KINDS = (REFUSED, ACCEPTED, TRACEBACK, HANG)


@dataclass
class Tally:
    """Counts by command or call and outcome; lines: every input that was accepted; wrong: every traceback and hang."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def note(self, target: str, said: str, found: Outcome) -> None:
        """Count one input."""
        self.counts[target, found.kind] += 1
        line = f"{found.kind} {target} {found.said}: {said}"
        if found.kind == ACCEPTED:
            self.lines.append(line)
        elif found.kind != REFUSED:
            self.wrong.append(line)
            print(f"WRONG {line[:1000]}", flush=True)


def fuzz(
    inputs: int, seed: int, run: bool = True, share: float = 0.5, limit: float = LIMIT, minutes: float = math.inf
) -> Tally:
    """Try so many inputs. run: run stages on what is accepted; share: how many of the inputs are command lines.

    minutes  after which no further input is begun; the first ones do not depend on it
    """
    tally, chance, end = Tally(), random.Random(seed), time.monotonic() + 60 * minutes
    logging.disable(logging.ERROR)
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # names of the hub are refused at once
    with tempfile.TemporaryDirectory(prefix="fuzz-") as root:
        commands = Commands(Path(root) / "commands", chance)
        calls = Calls(Path(root) / "calls", chance)
        if run:
            with quiet():
                commands.finish_stages()
        for target in _targets(commands, calls, inputs, share):
            if time.monotonic() > end:
                break
            if target in GOOD:
                line = commands.draw(target)
                tally.note(target, f"{line.how}: {line}", outcome(lambda line=line: commands.run(line), limit))  # type: ignore[misc]
            else:
                call = calls.draw(target)
                tally.note(target, f"{call.how}: {call}", outcome(lambda call=call: calls.run(call), limit))  # type: ignore[misc]
    logging.disable(logging.NOTSET)
    return tally


def _targets(commands: Commands, calls: Calls, inputs: int, share: float) -> Iterator[str]:
    """What the inputs are for: commands in turn, then calls in turn. Calls without models come as often as others."""
    kinds, numbers, done = (list(GOOD), list(calls.targets)), [0, 0], 0.0
    for _ in range(inputs):
        done += share
        kind = 0 if done >= 1 else 1
        done -= 1 - kind
        yield kinds[kind][numbers[kind] % len(kinds[kind])]
        numbers[kind] += 1


def table(tally: Tally, inputs: int, seed: int) -> str:
    """The page: counts by command and call."""
    rows = []
    for target in dict.fromkeys(name for name, _ in tally.counts):
        counts = [tally.counts[target, kind] for kind in KINDS]
        rows.append(f"| {'`' + target + '`'}{'' if target in RUN or target not in GOOD else ' (composed)'} | {sum(counts)} | "
                    f"{' | '.join(map(str, counts))} |")  # fmt: skip
    totals = [sum(tally.counts[name, kind] for name, each in tally.counts if each == kind) for kind in KINDS]
    rows.append(f"| **all** | {sum(totals)} | {' | '.join(map(str, totals))} |")
    wrong = "".join(f"\n    {line[:400]}" for line in tally.wrong)
    ends = ("were refused in one line", "ran after all", "ended in a traceback", "hung")
    said = ", ".join(f"{count:,} {end}" for count, end in zip(totals, ends, strict=True))
    return f"""# Malformed inputs

Of {sum(totals):,} malformed inputs {said}.

`python -m benchmarks.fuzz --inputs {inputs} --seed {seed}`: a good command line or call with one thing wrong, now and then two.
What is wrong may turn out to be right: a key left out that has a default, a value that fits. Such an input counts as accepted
only after its stage, or a decoding with its call's result, has run on two prompts and four tokens. Commands that
take longer have only their composed config checked: {", ".join(COMPOSED)}.

| input of | inputs | refused in one line | accepted | tracebacks | hangs |
|---|---|---|---|---|---|
{chr(10).join(rows)}
{f"{chr(10)}What went wrong:{chr(10)}{wrong}{chr(10)}" if wrong else ""}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of computing per input")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further input after so long")
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/fuzz.md"))
    parser.add_argument("--accepted", type=Path, help="a file for the list of what was accepted")
    flags = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    tally = fuzz(flags.inputs, flags.seed, limit=flags.limit, minutes=flags.minutes)
    tried = sum(tally.counts.values())
    write_text(flags.out, table(tally, tried, flags.seed))
    if flags.accepted is not None:
        write_text(flags.accepted, "\n".join(tally.lines) + "\n")
    print(f"{len(tally.wrong)} of {tried} inputs ended in a traceback or a hang")
    sys.exit(1 if tally.wrong else 0)


if __name__ == "__main__":
    main()

"""Named checks: each passes or fails with what it found; one that breaks down fails and does not stop the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

from benchmarks.host_reads import where

T = TypeVar("T")


@dataclass(frozen=True)
class Finding:
    """What a check found, in words, and whether that is right; passed None: reported, not decided."""

    passed: bool | None
    text: str


@dataclass(frozen=True)
class Check:
    """A finding with the name of its check and the seconds it took."""

    name: str
    finding: Finding
    seconds: float

    @property
    def verdict(self) -> str:
        """As tables show it."""
        return {True: "passed", False: "FAILED", None: "reported"}[self.finding.passed]


def run(checks: Mapping[str, Callable[[], Finding]]) -> list[Check]:
    """All of them in order; one line each goes to stderr as it ends."""
    return [_run(name, check) for name, check in checks.items()]


def attempt(name: str, work: Callable[[], T], checks: list[Check]) -> T | None:
    """What `work` returns, and a check that it got there; None if it did not."""
    results: list[T] = []

    def check() -> Finding:
        results.append(work())
        return Finding(True, "measured")

    checks += run({name: check})
    return results[0] if results else None


def _run(name: str, check: Callable[[], Finding]) -> Check:
    started = perf_counter()
    try:
        finding = check()
    except Exception as error:
        finding = Finding(False, f"{first_line(error)} (at {where(error)})")
    result = Check(name, finding, perf_counter() - started)
    print(f"{result.verdict:8} {name}: {finding.text}", file=sys.stderr, flush=True)
    return result


def first_line(error: BaseException) -> str:
    """An error as one line."""
    lines = str(error).strip().split("\n")
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def failures(checks: list[Check]) -> list[str]:
    """Names of the checks that failed."""
    return [check.name for check in checks if check.finding.passed is False]


def verdict(checks: list[Check]) -> str:
    """All checks in one sentence."""
    decided, failed = [check for check in checks if check.finding.passed is not None], failures(checks)
    if failed:
        return f"**{len(failed)} of {len(decided)} checks FAILED:** {', '.join(failed)}."
    return f"**All {len(decided)} checks passed.**" if decided else "No check was run."


def table(checks: list[Check]) -> str:
    """Markdown: one line per check."""
    lines = ["| check | verdict | found | seconds |", "|---|---|---|---:|"]
    for check in checks:
        text = check.finding.text.replace("|", "\\|")
        lines.append(f"| {check.name} | {check.verdict} | {text} | {check.seconds:.1f} |")
    return "\n".join(lines)

"""pass@k: the probability that one of k programs written for a problem passes its tests.

Paper: Chen et al. 2021 (arXiv:2107.03374), equation 1: of n programs of a problem c pass,

    pass@k = mean over problems of 1 - C(n - c, k) / C(n, k)

Theirs -> ours: total sampled programs n, correct c -> num_programs, num_passed. Deviations: a program that leaves by exit() has
failed. Tests and program run in two processes (`sandbox`), and only data crosses: a function that is to change its argument, or
to return an object of its own class, fails. Prompts whose tests make objects of its classes or hand it functions are left out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from math import comb
from typing import Any

from analysis.quality import sandbox
from analysis.quality.base import Metric, Score, check_lengths, fenced
from analysis.quality.inside import IMPORT
from analysis.quality.sandbox import ProgramVerdict, Tests
from toolkit.errors import InputError
from toolkit.models.prompts import Prompt
from toolkit.types import Generation


class PassAtK(Metric):
    """pass@k of prompts like HumanEval's, which hold `entry_point` and `test` (a function `check`), or like MBPP's, which
    hold `test_list` (asserts) and perhaps `test_setup_code` or `test_imports`.

    k                     programs one may try; every prompt needs that many generations
    allow_code_execution  must be true: the target's programs are run on this machine
    seconds, memory       limits of a program's run (MiB)
    """

    name = "pass_at_k"
    scale = "probability"

    def __init__(self, k: int = 1, allow_code_execution: bool = False, seconds: float = 10, memory: int = 512):
        if k < 1:
            raise InputError(f"k: expected at least 1, got {k}")
        if allow_code_execution is not True:
            raise InputError(
                "pass@k runs programs that a model wrote, on this machine: say allow_code_execution=true if you want that"
            )
        self.k, self.label = k, f"pass@{k}"
        self.limits = sandbox.Limits(seconds, memory)
        self.provenance = f"programs confined by {sandbox.chosen()}"

    def measure(self, prompts: Sequence[Prompt], generations: Sequence[Generation], pair: Any = None) -> list[Score]:
        """Each of a prompt's n generations that were decoded holds 1/n of the prompt: (pass@k / n, 1 / n)."""
        check_lengths(prompts, generations)
        groups = defaultdict(list)
        for row, prompt in enumerate(prompts):
            groups[prompt.id].append(row)
        scores = [Score(None)] * len(prompts)
        for rows in groups.values():
            decoded = [row for row in rows if generations[row].error is None]
            verdicts = [self._verdict(prompts[row], generations[row]) for row in decoded]
            unsupported = [verdict.reason for verdict in verdicts if verdict.kind == sandbox.UNSUPPORTED]
            n, num_passed = len(decoded), sum(verdict.kind == sandbox.PASSED for verdict in verdicts)
            if not unsupported and len(rows) < self.k:
                name = prompts[rows[0]].id
                raise InputError(f"pass@{self.k} needs {self.k} generations of every prompt, got {len(rows)} of {name}")
            for row in rows:
                scores[row] = Score(None, f"decoding failed: {generations[row].error}")
            lacking = f"fewer than {self.k} texts were decoded" if n < self.k else ""
            reason = unsupported[0] if unsupported else lacking
            for row, verdict in zip(decoded, verdicts, strict=True):
                counts = None if reason else (pass_at_k(n, num_passed, self.k) / n, 1 / n)
                scores[row] = Score(counts, reason or verdict.reason)
        return scores

    def _verdict(self, prompt: Prompt, generation: Generation) -> ProgramVerdict:
        tests = checks_of(prompt)
        if tests is None:
            return ProgramVerdict(sandbox.UNSUPPORTED, "no tests are known")
        return sandbox.run(program(generation.text, prompt), tests, self.limits)


def pass_at_k(num_programs: int, num_passed: int, k: int) -> float:
    """Equation 1: the share of the k-subsets of the programs that hold one that passed. Exact in whole numbers."""
    if not 0 <= num_passed <= num_programs or not 1 <= k <= num_programs:
        raise InputError(
            f"pass@k: expected 0 <= passed <= n and 1 <= k <= n, got {num_passed}, k={k}, n={num_programs}"
        )
    return 1 - comb(num_programs - num_passed, k) / comb(num_programs, k)


def program(text: str, prompt: Prompt) -> str:
    """The response, alone (with the question's imports) if it defines the function; else it completes the question."""
    name, question = prompt.extra.get("entry_point"), _question(prompt)
    block = fenced(text)
    code = text if block is None else block
    if name is None:
        return code
    if re.search(rf"^(?:async )?def {re.escape(name)}\b", code, re.MULTILINE):
        return "\n".join([*IMPORT.findall(question), code])
    lines = code.split("\n")
    end = next((i for i, line in enumerate(lines[1:], 1) if line[:1].strip()), len(lines))
    return question + "\n".join(lines[:end])


def checks_of(prompt: Prompt) -> Tests | None:
    extra = prompt.extra
    name, check, asserts = extra.get("entry_point"), extra.get("test"), extra.get("test_list")
    if isinstance(check, str) and isinstance(name, str):
        return Tests(f"{check}\n\ncheck({name})\n", _question(prompt), name)
    if isinstance(asserts, list | tuple) and asserts and all(isinstance(line, str) for line in asserts):
        before = extra.get("test_imports") or extra.get("test_setup_code") or ""
        lines = [before] if isinstance(before, str) else [str(line) for line in before]
        return Tests("\n".join([*lines, *asserts]) + "\n")
    return None


def _question(prompt: Prompt) -> str:
    question = prompt.extra.get("prompt", prompt.prompt)
    return question if isinstance(question, str) else "\n".join(turn["content"] for turn in prompt.messages or ())

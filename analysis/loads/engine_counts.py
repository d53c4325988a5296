"""What an engine counted of its drafts: vLLM's answers, a /metrics page, or the generations.jsonl of toolkit.decode.

answers   one JSON object per line, with `metrics.speculative_decoding` (vLLM 0.32.0; experimental there). Started with
          `--per-request-spec-decode-metrics detailed`, the server says the drafted and accepted tokens of every round.
          `summary` says how many rounds accepted 0, 1, 2, ... tokens: enough only if all rounds drafted K tokens. Of
          llama.cpp: `stream`, a list of all chunks, with `timings_per_token`
/metrics  one scrape of Prometheus counters, vLLM's or llama.cpp's, in either text format, under any prefix: sums by
          position since the server started, of all requests together

A position counts in the rounds that drafted it and accepted all before it. Shapes: n requests, K draft positions.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from analysis.loads.streamed import streamed_rounds
from analysis.tables.bootstrap import Array
from toolkit.errors import InputError
from toolkit.models.prompts import numbered_lines

DETAILED = "--per-request-spec-decode-metrics detailed"
STREAMED = ("data:", "event:", "id:", "retry:", ":")  # how the lines of an event stream begin
TOTALS = ("num_spec_tokens", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
ROUNDS, TOKENS, POSITIONS = COUNTERS = (
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
)


@dataclass(frozen=True)
class PositionCounts:
    """How often each draft position was reached and accepted.

    reached [n, K]   rounds that drafted position j, with all before it accepted
    accepted [n, K]  those of them that accepted it
    rounds, drafted  of all requests: rounds, and drafted tokens
    skipped          lines that were left out
    whole_server     sums of a server. If not every round drafted K tokens, `reached` is as if they had, so every share of it
                     is a lower bound
    most_calls       draft forward passes of a round, at most, where decode counted them: 0 of copies, 1 of a block draft
    has_two_sources  some rounds copied their tokens, and others drafted them
    """

    reached: Array
    accepted: Array
    rounds: int
    drafted: int
    skipped: int = 0
    whole_server: bool = False
    most_calls: int | None = None
    has_two_sources: bool = False

    @property
    def longest(self) -> int:
        """K, the most tokens of a round."""
        return self.reached.shape[1]

    @property
    def bounded(self) -> bool:
        """Whether shares are lower bounds."""
        return self.whole_server and self.drafted < self.longest * self.rounds


def read_counts(path: Path) -> PositionCounts:
    """The counts of a file of answers, or of a /metrics page. Raises InputError for contradictions, with the line."""
    lines = list(numbered_lines(path, "a file of responses"))
    if lines and not any(line.lstrip().startswith(("{", "[", *STREAMED)) for _, line in lines):
        return _of_metrics(path, lines)
    requests: list[tuple[list[int], list[int]]] = []
    width, skipped, reasons, drafts = 0, 0, set[str](), set[tuple[int, int]]()
    for number, line in lines:
        try:
            rounds = rounds_of(answer := answer_of(line))
            if isinstance(rounds, str):
                skipped += 1
                reasons.add(rounds)
                continue
            longest, drafted, accepted = rounds
            if requests and longest != width and "stream" not in answer:
                raise InputError(f"num_spec_tokens is {longest}, {width} before: split the file by it")
            width = max(width, longest)  # of streams K is the most that a round drafted
            requests.append((drafted, accepted))
            drafts |= _drafts(answer)
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from None
    if not requests:
        raise InputError(
            f"{path}: none of {skipped} lines has counts that tell draft positions apart ({', '.join(sorted(reasons))}); start "
            f"vLLM with a draft and {DETAILED}"
        )
    tells = drafts - {(1, 1)}  # a token by a forward pass is a chain's or a block's
    passes = {calls for _, calls in drafts}
    counts = counts_of(requests, width, skipped)
    return replace(counts, most_calls=max(passes) if tells else None, has_two_sources=0 in passes and len(passes) > 1)


def counts_of(requests: Sequence[tuple[list[int], list[int]]], width: int, skipped: int = 0) -> PositionCounts:
    """The counts of rounds that drafted at most `width` tokens: per request the drafted and the accepted tokens of each."""
    positions = np.arange(1, width + 1)
    reached, accepted_at = np.zeros((2, len(requests), width))
    for row, (drafted, accepted) in enumerate(requests):
        lengths, kept = np.array(drafted)[:, None], np.array(accepted)[:, None]
        reached[row] = ((lengths >= positions) & (kept >= positions - 1)).sum(0)
        accepted_at[row] = (kept >= positions).sum(0)
    num_rounds, num_drafted = (sum(map(of, (drafted for drafted, _ in requests))) for of in (len, sum))
    return PositionCounts(reached, accepted_at, num_rounds, num_drafted, skipped)


def rounds_of(answer: dict[str, Any]) -> tuple[int, list[int], list[int]] | str:
    """K, and the drafted and accepted tokens of an answer's rounds, checked against its other counts; or why it has none."""
    if "stream" in answer:
        if type(num_drafted := answer.get("num_drafted") or 0) is not int:
            raise InputError(f"num_drafted: expected K, a number, got {num_drafted!r}")
        return streamed_rounds(answer["stream"], num_drafted)
    metrics = answer.get("metrics")
    counts = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(counts, dict):
        return "no counts"
    histogram, numbers = counts.get("acceptance_histogram"), {name: counts.get(name) for name in TOTALS}
    wrong = [name for name, value in numbers.items() if type(value) is not int or value < 0]
    if wrong or not _whole(histogram):
        raise InputError(f"expected numbers of at least 0: {', '.join(wrong) or 'acceptance_histogram'}")
    width, steps, drafted, accepted = (int(value) for value in numbers.values() if value is not None)
    if len(histogram) > width + 1:
        raise InputError(
            f"acceptance_histogram has {len(histogram)} entries, expected at most num_spec_tokens + 1 = {width + 1}"
        )
    total = sum(j * count for j, count in enumerate(histogram))
    if sum(histogram) != steps or total != accepted:
        raise InputError(
            f"acceptance_histogram says {sum(histogram)} rounds and {total} accepted tokens, num_spec_steps and "
            f"num_accepted_draft_tokens say {steps} and {accepted}"
        )
    if width == 0:
        return "num_spec_tokens=0: nothing was drafted"
    if steps == 0 or drafted == 0:
        return "no rounds"
    kept, lengths = counts.get("per_step_accepted"), counts.get("per_step_drafted")
    if kept is None and lengths is None:
        if drafted != width * steps:
            return "rounds of changing length, by `summary`"
        return width, [width] * steps, [j for j, count in enumerate(histogram) for _ in range(count)]
    if not (_whole(kept) and _whole(lengths) and len(kept) == len(lengths)):
        raise InputError(
            "expected per_step_accepted and per_step_drafted as two lists of one length, of numbers of at least 0"
        )
    if not all(some <= most <= width for some, most in zip(kept, lengths, strict=True)):
        raise InputError(f"expected accepted <= drafted <= num_spec_tokens = {width} in every step, got more")
    if sum(lengths) != drafted or [kept.count(j) for j in range(len(histogram))] != histogram or len(kept) != steps:
        raise InputError(
            "per_step_accepted and per_step_drafted say other counts than acceptance_histogram and num_draft_tokens"
        )
    return width, lengths, kept


def _drafts(answer: dict[str, Any]) -> set[tuple[int, int]]:
    """Tokens and draft forward passes of the rounds that drafted, of a line of decode's; none of other answers."""
    rounds = answer["rounds"] if isinstance(answer.get("rounds"), list) else []
    numbers = [[r.get("num_drafted"), r.get("num_draft_calls")] for r in rounds if isinstance(r, dict)]
    return {(drafted, calls) for drafted, calls in filter(_whole, numbers) if drafted}


def answer_of(line: str) -> dict[str, Any]:
    """A whole answer. Raises InputError for other lines."""
    whole = "expected whole answers, one JSON object per line, got a part of a stream: ask with stream=false"
    if line.startswith(STREAMED):
        raise InputError(whole)
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"expected a JSON object, got {error}") from None
    if not isinstance(answer, dict):
        raise InputError(f"expected a JSON object, got {type(answer).__name__}")
    if not isinstance(several := answer.get("choices") or [], list):
        raise InputError(f"choices: expected a list, got {type(several).__name__}")
    choices = [choice for choice in several if isinstance(choice, dict)]
    if str(answer.get("object")).endswith(".chunk") or any(
        not choice.get("finish_reason", "none") for choice in choices
    ):
        raise InputError(whole)
    return answer


def _whole(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _of_metrics(path: Path, lines: Sequence[tuple[int, str]]) -> PositionCounts:
    """The sums of a /metrics page over its engines: one row. Raises InputError for a series that comes twice."""
    series: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for number, line in lines:
        try:
            families = list(text_string_to_metric_families(line)) if "spec_decode_num_" in line else []
        except (ValueError, IndexError):
            raise InputError(f"{path}, line {number}: expected a series of Prometheus, got {line.strip()!r}") from None
        for sample in (sample for family in families for sample in family.samples if sample.name.endswith(COUNTERS)):
            key = sample.name, frozenset(sample.labels.items())
            if key in series:
                raise InputError(
                    f"{path}, line {number}: {sample.name} of the same labels comes twice, expected one scrape. Counters count "
                    "from the server's start: give the last scrape, or for the time between two a page of their differences"
                )
            series[key] = float(sample.value)
    if not series:
        raise InputError(
            f"{path}: expected answers, one JSON object per line, or a /metrics page with counters of drafts by position "
            f"({ROUNDS}, ...): got none; scrape an engine that drafts and counts so"
        )
    sums, models = defaultdict[tuple[str, str], float](float), set[str]()
    for (name, labels), value in series.items():
        prefix, about = name.partition("spec_decode")[0], dict(labels)
        models.add(f"{prefix} {about.get('model_name', '')}".strip())
        sums[name.removeprefix(prefix), about.get("position", "")] += value
    if len(models) > 1:
        raise InputError(f"{path}: expected the counters of one model, got those of {', '.join(sorted(models))}")
    longest = sum(counter == POSITIONS for counter, _ in sums)
    accepted = [sums.get((POSITIONS, str(at)), math.nan) for at in range(longest)]
    drafts, drafted = sums[ROUNDS, ""], sums[TOKENS, ""]
    ladder = [drafts, *accepted]
    falls = all(before >= after >= 0 for before, after in pairwise(ladder))
    if not (accepted and drafts and falls and sum(accepted) <= drafted <= longest * drafts < math.inf):
        raise InputError(
            f"{path}: expected counters that fit each other, with positions 0, 1, ..., of a server that has drafted; got "
            f"{ROUNDS} {drafts:g}, {TOKENS} {drafted:g} and {POSITIONS} {accepted}"
        )
    reached = np.array([ladder[:-1]])
    return PositionCounts(reached, np.array([accepted]), int(drafts), int(drafted), whole_server=True)

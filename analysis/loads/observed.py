"""What a serving engine's own counts say of the draft length: analysis.advise responses=FILE.jsonl cost_ratio=.1.

The input is vLLM's answers (0.27 to 0.32), one JSON object per line, with counts per request: started with
`--per-request-spec-decode-metrics summary`, they are `metrics.speculative_decoding`. Every length k up to the served K gets
tokens per round, 1 + sum_{j <= k} P(at least j accepted), and (tokens per round) / (1 + c k). Rounds of length k are taken to
start where the served ones did: exact at k = K, close where acceptance is alike along a text. Files:

    lengths    one line per draft length
    positions  P(accepted | all before accepted) of every draft position
    observed.md
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.tables.bootstrap import ENOUGH, Array, Bootstrap, brackets, spread_name
from analysis.tables.files import markdown, read_table, save_table, show, with_interval
from analysis.tables.rows import at_least
from toolkit.config import commands
from toolkit.errors import InputError
from toolkit.files.atomic import write_text
from toolkit.models.prompts import numbered_lines
from toolkit.runs.stage import open_stage

STREAMED = ("data:", "event:", "id:", "retry:", ":")  # how the lines of an event stream begin
COUNTS = ("num_spec_tokens", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")


def advise_from_counts(cfg: commands.Advise) -> Path:
    path = Path(str(cfg.responses))
    histograms, skipped = read_histograms(path)
    stage = open_stage("advise", cfg, inputs=[path])
    if not stage.finished:
        bootstrap, spread = (
            Bootstrap(cfg.resamples, cfg.confidence, cfg.seed),
            spread_name(len(histograms), cfg.confidence),
        )
        lengths, positions = by_length(histograms, cfg.cost_ratio, bootstrap), by_position(histograms, bootstrap)
        save_table(lengths, stage.folder, "lengths")
        save_table(positions, stage.folder, "positions")
        left = f" {skipped} lines were left out: no counts, or no rounds of one length." if skipped else ""
        parts = ["# Observed acceptance", sentence(lengths)]
        parts += [f"{len(histograms)} requests, c = {cfg.cost_ratio:g}; {spread} over requests.{left}"]
        parts += [markdown(readable(lengths)), "Accepted, given that all tokens before it were:", markdown(positions)]
        write_text(stage.folder / "observed.md", "\n\n".join(parts) + "\n")
        stage.finish(num_requests=len(histograms), num_skipped=skipped)
    lengths = read_table(stage.folder, "lengths")
    show(readable(lengths), f"{len(histograms)} requests, c = {cfg.cost_ratio:g}", stage.folder / "observed.md")
    if skipped:
        print(f"{skipped} lines are left out: no counts, or no rounds of one length")
    print(sentence(lengths))
    return stage.folder


def read_histograms(path: Path) -> tuple[Array, int]:
    """Rounds by accepted tokens [requests, K + 1], and how many lines are left out. Raises InputError for contradictions."""
    histograms: list[list[int]] = []
    skipped, reasons = 0, set[str]()
    for number, line in numbered_lines(path, "a file of responses"):
        try:
            rounds = _histogram(line)
            if isinstance(rounds, str):
                skipped += 1
                reasons.add(rounds)
                continue
            histograms.append(rounds)
            deployed, before = len(rounds) - 1, len(histograms[0]) - 1
            if deployed != before:
                raise InputError(f"num_spec_tokens is {deployed}, {before} before: split the file by it")
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from None
    if not histograms:
        raise InputError(
            f"{path}: none of {skipped} lines has counts of rounds of a fixed length ({', '.join(sorted(reasons))}); start "
            "vLLM with a draft and --per-request-spec-decode-metrics summary"
        )
    return np.array(histograms, dtype=float), skipped


def by_length(histograms: Array, cost_ratio: float, bootstrap: Bootstrap) -> pd.DataFrame:
    """One line per draft length k, 0 being autoregressive decoding: tokens per round, throughput, their intervals."""

    def tokens_per_round(rounds: Array) -> Array:
        """[..., K + 1] -> at draft length k: 1 + sum over j <= k of P(at least j accepted)."""
        reached = at_least(rounds)
        return (reached / reached[..., :1]).cumsum(-1)

    ends = bootstrap.spread(histograms, tokens_per_round)
    table = pd.DataFrame({"num_drafted": np.arange(histograms.shape[1]), "requests": len(histograms)})
    for name, cost in (("tokens_per_round", 1.0), ("throughput", 1 + cost_ratio * table.num_drafted)):
        for end, numbers in zip(("", "_low", "_high"), ends, strict=True):
            table[f"{name}{end}"] = numbers / cost
    return table


def by_position(histograms: Array, bootstrap: Bootstrap) -> pd.DataFrame:
    """One line per draft position: how often it was accepted where all before it were, and over how many rounds."""
    reached, lines = at_least(histograms), []
    for j in range(1, histograms.shape[1]):
        counts = reached[:, [j, j - 1]]
        accepted = bootstrap.figures(counts, lambda sums: {"accepted": sums[..., 0] / sums[..., 1]}, "probability")
        lines.append({"position": j, "rounds": int(counts[:, 1].sum()), **accepted})
    return pd.DataFrame(lines)


def sentence(lengths: pd.DataFrame) -> str:
    """The answer in one sentence: the best of the draft lengths whose speed-up has an interval (or range) above 1."""
    if lengths.throughput_low[1:].isna().all():
        return "Nothing is advised: so few requests show no spread; give the counts of more."
    faster, deployed = lengths[lengths.throughput_low > 1], lengths.iloc[-1]
    if faster.empty:
        beyond = "beyond its interval" if deployed.requests >= ENOUGH else "in every request"
        return f"Do not draft: no draft length is faster than autoregressive decoding {beyond}."
    best = faster.loc[faster.throughput.idxmax()]
    wider = (
        " (the longest that was served: serve a longer one to see further)"
        if best.num_drafted == deployed.num_drafted
        else ""
    )
    ends = brackets(f"{best.throughput_low:.2f}", f"{best.throughput_high:.2f}", int(best.requests))
    return (
        f"Draft {best.num_drafted:.0f} tokens{wider}: {best.throughput:.2f} times autoregressive decoding {ends}; "
        f"served {deployed.num_drafted:.0f}: {deployed.throughput:.2f}."
    )


def readable(lengths: pd.DataFrame) -> pd.DataFrame:
    table = pd.DataFrame({"draft length": lengths.num_drafted})
    for name in ("tokens_per_round", "throughput"):
        ends = lengths[[name, f"{name}_low", f"{name}_high", "requests"]].itertuples(index=False)
        table[name.replace("_", " ")] = [with_interval(*numbers) for numbers in ends]
    return table


def _histogram(line: str) -> list[int] | str:
    """The rounds of one answer by accepted tokens, checked against its other counts; why not, if it has none of one length."""
    whole = "expected whole answers, one JSON object per line, got a part of a stream: ask with stream=false"
    if line.startswith(STREAMED):
        raise InputError(whole)
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"expected a JSON object, got {error}") from None
    if not isinstance(answer, dict):
        raise InputError(f"expected a JSON object, got {type(answer).__name__}")
    choices = [choice for choice in answer.get("choices") or () if isinstance(choice, dict)]
    if str(answer.get("object")).endswith(".chunk") or any(
        not choice.get("finish_reason", "none") for choice in choices
    ):
        raise InputError(whole)
    metrics = answer.get("metrics")
    counts = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(counts, dict):
        return "no counts"
    rounds, numbers = counts.get("acceptance_histogram"), {name: counts.get(name) for name in COUNTS}
    wrong = [name for name, value in numbers.items() if type(value) is not int or value < 0]
    if wrong or not isinstance(rounds, list) or not all(type(value) is int and value >= 0 for value in rounds):
        raise InputError(f"expected numbers of at least 0: {', '.join(wrong) or 'acceptance_histogram'}")
    width, steps, drafted, accepted = (int(value) for value in numbers.values() if value is not None)
    if len(rounds) > width + 1:
        raise InputError(
            f"acceptance_histogram has {len(rounds)} entries, expected at most num_spec_tokens + 1 = {width + 1}"
        )
    total = sum(j * count for j, count in enumerate(rounds))
    if sum(rounds) != steps or total != accepted:
        raise InputError(
            f"acceptance_histogram says {sum(rounds)} rounds and {total} accepted tokens, num_spec_steps and "
            f"num_accepted_draft_tokens say {steps} and {accepted}"
        )
    if width == 0:
        return "num_spec_tokens=0: nothing was drafted"
    if steps == 0 or drafted != width * steps:  # rounds of other lengths say nothing of a fixed one
        return "no rounds, or of changing length"
    return rounds + [0] * (width + 1 - len(rounds))

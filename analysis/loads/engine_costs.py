"""What an engine's rounds cost, by least squares over its answers: analysis.timing engine=[FILE,...].

    seconds = round * rounds + drafting * (rounds that draft) + token * (drafted) + column * (copied) + prompt * (prompt tokens)

A drafted token's price is that of a draft forward pass and of a column of the target together: a chain needs no more.
Answers of the engine's own lookup tell the column alone. Answers come from servers started with different K, 0 among them: K is
a start-up option of most. One JSON object per line, one file per start:

    llama.cpp's  with `timings`, which hold counts and milliseconds, and `source`: draft, lookup or none
    vLLM's       with `metrics.speculative_decoding`, `usage`, and beside them `seconds` and `source`, which the asker adds
    others       {"tokens": n, "rounds": R, "drafted": D, "seconds": s, "source": "draft"}: R target forward passes after the
                 prompt's, whose seconds are not in s. With `prompt_tokens` they are, unless `prompt_seconds` says them apart.
                 `drafting_rounds`: those of R that draft, where not all do

`num_drafted`, K, says how deep rounds were seen; `processor`, `threads` and `file_type` (of the weights) are for captions.
Intervals are Student's t over answers with the jackknife's standard error: resamples of few would lack a whole K. Files:

    engine    the prices, in seconds
    files     one line per file: rounds, drafted tokens, seconds, and how far the prices miss them
    costs.json  the cost table of batch size 1, for `analysis.advise costs=`
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from analysis import keys
from analysis.loads.engine_counts import answer_of, rounds_of
from analysis.tables.bootstrap import Array
from analysis.tables.files import read_table, save_table, show
from toolkit.config import plain
from toolkit.costs.load import EngineFacts, LoadCost, grid_of
from toolkit.errors import InputError
from toolkit.models.prompts import numbered_lines
from toolkit.runs.stage import Stage, open_stage

PRICES = ("round", "drafting round", "drafted token", "column", "prompt token", "prompt token of the draft")
ROUND, DRAFTING, TOKEN, COLUMN, PROMPT, DRAFT_PROMPT = range(len(PRICES))
SOURCES = ("none", "draft", "lookup")
CONFIDENCE = 0.95
WIDE = 0.5  # of a price: with a wider interval nothing is advised
MISSED = 0.2  # of a file's seconds: prices that miss more do not hold for all starts
SINGULAR = 1e10  # condition of normal equations that tell nothing
DEEPEST = 17  # tokens of a round, of the table's last point that is not a prompt's
UNREAD = ("track", "draft", "head", "warm_up", "batch_sizes", "rounds", "traces", "cost_ratios", "min_drafted",
          "engine_python")  # fmt: skip
OF_ASKING = ("pair", "prompts", "sampling", "num_drafted", "source", "requests")


@dataclass(frozen=True)
class EngineAnswer:
    """What one answer counts.

    about    engine, model file, processor
    most     tokens that a round drafts, at most
    rounds, drafting_rounds, drafted  target forward passes after the prompt's, those of them that draft, and drafted tokens
    seconds  of these rounds; the prompt's reading among them where `prompt_seconds` is None and there are prompt tokens
    """

    about: tuple[str, str, str]
    source: str
    most: int
    rounds: float
    drafting_rounds: float
    drafted: float
    seconds: float
    prompt_tokens: float = 0.0
    prompt_seconds: float | None = None

    @property
    def equations(self) -> list[tuple[Array, float]]:
        """What the prices have to explain: columns in the order of PRICES, and seconds."""
        drafts, copies = self.source == "draft", self.source == "lookup"
        decoding = [self.rounds, self.drafting_rounds * drafts, self.drafted * drafts, self.drafted * copies]
        prompt = np.array([0.0, 0.0, 0.0, 0.0, self.prompt_tokens, self.prompt_tokens * drafts])
        rounds = np.array([*decoding, 0.0, 0.0])
        if self.prompt_seconds is None:
            return [(rounds + prompt, self.seconds)]
        return [(rounds, self.seconds), (prompt, self.prompt_seconds)]


def price_engine(cfg: keys.Timing) -> Path:
    """Regress an engine's answers; returns the output folder."""
    files = [cfg.engine] if isinstance(cfg.engine, str) else plain(cfg.engine)
    return price_files(files, open_stage("timing", cfg, inputs=files, ignore=(*UNREAD, *OF_ASKING)))


def price_files(files: Sequence[Path | str], stage: Stage) -> Path:
    """Write the prices of these answers into a stage's folder, and finish it."""
    if not stage.finished:
        answers = [read_answers(Path(file)) for file in files]
        every = [answer for part in answers for answer in part]
        prices, r2 = regress(every)
        table = pd.DataFrame(prices, columns=["seconds", "low", "high"])
        table.insert(0, "price", PRICES)
        by_file = zip(files, answers, strict=True)
        residuals = pd.DataFrame([{"file": Path(file).name, **_residual(part, prices)} for file, part in by_file])
        save_table(table.dropna(), stage.folder, "engine")
        save_table(residuals, stage.folder, "files")
        worst = float(residuals.residual.abs().max())
        costs = cost_table(prices, every, {"r2": r2, "largest_residual": worst, "answers": len(every)})
        costs.save(stage.folder / "costs.json")
        stage.finish(num_answers=len(every))
    costs = LoadCost.load(stage.folder / "costs.json")
    about, engine = costs.about, costs.engine
    fit = f"R^2 {about['r2']:.4f}, {about['largest_residual']:.1%} off at most by file"
    title = f"{costs.whose}: {about['answers']} answers, {fit}"
    show(read_table(stage.folder, "engine"), title, stage.folder / "engine.csv")
    if engine is not None and not engine.column:
        print("column: unknown, without answers of the engine's own lookup; copied tokens are not advised on")
    if engine is not None and engine.noise:
        print(engine.noise)
    print(f"cost table: {stage.folder / 'costs.json'}")
    return stage.folder


def read_answers(path: Path) -> list[EngineAnswer]:
    """The answers of a file. Raises InputError, with the line, for one without counts or seconds."""
    answers = []
    for number, line in numbered_lines(path, "a file of an engine's answers"):
        try:
            answers.append(engine_answer(answer_of(line)))
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from None
    return answers


def engine_answer(answer: Mapping[str, Any]) -> EngineAnswer:
    """What a line counts. Raises InputError for one that says too little, or what does not fit."""
    if isinstance(answer.get("timings"), dict):
        engine, counts = "llama.cpp", _of_timings(answer["timings"])
    elif "rounds" in answer:
        engine, counts = str(answer.get("engine") or "an engine"), _of_own_counts(answer)
    elif isinstance(answer.get("usage"), dict):
        engine, counts = "vLLM", _of_vllm(answer)
    else:
        raise InputError(
            "expected counts: `timings`, `metrics` beside `usage`, or rounds and drafted; got none of them"
        )
    rounds, drafted = counts["rounds"], counts["drafted"]
    source = answer.get("source") or ("none" if not drafted else None)
    if source not in SOURCES or (source == "none" and drafted):
        raise InputError(f"expected source: {' or '.join(SOURCES[1:])} of {drafted:g} drafted tokens, got {source!r}")
    drafting = counts.get("drafting_rounds") or min(rounds, drafted)
    if rounds < 0 or drafting > min(rounds, drafted) or (drafted > 0) > (drafting > 0):
        raise InputError(
            f"expected drafted tokens in some of the rounds, got {drafted:g} in {drafting:g} of {rounds:g} rounds"
        )
    if not counts["seconds"]:
        raise InputError("expected seconds above 0, got 0: this engine reports none")
    model = Path(str(answer.get("model") or "")).name
    model += f" ({answer['file_type']})" if answer.get("file_type") else ""
    threads = answer.get("threads")
    processor = [answer.get("processor"), threads and f"{threads} thread{'' if threads == 1 else 's'}"]
    about = engine, model, ", ".join(str(part) for part in processor if part)
    most = math.ceil(_number(answer, "num_drafted", drafted / drafting if drafting else 0.0))
    return EngineAnswer(about, str(source), most, **{**counts, "drafting_rounds": drafting})


def _of_timings(timings: Mapping[str, Any]) -> dict[str, float]:
    """llama.cpp's counts. With a draft model its reading of the prompt is in the prompt's time."""
    drafted, accepted = (_number(timings, name, 0.0) for name in ("draft_n", "draft_n_accepted"))
    seconds, prompt_seconds = (_number(timings, name) / 1e3 for name in ("predicted_ms", "prompt_ms"))
    counts = {"rounds": _number(timings, "predicted_n") - 1 - accepted, "drafted": drafted, "seconds": seconds}
    return {**counts, "prompt_tokens": _number(timings, "prompt_n"), "prompt_seconds": prompt_seconds}


def _of_own_counts(answer: Mapping[str, Any]) -> dict[str, float]:
    optional = [name for name in ("drafting_rounds", "prompt_tokens", "prompt_seconds") if answer.get(name) is not None]
    return {name: _number(answer, name) for name in ("rounds", "drafted", "seconds", *optional)}


def _of_vllm(answer: Mapping[str, Any]) -> dict[str, float]:
    """vLLM's counts: it lists the rounds that drafted. The others produced the rest of the tokens, one each."""
    listed, usage = rounds_of(dict(answer)), answer["usage"]
    if isinstance(listed, str) and answer.get("source") not in (None, "none") and listed != "no rounds":
        raise InputError(f"expected counts of drafted tokens, got {listed}")
    lengths, accepted = ([], []) if isinstance(listed, str) else listed[1:]
    others = max(_number(usage, "completion_tokens") - 1 - sum(accepted) - len(lengths), 0.0)
    counts = {"rounds": len(lengths) + others, "drafting_rounds": float(len(lengths)), "drafted": float(sum(lengths))}
    return {**counts, "seconds": _number(answer, "seconds"), "prompt_tokens": _number(usage, "prompt_tokens")}


def _number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A count or a time. Raises InputError for anything else."""
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InputError(f"expected {name}, a number of at least 0, got {value!r}")
    return float(value)


def regress(answers: Sequence[EngineAnswer]) -> tuple[Array, float]:
    """The prices and the ends of their intervals [6, 3], not a number where answers do not tell them, and R^2 about the mean.

    Raises InputError for answers of several models, without or with nothing but drafts, and for prices that are not above 0.
    """
    for facts in map(set, zip(*(answer.about for answer in answers), strict=True)):
        if len(facts) > 1:
            raise InputError(f"expected answers of one engine, model and processor, got {' and '.join(sorted(facts))}")
    if len({answer.drafted > 0 for answer in answers}) < 2:
        what = "no answers" if not answers else "drafts alone" if answers[0].drafted else "no drafts"
        raise InputError(
            f"expected answers with drafts and without (K = 0), got {what}: their prices are not told apart"
        )
    columns, seconds = (np.array(part) for part in zip(*(e for a in answers for e in a.equations), strict=True))
    lengths = {round(a.drafted / a.drafting_rounds) for a in answers if a.source == "draft" and a.drafted}
    present = [number for number in range(len(PRICES)) if columns[:, number].any()]
    used = [number for number in present if number != DRAFTING or len(lengths) > 1]
    prices = np.full((len(PRICES), 3), np.nan)
    prices[used] = _estimated(answers, used)
    while free := [number for number in used if number not in (ROUND, TOKEN) and prices[number, 0] < 0]:
        used.remove(free[0])  # as good as free, and noise makes it less
        prices[free[0]] = 0.0 if free[0] == COLUMN else np.nan
        prices[used] = _estimated(answers, used)
    if wrong := [f"{prices[number, 0]:.3g} s for a {PRICES[number]}" for number in used if prices[number, 0] <= 0]:
        raise InputError(f"expected prices above 0, got {wrong[0]}")
    residual = seconds - columns[:, used] @ prices[used, 0]
    return prices, float(1 - (residual**2).sum() / ((seconds - seconds.mean()) ** 2).sum())


def _estimated(answers: Sequence[EngineAnswer], used: list[int]) -> Array:
    """Some prices and the ends of their intervals [k, 3]. Raises InputError where answers do not tell them."""
    systems = []  # normal equations of each answer [n, k, k + 1]
    for answer in answers:
        rows = np.array([[*columns[used], seconds] for columns, seconds in answer.equations])
        systems.append(rows[:, :-1].T @ rows)
    total, count = np.sum(systems, axis=0), len(systems)
    without_one = total - np.array(systems)
    if count <= len(used) or np.linalg.cond(without_one[..., :-1]).max() > SINGULAR:
        names = ", ".join(PRICES[number] for number in used)
        raise InputError(
            f"{count} answers do not tell the prices of {names}: expected two or more of every K, and of 0"
        )
    prices = np.linalg.solve(total[:, :-1], total[:, -1])
    others = np.linalg.solve(without_one[..., :-1], without_one[..., -1:])[..., 0]
    error = np.sqrt((count - 1) / count * ((others - others.mean(0)) ** 2).sum(0))
    reach = stdtrit(count - len(used), (1 + CONFIDENCE) / 2) * error
    return np.stack([prices, prices - reach, prices + reach], 1)


def _residual(answers: Sequence[EngineAnswer], prices: Array) -> dict[str, float]:
    """A file's counts, its seconds, and by what share the prices miss them."""
    counts = {name: sum(getattr(answer, name) for answer in answers) for name in ("rounds", "drafted")}
    equations = [equation for answer in answers for equation in answer.equations]
    explained = sum(float(columns @ np.nan_to_num(prices[:, 0])) for columns, _ in equations)
    seconds = sum(spent for _, spent in equations)
    return {"answers": len(answers), **counts, "seconds": seconds, "residual": explained / seconds - 1}


def cost_table(prices: Array, answers: Sequence[EngineAnswer], about: Mapping[str, Any]) -> LoadCost:
    """The cost table of batch size 1. Raises InputError for a column that takes longer than a drafted token.

    Points of rounds: one token, two, DEEPEST. Points of prompts follow, from the width on that takes longer as a prompt.
    """
    first, drafting, token, column = np.nan_to_num(prices[:PROMPT, 0]).tolist()
    forward = token - column if token else first  # without a draft model the target's stands for it
    if forward <= 0:
        raise InputError(f"expected a drafted token to take longer than a column, got {-forward:.3g} s less: noise")
    rounds = {width: first + (width > 1) * drafting + (width - 1) * column for width in (1, 2, DEEPEST)}
    points = _with_prompts({1: forward}, prices[DRAFT_PROMPT, 0]), _with_prompts(rounds, prices[PROMPT, 0])
    grids = [grid_of({(1.0, float(width), 0.0): value for width, value in own.items()}, "costs") for own in points]
    reasons = [
        f"a {PRICES[number]} takes {value:.3g} s [{low:.3g}, {high:.3g}]"
        for number in (ROUND, TOKEN) for value, low, high in [prices[number]] if high - low > WIDE * value
    ]  # fmt: skip
    if (worst := about["largest_residual"]) > MISSED:
        reasons.append(f"the prices miss the seconds of a file by {worst:.0%}")
    noise = f"too noisy to advise on: {', '.join(reasons)}; ask more, or on a quieter machine" if reasons else None
    facts = EngineFacts(drafting, not np.isnan(prices[COLUMN, 0]), 1 + max(answer.most for answer in answers), noise)
    engine, model, processor = answers[0].about
    by_name = dict(zip(PRICES, np.nan_to_num(prices).tolist(), strict=True))
    source, description = f"{engine}, {model}".strip(", "), {**about, "processor": processor, "prices": by_name}
    return LoadCost(grids[0], grids[1], source, description, facts)


def _with_prompts(points: dict[int, float], price: float) -> dict[int, float]:
    """Points of rounds, and those of a prompt: `price` a token, from the first width on that takes longer so."""
    if np.isnan(price):
        return points
    width = max(64, math.ceil(max(points.values()) / price))
    return {**points, **{long: long * price for long in (width, 8 * width)}}

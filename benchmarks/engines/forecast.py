"""Ten settings served by llama.cpp beside what `analysis.advise` forecasts at llama.cpp's own costs; greedily, batch 1.

    make engines ARGS="forecast --target T.gguf --draft D.gguf --out FOLDER"

32 questions (12 of HumanEval, 10 of GSM8K's test part, 10 of Spec-Bench's MT-Bench) are split into dev and test as the advice
splits them. Eight of test are served three times, settings in rotated order; dev has those that the cost table is made of.
FOLDER keeps every answer as it comes, in SETTING-TURN.jsonl, and the same line goes on. With 1.5 billion parameters it takes
about an hour on two quiet cores, and the recording for the advice besides. OMP_NUM_THREADS is the engine's, too; with
DTYPE=bfloat16 the recording is made in that format.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.loads.advice import split
from analysis.loads.engine_answers import ask_xllamacpp
from analysis.loads.recorded import RecordedPair
from analysis.loads.simulator import Load, RequestResults, serve
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import markdown, read_table, with_interval
from analysis.tables.grid import expand
from analysis.tables.sweep_context import SweepContext
from benchmarks.engines.counts import LONGEST_COPY, NgramSimple
from benchmarks.engines.install import ENGINES, python_of
from benchmarks.engines.matrix import note, row
from benchmarks.evidence import machine
from benchmarks.real.folder import DTYPE, rows_of, stage
from data_gen.prompts import JsonlPrompts
from toolkit import config
from toolkit.costs.load import LoadCost
from toolkit.files.atomic import write_text
from toolkit.files.digests import digest

TURNS, TOKENS, LONGEST = 3, 96, 8
CHAT = ("writing", "roleplay", "reasoning", "stem", "humanities", "extraction")
CHOSEN = {"code": 3, "mathematics": 3, "chat": 2}  # of the test questions: the first ones
FIXED = {f"K={k}": {"source": "draft", "num_drafted": k, "p_min": 0.0} for k in (1, 2, 4, 8)}
P_MIN = {f"p={h}": {"source": "draft", "num_drafted": LONGEST, "p_min": float(h)} for h in (".5", ".7", ".8", ".9")}
SETTINGS: dict[str, dict[str, Any]] = {"alone": {"source": "none"}, **FIXED, **P_MIN, "lookup": {"source": "lookup"}}
GRID = ["~grid", "+grid.autoregressive={}", "+grid.speculative.policy.num_drafted=[1,2,4,8]",
        "+grid.p_min.policy.threshold=[.5,.7,.8,.9]"]  # fmt: skip
BOOTSTRAP = Bootstrap()


def forecast(target: str, draft: str, folder: Path, data: Path, engines: Path) -> None:
    """Serve, price, advise and compare; writes forecast.md into the folder."""
    python = python_of("llamacpp", engines)
    path = write_text(folder / "prompts.jsonl", lines_of_json(questions(data)))
    parts = split(JsonlPrompts(path).load())
    by_kind = {kind: [p for p in parts["test"] if p.extra["category"] == kind] for kind in CHOSEN}
    chosen = [prompt for kind, count in CHOSEN.items() for prompt in by_kind[kind][:count]]
    shared = {"model": target, "draft": draft, "max_tokens": TOKENS, "temperature": 0.0}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in SETTINGS}
    print(f"{len(SETTINGS)} settings x {TURNS} turns of {len(chosen)} questions, {TOKENS} tokens each", flush=True)
    for turn in range(TURNS):
        names = [*SETTINGS][3 * turn :] + [*SETTINGS][: 3 * turn]
        for name in names:
            print(f"turn {turn + 1} of {TURNS}: {name}", flush=True)
            file = folder / f"{name}-{turn}.jsonl"
            answers[name] += ask_xllamacpp(
                python, {**shared, **SETTINGS[name]}, [prompt.content for prompt in chosen], file
            )
    probed = [next(p for p in parts["dev"] if p.extra["category"] == kind) for kind in CHOSEN]
    rows = [{"id": prompt.id, "prompt" if prompt.prompt else "messages": prompt.content} for prompt in probed]
    probe = write_text(folder / "probe.jsonl", lines_of_json(rows))
    pair = [f"pair.target={target}", f"pair.draft={draft}", "prompts=jsonl", "sampling.temperature=0", "track=false"]
    words = [
        "engine=xllamacpp",
        f"engine_python={python}",
        f"prompts.path={probe}",
        f"sampling.max_new_tokens={TOKENS // 2}",
    ]
    costs = stage("analysis.timing", *pair, *words, folder=folder) / "costs.json"
    words = [
        *pair,
        f"prompts.path={path}",
        f"sampling.max_new_tokens={TOKENS}",
        f"max_drafted={LONGEST}",
        "hidden=false",
        f"pair.dtype={DTYPE}",
    ]
    words += ["batch_sizes=[1]", f"costs={costs}", *GRID]
    advice = stage("analysis.advise", *words, folder=folder)
    table = compared(answers, replayed(words, advice, costs, [prompt.id for prompt in chosen]))
    note(
        folder / "rows.csv", [row("llama.cpp", kind, "served", forecast=off) for kind, off in missed_by(table).items()]
    )
    lines = read_table(advice, "advice")
    text = [
        "# Served by llama.cpp, and forecast",
        f"{ENGINES['llamacpp'].package}; {machine()}; {LoadCost.load(costs).whose}. {len(chosen)} questions x {TURNS} turns, "
        f"{TOKENS} tokens, T = 0; forecasts are replays of texts decoded here in {DTYPE}, on the same questions.",
        ", ".join(f"{Path(file).name} sha256 {digest(file)[:16]}" for file in (target, draft)),
        markdown(table.drop(columns=["value"])),
        gap(table, lines[lines.advised].iloc[0]),
        f"`python -m analysis.advise {shlex.join(words)}`",
    ]
    print(
        f"\n{write_text(folder / 'forecast.md', chr(10).join(f'{part}{chr(10)}' for part in text)).read_text('utf-8')}"
    )
    print(f"page: {folder / 'forecast.md'}")


def questions(data: Path) -> list[dict[str, Any]]:
    """32 questions with their kind, as messages."""
    code = [
        (row["id"], f"Complete this function.\n\n{row['prompt']}")
        for row in rows_of(data / "humaneval.jsonl")[::13][:12]
    ]
    mathematics = [(row["id"], row["messages"][0]["content"]) for row in rows_of(data / "gsm8k_test.jsonl")[:10]]
    rows = [row for row in rows_of(data / "spec_bench.jsonl") if row["category"] in CHAT][::6][:10]
    chat = [(row["id"], row["messages"][0]["content"]) for row in rows]
    return [
        {"id": name, "category": kind, "messages": [{"role": "user", "content": text}]}
        for kind, part in zip(CHOSEN, (code, mathematics, chat), strict=True)
        for name, text in part
    ]


def lines_of_json(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def replayed(words: Sequence[str], advice: Path, costs: Path, ids: Sequence[str]) -> dict[str, RequestResults]:
    """Every setting on these questions of the advice's recording, the reading of prompts left out."""
    cfg = config.compose("advise", list(words))
    parts = split(config.instantiate(cfg.prompts).load())
    prompts = [*parts["dev"], *parts["test"]]
    context = SweepContext(config.instantiate(cfg.pair), prompts, config.instantiate(cfg.sampling), cfg.batch_size)
    recorded = RecordedPair(context, expand(config.plain(cfg.grid), True, LONGEST), advice, LONGEST, hidden=False)
    recorded.costs, recorded.prompt_tokens = (LoadCost.load(costs), costs), [1] * len(recorded.sequences)
    names = [prompts[row].id for row in recorded.recording.usable]
    texts = [names.index(name) for name in ids]
    results = {name_of(s.method, s.label): recorded.serve(s, Load(1), texts) for s in recorded.settings}
    lookup = config.method("prompt_lookup", [f"policy.num_drafted={LONGEST_COPY}"]).bind(context.pair)
    copies = recorded.recording.copies(NgramSimple(), LONGEST_COPY)
    table = recorded.costs[0].copying
    return {**results, "lookup": serve(copies, recorded.prompt_tokens, lookup.policy, table, Load(1), texts)}


def name_of(method: str, label: str) -> str:
    """A setting of the advice as files call it."""
    return "alone" if method == "autoregressive" else label.replace("h=0", "p=")


def compared(answers: Mapping[str, Sequence[dict[str, Any]]], results: Mapping[str, RequestResults]) -> pd.DataFrame:
    """One line per setting: forecast and served, times plain, and what was drafted and accepted of one turn.

    answers  of every setting, turn by turn, the same questions
    """
    measured = {name: np.array([_speed(answer) for answer in some]) for name, some in answers.items()}
    plain, lines = results["alone"], []
    for name, values in measured.items():
        pairs = np.hstack([values, measured["alone"]])
        ratio = BOOTSTRAP.figures(pairs, lambda sums: {"": sums[..., 0] / sums[..., 1] * sums[..., 3] / sums[..., 2]})
        value, low, high = (ratio[end] for end in ("", "_low", "_high"))
        result = results[name]
        ours = result.tokens_per_second / plain.tokens_per_second
        timings = [answer["timings"] for answer in answers[name]]
        drafted, accepted = (sum(t.get(key, 0) for t in timings) / TURNS for key in ("draft_n", "draft_n_accepted"))
        sign = "" if low <= 1 <= high else "yes" if (ours > 1) == (value > 1) else "no"
        shown = "1" if name == "alone" else with_interval(value, low, high)
        lines.append({
            "setting": name, "forecast, times plain": f"{ours:.2f}", "served, times plain": shown,
            "drafted, accepted: served": f"{drafted:.0f}, {accepted:.0f}",
            "forecast": f"{result.num_drafted.sum()}, {int(result.tokens.sum() - result.rounds.sum())}",
            "sign right?": sign, "value": value,
        })  # fmt: skip
    return pd.DataFrame(lines)


def missed_by(table: pd.DataFrame) -> dict[str, str]:
    """By how much forecasts are above what was served, for drafts and for lookup, as the matrix of engines says."""
    off = (table["forecast, times plain"].astype(float) / table.value - 1).set_axis(table.setting).drop("alone") * 100
    drafts = off.drop("lookup")
    return {
        "separate": f"off by {drafts.min():+.0f} to {drafts.max():+.0f} %",
        "lookup": f"off by {off['lookup']:+.0f} %",
    }


def gap(table: pd.DataFrame, advised: Any) -> str:
    """The advised setting beside the best one that was served, in a sentence."""
    name, best = name_of(advised.method, advised.setting), table.loc[table.value.idxmax()]
    value = table.value[table.setting == name].iloc[0]
    return (
        f"Advised: {name}, {value:.2f} times plain when served; best served: {best.setting}, {best.value:.2f}, so "
        f"{1 - value / best.value:.1%} less."
    )


def _speed(answer: Mapping[str, Any]) -> tuple[float, float]:
    """Tokens after an answer's first one, and seconds of decoding."""
    timings = answer["timings"]
    return timings["predicted_n"] - 1, timings["predicted_ms"] / 1e3

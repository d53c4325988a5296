"""`make engines`: vLLM and llama.cpp started with what the exports wrote, their counts beside decoding and replay here.

    make engines                                 all steps, into outputs/engines/page.md; 3.4 GB of environments come first
    make engines ARGS="install vllm"             one engine's environment alone
    make engines ARGS="--draft FOLDER --eagle3 FOLDER --target FOLDER_OR_GGUF"      with drafts that are there
    make engines ARGS="page"                     the page of what was counted so far
    make engines ARGS="forecast --target T.gguf --draft D.gguf --out FOLDER"      alone: `benchmarks.engines.forecast`

Steps: install, drafts, vllm, structured, llamacpp, example, page. Run it again to go on after an interruption: environments,
drafts and answers are kept; other drafts, targets or sizes need another folder (--out). Twenty questions of Spec-Bench, the
shortest of each kind in turn, 64 tokens each at T = 0 and 1; then a JSON schema in each of twelve requests. The target is that
of `make real`, SmolLM2-135M-Instruct. Drafts, where none are named, are trained for minutes: they are weak; what is compared
are counts. K is given, not advised: three drafted tokens, eight copied ones. Costs decide whether drafting pays. Only the
example (`examples/with_vllm.py`) asks that, at costs that are given, too: one request is cheap to draft for, eight are not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd

from analysis import diagnose
from analysis.loads.engine_answers import ask_xllamacpp
from analysis.loads.exports import write_exports
from analysis.loads.streamed import streamed_text
from benchmarks.engines import matrix
from benchmarks.engines.counts import FirstOccurrence, Rounds, decoded, read_answers, replayed
from benchmarks.engines.forecast import forecast
from benchmarks.engines.install import ENGINES, install, python_of
from benchmarks.engines.page import Compared, Summed, page, summed_table
from benchmarks.engines.structured import ask_schemas, table
from benchmarks.engines.vllm_server import answers_of, ask, started
from benchmarks.evidence import ROOT, machine
from benchmarks.real.folder import rows_of, stage, weights
from benchmarks.real.steps import model
from toolkit import ModelPair, config
from toolkit.decoding import Method, Sampling, decode
from toolkit.decoding.proposers import PromptLookupProposer
from toolkit.errors import InputError, answer_signals
from toolkit.files.atomic import read_json, write_json, write_text
from toolkit.metrics import request_counts
from toolkit.models.pair import resolve
from toolkit.types import Round

STEPS = ("install", "drafts", "vllm", "structured", "llamacpp", "example", "page")
TEMPERATURES = (0, 1)
DRAFTED, COPIED = 3, 8  # K of draft models, and of copies
COSTS = """model,batch,width,context,seconds
draft,1,1,0,.0002
draft,8,1,0,.001
target,1,1,0,.01
target,1,9,0,.0104
target,8,1,0,.01
target,8,9,0,.03
"""
KINDS = {"standalone": "separate"} | {
    name: name for name in matrix.KINDS
}  # of a step's drafts, as the matrix calls them
TRAINED = {  # where none is named: what it is trained with, and its folder
    "standalone": (("layers=3", "exports=[plain,gguf]"), "draft_plain"),
    "EAGLE-3": (("kind=eagle3",), "draft"),
    "DFlash": (("kind=dflash", "loss=cross_entropy"), "draft"),
}
SHARED = ["sampling.max_new_tokens=64", "prompts=jsonl"]


@dataclass(frozen=True)
class Work:
    """What the steps share: folders, the target, the drafts that were named, and the tokens of an answer."""

    folder: Path
    engines: Path
    data: Path
    target: Path
    gguf: Path | None
    drafts: dict[str, str]
    tokens: int
    questions: int

    @property
    def separate(self) -> str:
        """The separate draft. Raises InputError where none was named or trained."""
        if "standalone" not in self.drafts:
            raise InputError("expected a separate draft, got none: run the step drafts first, or --draft FOLDER")
        return self.drafts["standalone"]

    def answers(self, engine: str, draft: str, temperature: int) -> Path:
        return self.folder / f"{engine}-{draft}-{temperature}.jsonl"

    def check(self) -> None:
        """Note what the answers in the folder are of. Raises InputError where they are of something else."""
        path = self.folder / "settings.json"
        kept = read_json(path) if path.exists() else {}
        settings = {"target": str(self.target), "tokens": self.tokens, "questions": self.questions, **self.drafts}
        for name, value in settings.items():
            if kept.get(name, value) != value:
                raise InputError(
                    f"{self.folder} holds answers of another run ({name} was {kept[name]}, is {value}): expected --out FOLDER"
                )
        write_json(path, {**kept, **settings})

    def pages(self, draft: str) -> Path:
        """Where the /metrics pages lie that were read after each answer at T = 0."""
        return self.folder / f"vllm-{draft}-pages"

    def note(self, **seconds: float) -> None:
        """Add to the seconds that steps took."""
        path = self.folder / "seconds.json"
        kept = read_json(path) if path.exists() else {}
        write_json(path, {**kept, **{name: kept.get(name, 0) + value for name, value in seconds.items()}})


def main() -> None:
    """Run the steps, all of them or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)}; after install, engines; default: all"
    )
    parser.add_argument("--engines", type=Path, default=ROOT / "outputs" / "engines" / "env", help="their environments")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "engines", help="answers and the page")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "prompts", help="real questions")
    parser.add_argument("--target", help="a folder or GGUF file; default: that of make real")
    parser.add_argument("--draft", help="a separate draft with the target's whole vocabulary")
    parser.add_argument("--eagle3", help="a draft that reads the target's states")
    parser.add_argument("--dflash", help="a draft that gives blocks")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--questions", type=int, default=20)
    options = parser.parse_args()
    steps, engines = [[name for name in options.names if name in names] for names in (STEPS, ENGINES)]
    if options.names == ["forecast"]:
        if not (options.target and options.draft):
            parser.error("forecast: expected --target FILE.gguf and --draft FILE.gguf")
        return forecast(options.target, options.draft, options.out.resolve(), options.data, options.engines.resolve())
    if unknown := [name for name in options.names if name not in (*STEPS, *ENGINES)]:
        parser.error(f"expected steps among {', '.join(STEPS)}, or forecast alone, got {', '.join(unknown)}")
    if "install" in steps and engines:
        steps = [step for step in steps if step not in engines]
    steps = steps or list(STEPS)
    options.out.mkdir(parents=True, exist_ok=True)
    options.engines.mkdir(parents=True, exist_ok=True)
    if "install" in steps:
        for name in engines or ENGINES:
            started_at = perf_counter()
            install(name, options.engines)
            print(f"{name}: {ENGINES[name].package} in {options.engines / name}, {perf_counter() - started_at:.0f} s")
    if steps == ["install"]:
        return
    if options.target is None:
        model()
    source = Path(options.target or weights())
    target = resolve(str(source))
    named = {"standalone": options.draft, "EAGLE-3": options.eagle3, "DFlash": options.dflash}
    drafts_named = {name: str(Path(draft).resolve()) for name, draft in named.items() if draft}
    folders = options.out.resolve(), options.engines.resolve(), options.data
    gguf = source if source.suffix == ".gguf" else None
    work = Work(*folders, target, gguf, drafts_named, options.tokens, options.questions)
    work.check()
    if "drafts" in steps:
        drafts(work)
    path = work.folder / "drafts.json"
    work = replace(work, drafts={**(read_json(path) if path.exists() else {}), **work.drafts})
    work.check()
    serving = {"vllm": serve_vllm, "structured": serve_structured, "llamacpp": serve_llamacpp, "example": run_example}
    for name, step in serving.items():
        if name in steps:
            started_at = perf_counter()
            try:
                step(work)
            except InputError as error:  # what was counted is kept, and the page says what there is
                print(f"{name}: {error}")
            work.note(**{name: perf_counter() - started_at})
    if "page" in steps:
        write_page(work)


def drafts(work: Work) -> None:
    """Drafts for what was not named: three of the target's layers, and two that read its states; minutes each."""
    path = work.folder / "drafts.json"
    by_name = {**(read_json(path) if path.exists() else {}), **work.drafts}
    if missing := [name for name in TRAINED if name not in by_name]:
        words = [f"pair.target={work.target}", "pair.draft=null"]
        prompts = [f"prompts.path={work.data / 'instructions_train.jsonl'}", "prompts.split=train", "prompts.limit=256"]
        responses = stage("data_gen.responses", *words, *SHARED, *prompts, "batch_size=32", folder=work.folder)
        words += [f'responses=["{responses}"]', "vocabulary=8000", "teacher=cached", "trainer.max_epochs=4"]
        for name in missing:
            options, draft = TRAINED[name]
            by_name[name] = str(stage("toolkit.distill", *words, *options, folder=work.folder) / draft)
    write_json(path, by_name)


def prompts(work: Work) -> list[list[int]]:
    """Token ids of the questions, the shortest of each kind in turn; written once."""
    path = work.folder / "prompts.json"
    if not path.exists():
        rows = pd.DataFrame(rows_of(work.data / "spec_bench.jsonl"))
        rows = rows.assign(size=rows.messages.map(lambda messages: len(str(messages))))
        by_kind = rows.sort_values("size", kind="stable").groupby("category", sort=False)
        rows = rows.assign(turn=by_kind.cumcount()).sort_values(["turn", "size"], kind="stable")
        pair = ModelPair.from_pretrained(str(work.target))
        chosen = rows.messages.tolist()[: work.questions]
        write_json(path, [pair.encode(messages) for messages in chosen])
    sequences: list[list[int]] = read_json(path)
    return sequences


def vllm_config(work: Work, name: str) -> dict[str, Any]:
    """What vLLM is started with: of a draft model what the exports wrote."""
    if name == "lookup":
        return {"method": "ngram", "num_speculative_tokens": COPIED, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if name == "copies":
        source = "toolkit.integrations.vllm.Copies"
        return {"method": "custom_class", "model": source, "num_speculative_tokens": COPIED}
    folder = work.folder / "exports" / name
    folder.mkdir(parents=True, exist_ok=True)
    lengths = {1: DRAFTED}
    write_exports(folder, work.drafts[name], lengths, lengths, ["method=speculative"])
    config_of: dict[str, Any] = read_json(folder / "vllm.json")
    return config_of


def method_here(name: str) -> Method:
    """The same method here. Engines draft greedily."""
    if name == "lookup":
        method = config.method("prompt_lookup", [f"policy.num_drafted={COPIED}"])
        return replace(method, proposer=FirstOccurrence(max_ngram=3, min_ngram=1))
    if name == "copies":
        return config.method("lookup_rate", [f"max_drafted={COPIED}"])
    return config.method("speculative", [f"policy.num_drafted={DRAFTED}", "draft_temperature=0"])


def serve_vllm(work: Work) -> None:
    """Start vLLM once per draft and ask at both temperatures. One that fails is one line, and the next one is tried."""
    python, sequences = python_of("vllm", work.engines), prompts(work)
    for name in (*work.drafts, "lookup", "copies"):
        missing = [T for T in TEMPERATURES if len(answers_of(work.answers("vllm", name, T))) < len(sequences)]
        if not missing:
            continue
        options = ["--speculative-config", json.dumps(vllm_config(work, name))]
        print(f"vllm, {name}: starting", flush=True)
        try:
            with started(python, str(work.target), options, work.folder / f"vllm-{name}.log") as server:
                for temperature in missing:
                    path = work.answers("vllm", name, temperature)
                    pages = ask(server, sequences, float(temperature), work.tokens, path)
                    for number, text in enumerate(pages if temperature == 0 else []):
                        write_text(work.pages(name) / f"{number:03}.txt", text)
        except InputError as error:
            print(f"vllm, {name}: {error}")
            matrix.note(work.folder / "rows.csv", [matrix.row("vLLM", KINDS[name], f"refused: {error}")])


def serve_structured(work: Work) -> None:
    """vLLM with the separate draft and a JSON schema in every request."""
    print("vllm, structured: starting", flush=True)
    settings = vllm_config(work, "standalone")
    ask_schemas(python_of("vllm", work.engines), str(work.target), settings, work.answers("vllm", "structured", 0))


def serve_llamacpp(work: Work) -> None:
    """llama.cpp with the separate draft's GGUF file, greedily, in a process of its own."""
    python, sequences = python_of("llamacpp", work.engines), prompts(work)
    gguf = Path(work.separate).parent / "draft.gguf"
    path = work.answers("llamacpp", "standalone", 0)
    if work.gguf is None or not gguf.exists():
        raise InputError(f"llama.cpp reads GGUF files: expected --target FILE.gguf and {gguf}")
    print("llamacpp, standalone: starting", flush=True)
    settings = {"model": str(work.gguf), "source": "draft", "draft": str(gguf), "num_drafted": DRAFTED, "p_min": 0.0}
    settings |= {"max_tokens": work.tokens, "temperature": 0.0, "stream": True}
    ask_xllamacpp(python, settings, sequences, path)


def run_example(work: Work) -> None:
    """`examples/with_vllm.py` with the separate draft."""
    costs = write_text(work.folder / "example-costs.csv", COSTS)
    script, python = ROOT / "examples" / "with_vllm.py", python_of("vllm", work.engines)
    words = [python, work.target, work.separate, work.data / "spec_bench.jsonl"]
    words += [f"costs={costs}", f"paths.root_dir={work.folder}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if code := subprocess.run([sys.executable, str(script), *map(str, words)], cwd=ROOT, env=environment).returncode:
        raise InputError(f"it ended with {code}")


def write_page(work: Work) -> None:
    """Decode and replay here what was served, and write the page."""
    compared, watches, first = [], list[str](), perf_counter()
    for name in (*work.drafts, "lookup", "copies"):
        method, most = method_here(name), COPIED if name in ("lookup", "copies") else DRAFTED
        pair = ModelPair.from_pretrained(str(work.target), work.drafts.get(name))
        pair.costs = "assumed"
        for temperature in TEMPERATURES:
            path = work.answers("vllm", name, temperature)
            if not answers_of(path):
                continue
            answers = read_answers(path, most)
            sampling = Sampling(float(temperature), max_new_tokens=work.tokens - 1)
            rounds, tokens = decoded(pair, answers, method, sampling)
            replay = replayed(pair, answers, method, sampling, work.folder / "traces")
            why = diagnosis(work, name, path) if name in work.drafts else ""
            last = PromptLookupProposer(max_ngram=3, min_ngram=1) if name == "lookup" else None
            compared.append(Compared(f"vLLM, {name}", temperature, most, answers, replay, rounds, tokens, why, last))
            if temperature == 0:
                watches.append(f"- vLLM, {name}: {watch(work, name, rounds, most)}")
    sums = summed(work) if answers_of(work.answers("llamacpp", "standalone", 0)) else []
    tables = [
        "Has acceptance fallen below that of decoding here? (`analysis.diagnose counts=`, T = 0)",
        "\n".join(watches),
    ]
    if answers_of(schemas := work.answers("vllm", "structured", 0)):
        tables.append(table(str(work.target), work.separate, method_here("standalone"), DRAFTED, schemas))
    if sums:
        why = diagnosis(work, "standalone", work.answers("llamacpp", "standalone", 0))
        tables += [summed_table("llama.cpp, standalone", sums), f"- llama.cpp, standalone, T = 0: {why}."]
    matrix.note(work.folder / "rows.csv", rows(compared, sums))
    work.note(here=perf_counter() - first)
    minutes = ", ".join(
        f"{name} {seconds / 60:.0f}" for name, seconds in read_json(work.folder / "seconds.json").items()
    )
    versions = ", ".join(engine.package for engine in ENGINES.values())
    facts = [f"{versions}; {machine()}. Minutes: {minutes}.", f"{work.questions} questions, {work.tokens} tokens each."]
    path = write_text(work.folder / "page.md", page(compared, facts, tables))
    print(path.read_text("utf-8"))
    print(f"page: {path}; its rows for the table of engines: python -m benchmarks.engines.matrix {work.folder}")


def rows(compared: Sequence[Compared], sums: Sequence[Summed]) -> list[dict[str, str]]:
    """What was served, for the matrix of engines."""
    names = dict.fromkeys(each.name.removeprefix("vLLM, ") for each in compared)
    by_name = {name: [each for each in compared if each.name == f"vLLM, {name}"] for name in names}
    lines = [
        matrix.row("vLLM", KINDS[name], "served", "; ".join(each.counted() for each in some))
        for name, some in by_name.items()
    ]
    if sums:
        theirs, ours = (
            f"{sum(getattr(each, f'drafted{end}') for each in sums):,} drafted, "
            f"{sum(getattr(each, f'accepted{end}') for each in sums):,} accepted"
            for end in ("", "_here")
        )
        lines.append(matrix.row("llama.cpp", "separate", "served", f"sums: {theirs}; here {ours}"))
    return lines


def diagnosis(work: Work, name: str, path: Path) -> str:
    """The sentence of `analysis.diagnose` for an engine's answers, whose drafts are greedy at any temperature."""
    words = [f"responses={path}", f"pair.target={work.target}", f"pair.draft={work.drafts[name]}"]
    try:
        folder = diagnose.run(config.compose("diagnose", [*words, f"paths.root_dir={work.folder}"]))
    except InputError as error:  # too few rounds
        return f"no diagnosis ({error})"
    return str(read_json(folder / "diagnosis.json")["sentence"])


def watch(work: Work, name: str, rounds: Sequence[Rounds], most: int) -> str:
    """The sentence of `analysis.diagnose counts=` for the server's own pages, beside decoding the same questions here."""
    counts = [
        request_counts([Round(drafted, 1, kept, kept + 1, drafted == kept) for _, drafted, kept in several], most)
        for several in rounds
    ]
    lines = [{"metrics": {"speculative_decoding": each}} for each in counts]
    baseline = work.folder / f"here-{name}.jsonl"
    write_text(baseline, "".join(json.dumps(line) + "\n" for line in lines))
    pages = [str(path) for path in sorted(work.pages(name).glob("*.txt"))]
    words = [f"counts={json.dumps(pages)}", f"baseline={baseline}", f"paths.root_dir={work.folder}"]
    try:
        folder = diagnose.run(config.compose("diagnose", words))
    except InputError as error:  # an interrupted server, or too few texts
        return f"no watch ({error})"
    return str(read_json(folder / "diagnosis.json")["sentence"])


def summed(work: Work) -> list[Summed]:
    """llama.cpp's answers, each beside the same question decoded here after its first token."""
    pair = ModelPair.from_pretrained(str(work.target), work.separate)
    plain, method, questions = config.method("autoregressive"), method_here("standalone"), []
    answers = answers_of(work.answers("llamacpp", "standalone", 0))
    for prompt, answer in zip(prompts(work), answers, strict=False):
        first = decode(pair, [prompt], plain, Sampling(0.0, max_new_tokens=1))[0].token_ids
        own = decode(pair, [[*prompt, *first]], method, Sampling(0.0, max_new_tokens=work.tokens - 1))[0]
        drafted, accepted = (
            sum(getattr(each, name) for each in own.rounds) for name in ("num_drafted", "num_accepted")
        )
        text, timings = pair.text([*first, *own.token_ids], prompt), answer["timings"]
        counts = (timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))
        questions.append(Summed(streamed_text(answer["stream"]), *counts, text, drafted, accepted))
    return questions


if __name__ == "__main__":
    answer_signals()
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")

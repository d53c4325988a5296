"""python -m toolkit.decode method=NAME: decode prompts with one method.

Writes generations.jsonl (one line per prompt: tokens, their texts, counts, rounds), summary.json, and prints a table.
"""

from __future__ import annotations

if __name__ == "__main__":  # help and faults, before anything heavy is imported
    from toolkit.config.command_line import check_command_line

    check_command_line("decode")

import json
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from toolkit.config import commands, instantiate
from toolkit.decoding import decode
from toolkit.io import read_json, write_json, write_text
from toolkit.metrics import summarize
from toolkit.pair import ModelPair
from toolkit.stage import Stage, check_some_done, command, finished_stage, open_stage, prompt_files
from toolkit.types import Generation


def run(cfg: commands.Decode) -> Path:
    """Decode `cfg.prompts` with `cfg.method`; returns the output folder."""
    stage = finished_stage("decode", cfg, inputs=prompt_files(cfg)) or _decoded(cfg)
    for key, value in read_json(stage.folder / "summary.json").items():
        print(f"{key:24} {value:.4g}" if isinstance(value, float) else f"{key:24} {value}")
    facts = stage.manifest
    if facts.get("seconds"):
        rate = facts["num_tokens"] / facts["seconds"]
        print(
            f"{'tokens per second':24} {rate:.4g} (batch size {facts['batch_size']}, prompts read and first calls included)"
        )
    check_some_done(facts["num_failed"], facts["num_prompts"], facts["first_error"], stage.folder)
    return stage.folder


def _decoded(cfg: commands.Decode) -> Stage:
    """The work itself."""
    from tqdm.auto import tqdm

    method, sampling, pair = instantiate(cfg.method), instantiate(cfg.sampling), instantiate(cfg.pair)
    method.bind(pair)  # before anything is written
    prompts = instantiate(cfg.prompts).load()
    stage = open_stage("decode", cfg, inputs=prompt_files(cfg))
    if not stage.finished:
        started = perf_counter()
        with tqdm(total=len(prompts), desc=f"decode {method.name}", unit="prompt") as bar:
            generations = decode(
                pair,
                [prompt.content for prompt in prompts],
                method,
                sampling,
                batch_size=cfg.batch_size,
                on_finish=lambda _: bar.update(),
            )
        seconds = perf_counter() - started
        lines = [
            {**as_record(prompt.id, generation), "prompt": str(prompt.content), "pieces": _pieces(pair, generation)}
            for prompt, generation in zip(prompts, generations, strict=True)
        ]
        write_text(stage.folder / "generations.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        write_json(stage.folder / "summary.json", summarize(generations))
        errors = [g.error for g in generations if g.error is not None]
        facts: dict[str, Any] = {"num_prompts": len(prompts), "num_failed": len(errors), "batch_size": cfg.batch_size}
        facts |= {"seconds": seconds, "num_tokens": sum(len(g.token_ids) for g in generations)}
        stage.finish(**facts, first_error=errors[0] if errors else None)
    return stage


def as_record(prompt_id: str, generation: Generation) -> dict[str, Any]:
    """One line of generations.jsonl."""
    return {
        "id": prompt_id,
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "error": generation.error,
        "counts": asdict(generation.counts),
        "rounds": [asdict(r) for r in generation.rounds],
    }


def _pieces(pair: ModelPair, generation: Generation) -> list[str]:
    """The text of every token; a character that several tokens make up is shown as replacement characters."""
    if pair.tokenizer is None:
        return [f"#{token}" for token in generation.token_ids]
    return [str(pair.tokenizer.decode([token])) for token in generation.token_ids]


if __name__ == "__main__":
    command("decode", run)

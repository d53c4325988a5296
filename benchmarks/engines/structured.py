"""vLLM under JSON schemas, its counts beside decoding here. Both take their masks from llguidance.

vLLM's draft knows no grammar: of what it proposes the engine drops what the schema does not allow, and what comes after that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.tables.files import markdown
from benchmarks.engines.counts import read_answers
from benchmarks.engines.vllm_server import answers_of, ask, started
from benchmarks.grammar import SCHEMAS, TOKENS, Unmasked, requests
from toolkit import ModelPair, config
from toolkit.decoding import Method, Sampling, decode

BACKEND = {"backend": "guidance", "disable_any_whitespace": True}


def ask_schemas(python: Path, target: str, speculative: Mapping[str, Any], path: Path) -> None:
    """Start vLLM with a draft and ask for one answer per schema, greedily. Raises InputError."""
    pair, asked = ModelPair.from_pretrained(target), [request for _, request in requests(len(SCHEMAS))]
    if len(answers_of(path)) == len(asked):
        return
    options = ["--speculative-config", json.dumps(speculative), "--structured-outputs-config", json.dumps(BACKEND)]
    with started(python, target, options, path.with_suffix(".log")) as server:
        prompts, schemas = [pair.encode(each["messages"]) for each in asked], [each["grammar"] for each in asked]
        ask(server, prompts, 0.0, TOKENS, path, schemas)


def table(target: str, draft: str, chain: Method, most: int, path: Path) -> str:
    """vLLM's counts, and those of a chain of at most `most` tokens here: its mask on the target alone, and on both."""
    answers, pair = read_answers(path, most), ModelPair.from_pretrained(target, draft)
    pair.costs = "assumed"
    lines = [_line("vLLM", [a.token_ids for a in answers], [a.drafted for a in answers], [a.accepted for a in answers])]
    asked = [request for _, request in requests(len(SCHEMAS))]
    for name, method in {
        "the mask on the target alone": replace(chain, proposer=Unmasked()),
        "masks on both": chain,
        "best_source": config.method("best_source", ["draft_temperature=0"]),
    }.items():
        texts = decode(pair, asked, method, Sampling(0.0, max_new_tokens=TOKENS))
        drafted, accepted = (
            [[getattr(each, kind) for each in text.rounds] for text in texts]
            for kind in ("num_drafted", "num_accepted")
        )
        equal = sum(list(text.token_ids) == answer.token_ids for text, answer in zip(texts, answers, strict=True))
        line = _line(f"here, {name}", [text.token_ids for text in texts], drafted, accepted)
        lines.append({**line, "texts equal to vLLM's": f"{equal} of {len(texts)}"})
    return f"JSON schemas (`structured_outputs`), K = {most}, T = 0:\n\n{markdown(pd.DataFrame(lines).fillna(''))}"


def _line(
    name: str, texts: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]], accepted: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """A row of the table, of the lists of every text."""
    tokens, rounds = sum(map(len, texts)), sum(map(len, accepted))
    sums = {"drafted": sum(map(sum, drafted)), "accepted": sum(map(sum, accepted))}
    return {"counted by": name, "tokens": tokens, "rounds": rounds, **sums}

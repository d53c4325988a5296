"""python -m benchmarks.grammar: structured output of SmolLM2-135M, twelve schemas: what is certain, what drafts add, what fits.

    --texts 240     texts whose answers are parsed and validated by `jsonschema`, T = 1, in batches of 8; 0: none
    --prompts 2     prompts of each schema that every method decodes, batch 1, T = 0 and 1

Tokens per cost are counted: a round costs a target forward pass over its width and its draft forward passes, at the costs that
are measured here. Plain masked decoding, a token per forward pass, makes 1. Rows:

    forced          plain decoding, certain tokens ride along
    lookup_rate     copies of the text, and certain tokens
    K=2             two drafted tokens, and certain ones
    rate            the weights that ship, on the masked q
    best_source     copies or drafts
    K=2, q unmasked  the mask is the target's alone: as exact, and what it costs
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pandas as pd
from jsonschema import ValidationError, validate

from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import markdown, with_interval
from benchmarks.evidence import ROOT, machine
from benchmarks.real.folder import weights
from benchmarks.real.steps import SHIPPED, model
from toolkit import ModelPair, config
from toolkit.costs.kept import costs_here
from toolkit.costs.table import CostTable
from toolkit.decoding import ChainProposer, Method, Sampling, decode
from toolkit.decoding.proposers.base import DraftContext
from toolkit.errors import answer_signals
from toolkit.grammar import grammar_of
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import Generation, Proposal

TOKENS = 96
TEXTS = (
    "Anna Berg, 34, a nurse from Oslo, ordered two green lamps and a chair on 3 May; she paid 189 euros by card.",
    "The storm hit Lisbon on Friday evening. Twelve trees fell, nobody was hurt, and trains were late until Sunday.",
    "Please book a table for five at Luigi's tomorrow at 19:30, near the window, and remind me an hour before.",
)


SCHEMAS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("grammar_schemas.json").read_text("utf-8"))


class Unmasked(ChainProposer):
    """A chain whose draft knows no grammar."""

    def propose(self, context: DraftContext, policy: StoppingPolicy, state: State) -> tuple[Proposal, State]:
        return super().propose(replace(context, grammars=None), policy, state)


def requests(name: str, count: int) -> list[dict[str, Any]]:
    """Prompts of a schema, each with its grammar."""
    task, schema = SCHEMAS[name].values()
    fields = ", ".join(schema["properties"])
    return [
        {
            "messages": [
                {"role": "user", "content": f"{task} of this text as JSON with {fields}.\n\n{TEXTS[n % len(TEXTS)]}"}
            ],
            "grammar": schema,
        }
        for n in range(count)
    ]


def methods() -> dict[str, Method]:
    chain = config.method("speculative", ["policy.num_drafted=2"])
    return {
        "forced": config.method("autoregressive"), "lookup_rate": config.method("lookup_rate"), "K=2": chain,
        "rate": config.method("rate"), "best_source": config.method("best_source"),
        "K=2, q unmasked": replace(chain, proposer=Unmasked()),
    }  # fmt: skip


def cost(generation: Generation, table: CostTable) -> float:
    """What a text's rounds cost, in target forward passes over one token."""
    context = float(np.median(table.contexts))
    one, draft = table.target(1, context), table.draft(context)
    return sum((table.target(r.num_drafted + 1, context) + r.num_draft_calls * draft) / one for r in generation.rounds)


def certain(pair: ModelPair, generation: Generation, schema: dict[str, Any]) -> int:
    """How many of a text's tokens the mask left alone."""
    state, count = grammar_of(pair, Sampling(), schema), 0
    for token in generation.token_ids:
        if state is None:
            break
        count += state.forced is not None
        state = state.after(token)
    return count


def compared(pair: ModelPair, count: int, temperature: float, table: CostTable) -> tuple[pd.DataFrame, pd.DataFrame]:
    """By method tokens per cost and CPU seconds per token; by schema what is certain, and what was reached."""
    prompts = [(name, request) for name in SCHEMAS for request in requests(name, count)]
    bootstrap, lines, plain, reached = Bootstrap(), [], None, {}
    for name, method in methods().items():
        rows = []
        for number, (_, request) in enumerate(prompts):
            started = process_time()
            (text,) = decode(pair, [request], method, Sampling(temperature, max_new_tokens=TOKENS, seed=number))
            rows.append((len(text.token_ids), cost(text, table), process_time() - started, text))
        values = np.array([row[:3] for row in rows])
        plain = values if plain is None else plain
        speed = with_interval(*(float(end) for end in bootstrap.spread(values, lambda t: t[..., 0] / t[..., 1], "log")))
        times = bootstrap.spread(
            np.hstack([values, plain]), lambda t: (t[..., 2] / t[..., 0]) / (t[..., 5] / t[..., 3]), "log"
        )
        lines.append(
            {
                "method": name,
                "tokens per cost": speed,
                "CPU seconds per token, x forced": with_interval(*map(float, times)),
            }
        )
        for (schema, _), row in zip(prompts, rows, strict=True):
            reached.setdefault(schema, {}).setdefault(name, []).append(row)
        print(lines[-1], flush=True)
    shares = []
    for schema, by_method in reached.items():
        texts = [row[3] for row in by_method["forced"]]
        tokens = sum(len(each.token_ids) for each in texts)
        alone = sum(certain(pair, each, SCHEMAS[schema]["schema"]) for each in texts)
        speeds = {name: sum(r[0] for r in rows) / sum(r[1] for r in rows) for name, rows in by_method.items()}
        most = f"{tokens / max(tokens - alone, 1):.2f}"
        shares.append({"schema": schema, "certain": f"{alone} of {tokens}", "1 / (1 - share)": most,
                       **{name: f"{speeds[name]:.2f}" for name in ("forced", "rate", "best_source")}})  # fmt: skip
    return pd.DataFrame(lines), pd.DataFrame(shares)


def fitting(pair: ModelPair, count: int) -> str:
    """How many sampled texts fit their schema, parsed and validated by another library."""
    names = [*SCHEMAS]
    prompts: Sequence[dict[str, Any]] = [requests(names[n % len(names)], n // len(names) + 1)[-1] for n in range(count)]
    texts = decode(pair, prompts, config.method("autoregressive"), Sampling(max_new_tokens=TOKENS), batch_size=8)
    cut = invalid = 0
    for text, request in zip(texts, prompts, strict=True):
        if text.finish_reason == "length":
            cut += 1
            continue
        try:
            validate(json.loads(text.text), request["grammar"])
        except (ValueError, ValidationError):
            invalid += 1
    return f"{count} texts at T = 1: {invalid} invalid, {cut} cut at {TOKENS} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=240)
    parser.add_argument("--prompts", type=int, default=2)
    options = parser.parse_args()
    Path(ROOT / "outputs" / "real").mkdir(parents=True, exist_ok=True)
    model()
    pair = ModelPair.from_pretrained(str(weights()), str(SHIPPED), writable=False)
    table = costs_here(pair)[0][0]
    print(machine(), flush=True)
    if options.texts:
        print(fitting(pair, options.texts), flush=True)
    for temperature in (0.0, 1.0) if options.prompts else ():
        lines, shares = compared(pair, options.prompts, temperature, table)
        print(
            f"\nT = {temperature:g}, {len(SCHEMAS) * options.prompts} prompts\n\n{markdown(lines)}\n\n{markdown(shares)}\n"
        )


if __name__ == "__main__":
    answer_signals()
    main()

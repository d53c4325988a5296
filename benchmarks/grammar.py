"""python -m benchmarks.grammar: structured output of SmolLM2-135M, twelve schemas: what is certain, what drafts add, what fits.

    --texts 500     texts whose answers are parsed and validated by `jsonschema`, T = 1, in batches of 8; 0: none
    --prompts 60    prompts that every method decodes, of the schemas in turn, batch 1
    --target T --draft D --methods forced best_source --temperatures 0     another pair; some methods and temperatures

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

import llguidance
import llguidance.hf
import llguidance.torch
import numpy as np
import pandas as pd
import torch
from jsonschema import ValidationError, validate
from transformers import LogitsProcessor, LogitsProcessorList

from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import markdown, with_interval
from benchmarks.evidence import machine
from benchmarks.real.folder import FOLDER, weights
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
    "Version 2.4 of the reader opens large files in half the time; the price stays at 12 dollars a month. I like it.",
    "Our flight to Rome left Vienna on 2 June at 7:15 with 140 people on board, and my red suitcase stayed behind.",
)


SCHEMAS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("grammar_schemas.json").read_text("utf-8"))


class Unmasked(ChainProposer):
    """A chain whose draft knows no grammar."""

    def propose(self, context: DraftContext, policy: StoppingPolicy, state: State) -> tuple[Proposal, State]:
        return super().propose(replace(context, grammars=None), policy, state)


def requests(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Prompts of the schemas in turn: the schema's name, and the request with its grammar."""
    prompts = []
    for number in range(count):
        turn, at = divmod(number, len(SCHEMAS))
        name = [*SCHEMAS][at]
        task, schema = SCHEMAS[name].values()
        content = f"{task} of this text as JSON with {', '.join(schema['properties'])}.\n\n{TEXTS[turn % len(TEXTS)]}"
        prompts.append((name, {"messages": [{"role": "user", "content": content}], "grammar": schema}))
    return prompts


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


def compared(
    pair: ModelPair, count: int, temperature: float, table: CostTable, names: Sequence[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """By method tokens per cost and CPU seconds per token; by schema what is certain, and what was reached."""
    prompts = requests(count)
    bootstrap, lines, plain, reached = Bootstrap(), [], None, {}
    for name, method in ((name, method) for name, method in methods().items() if name in names):
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
        shown = {each: f"{speeds[each]:.2f}" for each in ("forced", "rate", "best_source") if each in speeds}
        shares.append({"schema": schema, "certain": f"{alone} of {tokens}", "1 / (1 - share)": most, **shown})
    return pd.DataFrame(lines), pd.DataFrame(shares)


class Masks(LogitsProcessor):
    """transformers' own greedy decoding under a grammar: llguidance's masks by its tokenizer and matcher alone."""

    def __init__(self, pair: ModelPair, schema: dict[str, Any], prompt_length: int):
        tokenizer: Any = pair.tokenizer
        reader = llguidance.hf.from_tokenizer(tokenizer, n_vocab=pair.vocab_size, eos_token=list(pair.end_ids))
        compact = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=compact)
        self.matcher, self.read = llguidance.LLMatcher(reader, grammar), prompt_length

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        for token in input_ids[0, self.read :].tolist():
            assert self.matcher.consume_token(token)
        self.read = input_ids.shape[1]
        bits = llguidance.torch.allocate_token_bitmask(1, scores.shape[-1])
        llguidance.torch.fill_next_token_bitmask(self.matcher, bits, 0)
        llguidance.torch.apply_token_bitmask_inplace(scores, bits)
        return scores


def equal_to_transformers(pair: ModelPair, count: int) -> str:
    """How many greedy texts are those of transformers with a processor of masks."""
    equal = 0
    for _, request in (prompts := requests(count)):
        (text,) = decode(pair, [request], config.method("autoregressive"), Sampling(0.0, max_new_tokens=TOKENS))
        prompt = torch.tensor([text.prompt_ids])
        masks = LogitsProcessorList([Masks(pair, request["grammar"], prompt.shape[1])])
        settings = {"do_sample": False, "max_new_tokens": TOKENS, "eos_token_id": list(pair.end_ids)}
        output = pair.target.generate(
            prompt, attention_mask=torch.ones_like(prompt), logits_processor=masks, **settings
        )
        equal += output[0, prompt.shape[1] :].tolist() == list(text.token_ids)
    return f"{equal} of {len(prompts)} greedy texts equal those of transformers with llguidance's masks"


def fitting(pair: ModelPair, count: int) -> str:
    """How many sampled texts fit their schema, parsed and validated by another library."""
    prompts = [request for _, request in requests(count)]
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
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--methods", nargs="+", choices=[*methods()], default=[*methods()])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    options = parser.parse_args()
    if options.target is None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        model()
    pair = ModelPair.from_pretrained(options.target or str(weights()), options.draft or str(SHIPPED), writable=False)
    table = costs_here(pair)[0][0]
    print(machine(), flush=True)
    if options.texts:
        print(fitting(pair, options.texts), flush=True)
        print(equal_to_transformers(pair, options.prompts), flush=True)
    for temperature in options.temperatures if options.prompts else ():
        lines, shares = compared(pair, options.prompts, temperature, table, options.methods)
        print(f"\nT = {temperature:g}, {options.prompts} prompts\n\n{markdown(lines)}\n\n{markdown(shares)}\n")


if __name__ == "__main__":
    answer_signals()
    main()

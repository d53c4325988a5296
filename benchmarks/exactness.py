"""Exactness on larger numbers than the tests use: distributions by enumeration, whole outputs by chi-square, greedy
by equality.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import perf_counter

import torch
from tqdm import tqdm

from data_gen.frozen import load_frozen
from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.metrics import total
from toolkit.testing import output_pvalue, random_heads, table_pair
from toolkit.verification import PathRule, get, names
from toolkit.verification.chain_enumeration import PrefixTables, chain_error, chain_outputs, expected_lengths

LEVEL = 0.01  # of all chi-square tests together (Bonferroni)


def methods() -> list[str]:
    """Every lossless method of conf/method/ with one text per row."""
    built = {name: config.method(name) for name in config.choices("method")}
    return [name for name, method in built.items() if method.lossless and method.beams is None]


def chain_distributions() -> str:
    """Chain rules by enumeration over all drafts: total variation of the emitted tokens from the target's distribution."""
    lines = [
        "| rule | V | K | random tables | largest total variation | expected length off its formula by |",
        "|---|---|---|---|---|---|",
    ]
    for name in [name for name in names() if isinstance(get(name), PathRule) and get(name).lossless]:
        for vocab_size, depth in ((2, 3), (3, 2), (3, 3), (4, 2), (5, 2)):
            distances, offsets = zip(
                *(_chain_distribution(name, vocab_size, depth, seed) for seed in range(20)), strict=True
            )
            lines.append(f"| {name} | {vocab_size} | {depth} | 20 | {max(distances):.1e} | {max(offsets):.1e} |")
    return "\n".join(lines)


def _chain_distribution(name: str, vocab_size: int, depth: int, seed: int) -> tuple[float, float]:
    """(total variation, error of the expected length) on one pair of random tables over prefixes, with zeros."""
    rule, tables = get(name), PrefixTables(vocab_size, depth, seed)
    by_token, by_block = expected_lengths(tables)
    expected = chain_outputs(rule, tables)[1]
    return chain_error(rule, tables), abs(expected - (by_token if name == "rejection" else by_block))


def whole_outputs() -> str:
    """Whole outputs of every lossless method against the exact distribution of all sequences of at most 4 tokens,
    by chi-square.
    """
    chosen = methods()
    tests = 2 * len(chosen)
    lines = [
        f"{tests} tests, level {LEVEL} for all together: each fails below {LEVEL / tests:.1e}. Runs: 100,000 in batches of "
        "5,000, and 5,000 one by one.",
        "",
        "| method | p-value, batched | p-value, one by one | verdict | seconds |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as heads:
        pair = table_pair()
        pair.head = str(random_heads(Path(heads), 3**2, 3))
        for name in tqdm(chosen, desc="whole outputs", unit="method"):
            started = perf_counter()
            batched = output_pvalue(pair, config.method(name), 100_000, 5_000, seed=1)
            single = output_pvalue(pair, config.method(name), 5_000, 1, seed=2)
            verdict = "exact" if min(batched, single) > LEVEL / tests else "REJECTED"
            lines.append(f"| {name} | {batched:.3f} | {single:.3f} | {verdict} | {perf_counter() - started:.0f} |")
    return "\n".join(lines)


def greedy_equals_target(count: int = 200) -> str:
    """Greedy output of every lossless method against greedy target output, token for token, in float32, on the toy pair."""
    pair = ModelPair.toy()
    prompts = [
        e.prompt for domain in ("instruct", "math", "code") for e in load_frozen(domain, "test")[: -(-count // 3)]
    ]
    prompts = prompts[:count]
    sampling = Sampling(temperature=0, max_new_tokens=96)
    reference = decode(pair, prompts, config.method("autoregressive"), sampling, batch_size=1)
    lines = [
        f"{count} prompts of three domains, at most 96 tokens, batches of 16. The reference is the target alone, one "
        "prompt at a time. Where a tie in float32 falls the other way, the smallest gap between the two logits is given.",
        "",
        "| method | equal | first difference, gap between the two largest logits |",
        "|---|---|---|",
    ]
    for name in config.choices("method"):
        method = config.method(name)
        if not method.lossless or (method.beams is not None and method.beams.selection == "top"):
            continue  # beam search looks for likelier texts than greedy decoding finds
        generations = decode(pair, prompts, config.method(name), sampling, batch_size=16)
        pairs = zip(reference, generations, strict=True)
        different = [(a, b) for a, b in pairs if a.token_ids != b.token_ids]
        gaps = ", ".join(f"{_gap(pair, a, b):.1e}" for a, b in different[:5])
        lines.append(f"| {name} | {count - len(different)} of {count} | {gaps or '-'} |")
    return "\n".join(lines)


@torch.inference_mode()
def _gap(pair: ModelPair, one, other) -> float:
    """Distance of the target's two largest logits where two texts part."""
    at = next(i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if a != b)
    logits = pair.target(torch.tensor([one.prompt_ids + one.token_ids[:at]])).logits[0, -1]
    top = logits.topk(2).values
    return float(top[0] - top[1])


def counting_identity() -> str:
    """num_drafted + num_target_calls = num_generated + num_discarded, on every generation of every method."""
    pair = ModelPair.toy()
    prompts = [e.prompt for domain in ("instruct", "math", "code") for e in load_frozen(domain, "test")[:20]]
    lines = [
        "60 prompts of three domains, T = 1 and T = 0, at most 7 and 64 tokens (so that the limit falls inside accepted runs).",
        "",
        "| method | generations | identity holds | ended by end of text | drafted + target calls = generated + discarded |",
        "|---|---|---|---|---|",
    ]
    for name in config.choices("method"):
        generations = []
        for temperature, limit in ((1.0, 64), (0.0, 64), (1.0, 7)):
            sampling = Sampling(temperature=temperature, max_new_tokens=limit)
            generations += decode(pair, prompts, config.method(name), sampling, batch_size=20)
        holds = [_identity(g.counts) for g in generations]
        ended = sum(g.finish_reason == "end" for g in generations)
        c = total(generations)
        sums = f"{c.num_drafted} + {c.num_target_calls} = {c.num_generated} + {c.num_discarded}"
        lines.append(f"| {name} | {len(holds)} | {sum(holds)} | {ended} | {sums} |")
    return "\n".join(lines)


def _identity(counts) -> bool:
    return counts.num_drafted + counts.num_target_calls == counts.num_generated + counts.num_discarded

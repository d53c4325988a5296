"""Is what a device computes right? Sessions, rules, decoding, the distribution of whole outputs: each as a named check."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.checks import Finding
from benchmarks.gpu_models import captures, capturing, refusals, tiny_pair
from benchmarks.plain_methods import SMALL_VOCABULARIES, every_method, fixed, named
from toolkit.decoding import Method, Sampling, decode
from toolkit.session import Session, open_session
from toolkit.session.capture import static_flow
from toolkit.testing import (
    VOCAB,
    ExpectedTree,
    Known,
    chi_square,
    difference,
    output_counts,
    ragged_prompts,
    random_heads,
    table_pair,
    tiny_model,
)
from toolkit.types import Generation
from toolkit.verification import LayerRule, PathRule, get, names
from toolkit.verification.schemes import candidates

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt_neox", "opt", "gpt2", "olmo2", "qwen3_moe")
LOGITS = 1e-4  # relative to the largest logit, float32 without TF32
DISTRIBUTIONS = 1e-12  # float64
LEVEL = 1e-4  # of each test of whole outputs
PASSES = 5  # after two a shape is captured, after two more its replays are trusted

Checks = dict[str, Callable[[], Finding]]


def checks(device: torch.device, quick: bool) -> Checks:
    """Everything this file can check, by name."""
    torch.backends.cuda.matmul.allow_tf32 = False
    pair, reference = tiny_pair(device), tiny_pair(torch.device("cpu"))
    heads = random_heads(Path(tempfile.mkdtemp(prefix="heads-")), 16, 16)
    prompts, limit = ragged_prompts(2 if quick else 5), 6 if quick else 24
    same = partial(decoding, capturing(pair), reference, prompts, Sampling(max_new_tokens=limit))
    runs = 3_000 if quick else 20_000
    outputs = {
        "speculative": fixed(3),
        "block": fixed(3, "block"),
        "specinfer": named("specinfer", proposer__k_config="2x2x1"),
    }
    return {
        **{f"session: {family}": partial(session, family, device) for family in FAMILIES},
        **{f"distribution: {name}": partial(distribution, name, device) for name in names()},
        **{f"decoding: {name}": partial(same, method) for name, method in every_method(heads).items()},
        **{f"outputs: {name}": partial(whole_outputs, device, method, runs) for name, method in outputs.items()},
    }


# -- sessions ---------------------------------------------------------------------------------------------------------


def session(family: str, device: torch.device) -> Finding:
    """A tiny model's tree-cached logits against its plain uncached runs, with and without captures."""
    model = tiny_model(family).to(device)
    known: Known = {}
    worst = _walk(model, open_session(model, 2, 64), known)
    found = f"off by {worst:.1e} of the largest logit"
    if not static_flow(model):
        return Finding(worst < LOGITS, f"{found}; routed, never captured")
    capturing_session = open_session(model, 2, 64, captures(device))
    replayed = 0.0
    for _ in range(PASSES):
        for row in range(2):
            capturing_session.reset(row)
        replayed = _walk(model, capturing_session, known)
    held: Any = capturing_session.captures  # type: ignore[attr-defined]
    trusted = sum(left == 0 for left in held.unproven.values())
    found += f", replayed by {replayed:.1e}; {trusted} of {len(held.known)} captured shapes trusted {held.refused}"
    good = max(worst, replayed) < LOGITS and trusted == len(held.known) > 0 and not held.refused
    return Finding(good, found.strip())


@torch.inference_mode()
def _walk(model: Any, session: Session, known: Known) -> float:
    """Ragged prompts, a tree, two nodes kept, another tree, one node kept, a chain: the largest difference anywhere."""
    device, generator = session.index.device, torch.Generator().manual_seed(1)
    prompts = torch.randint(3, VOCAB, (2, 11), generator=generator)
    expected = ExpectedTree([prompts[0].tolist(), prompts[1, 5:].tolist()])
    reading = session.extend(prompts.to(device), counts=[11, 6])
    worst = difference(model, reading.logits[:, 0], expected.contexts, known)
    for parents, kept in (
        ([[-1, -1, 0, 0, 3, 2], [-1, 0, 1, 0, -1, 4]], [[4, 5], [2, 3]]),
        ([[-1, 0, 2], [0, 1, 2]], [[4], [3]]),
    ):
        held = [len(nodes) for nodes in expected.nodes]
        tokens = torch.randint(3, VOCAB, (2, len(parents[0])), generator=generator)
        expected.add(tokens, torch.tensor(parents))
        reading = session.extend(tokens.to(device), parents=torch.tensor(parents, device=device), last=len(parents[0]))
        for node in range(len(parents[0])):
            texts = [expected.text(row, held[row] + node) for row in range(2)]
            worst = max(worst, difference(model, reading.logits[:, node], texts, known))
        ids = [expected.keep(row, kept[row]) for row in range(2)]
        if session.keep(torch.tensor(kept, device=device)).tolist() != ids:
            return float("inf")
    tail = torch.randint(3, VOCAB, (2, 3), generator=generator)
    reading = session.extend(tail.to(device), last=3)
    for i in range(3):
        texts = [context + tail[row, : i + 1].tolist() for row, context in enumerate(expected.contexts)]
        worst = max(worst, difference(model, reading.logits[:, i], texts, known))
    return worst


# -- distributions -------------------------------------------------------------------------------------------------------------


def distribution(name: str, device: torch.device, rows: int = 32) -> Finding:
    """A rule's distribution on the device against the same on the CPU, on random p and q in float64."""
    if name == SMALL_VOCABULARIES and importlib.util.find_spec("scipy") is None:
        return Finding(None, "needs scipy, which is not installed")
    arguments = _arguments(get(name), *((4, 6, 3) if name == SMALL_VOCABULARIES else (rows, 50, 4)))
    expected = _tensors(get(name).distribution(*arguments))
    got = _tensors(get(name).distribution(*(argument.to(device) for argument in arguments)))
    off = max(
        float((ours.cpu().double() - theirs.double()).abs().max()) for ours, theirs in zip(got, expected, strict=True)
    )
    return Finding(off <= DISTRIBUTIONS, f"off by {off:.1e}")


def _arguments(rule: Any, rows: int, vocab_size: int, depth: int) -> list[Tensor]:
    """Random arguments of a rule's distribution: p, q, candidates that could have been drawn; a width for layers of beams."""
    generator = torch.Generator().manual_seed(5)

    def distributions(*shape: int) -> Tensor:
        return (torch.randn(*shape, vocab_size, generator=generator, dtype=torch.float64) * 2).softmax(-1)

    uniforms = torch.rand(rows, depth, generator=generator, dtype=torch.float64)
    if isinstance(rule, PathRule):
        p, q = distributions(rows, depth + 1), distributions(rows, depth)
        return [p, q, candidates("independent", q, uniforms)[0]]
    p, q = distributions(rows), distributions(rows)
    tokens = candidates(rule.schemes[0], q, uniforms)[0]
    if isinstance(rule, LayerRule):
        return [p, q, tokens, torch.full((rows,), 2)]
    return [p, q.unsqueeze(1).expand(-1, depth, -1).contiguous(), tokens]


def _tensors(distribution: Any) -> list[Tensor]:
    """A distribution's tensors, of all its outcomes if it lists them."""
    return (
        [tensor for outcome in distribution for tensor in outcome]
        if isinstance(distribution, list)
        else list(distribution)
    )


# -- decoding ---------------------------------------------------------------------------------------------------------


def decoding(pair: Any, reference: Any, prompts: list[list[int]], sampling: Sampling, method: Method) -> Finding:
    """Tokens and counts of every round, captured on the device against uncaptured on the CPU, in float64.

    Norms and rotary tables are float32 even then: an acceptance draw within 1e-7 of its threshold may fall the other way.
    """
    expected = decode(reference, prompts, method, sampling, batch_size=1)
    differing = []
    for batch_size in (1, 4):
        decode(pair, prompts, method, sampling, batch_size=batch_size)  # captures what recurs
        got = decode(pair, prompts, method, sampling, batch_size=batch_size)
        differing += [
            f"batch {batch_size}: {parting}"
            for ours, theirs in zip(got, expected, strict=True)
            if (parting := _parting(ours, theirs))
        ]
        differing += [f"a capture was refused: {reason}" for reason in refusals(pair)]
    tokens = sum(len(generation.token_ids) for generation in expected)
    wanted = f"{len(prompts)} texts of {tokens} tokens at batch 1 and 4"
    return Finding(not differing, "; ".join([f"{len(differing)} of {2 * len(prompts)} differ", *differing[:2], wanted]))


def _parting(one: Generation, other: Generation) -> str:
    """Where two generations part; empty if they do not."""
    if one.error or other.error:
        return f"row {one.index}: {one.error or other.error}"
    for at, (ours, theirs) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
        if ours != theirs:
            return f"row {one.index} at token {at}"
    if one.token_ids == other.token_ids and one.counts == other.counts:
        return ""
    return f"row {one.index}: {one.counts} against {other.counts}"


def whole_outputs(device: torch.device, method: Method, runs: int) -> Finding:
    """All outputs of at most 4 tokens of a pair of tables against their exact distribution, by chi-square."""
    counts, expected = output_counts(table_pair(device), method, runs)
    if counts[-1] > 0:
        return Finding(False, f"{int(counts[-1])} outputs that cannot be")
    chance, distance = chi_square(counts, expected), float((counts - expected).abs().sum() / (2 * runs))
    return Finding(chance > LEVEL, f"p = {chance:.3g} (level {LEVEL:g}), total variation {distance:.4f}, {runs} runs")

"""Is what a device computes right, and is it kept busy? Each question is a named check.

Sessions, rules, decoding, the distribution of whole outputs. Then: no waiting while a draft grows, captures that are used
again, and what bfloat16 changes, which is reported and never fails.
"""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.checks import Finding
from benchmarks.decoders import captures, capturing, eager, held_sessions, refusals
from benchmarks.host_reads import no_host_reads, where
from toolkit.decoding import Method, Proposer, Sampling, TreeProposer, decode
from toolkit.engine import Session, open_session
from toolkit.engine.capture import static_flow
from toolkit.files.text import first_line
from toolkit.models.pair import ModelPair
from toolkit.stopping import Always, Fixed
from toolkit.testing import (
    VOCAB,
    ExpectedTree,
    Known,
    chi_square,
    difference,
    llama_pair,
    output_counts,
    ragged_prompts,
    random_heads,
    table_pair,
    tiny_eagle3,
    tiny_model,
)
from toolkit.types import Generation, Proposal
from toolkit.verification import LayerRule, PathRule, TreeRule, get, names
from toolkit.verification.schemes import candidates

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt_neox", "opt", "gpt2", "olmo2", "qwen3_moe")
LOGITS = 1e-4  # relative to the largest logit, float32 without TF32
DISTRIBUTIONS = 1e-12  # float64
LEVEL = 1e-4  # of each test of whole outputs
SMALL_VOCABULARIES = "importance_lp"  # a rule that is no method
UNDRAFTED = ("autoregressive", "beam_sampling", "beam_search", "mtjd", "mtjd_top")
PLAIN = Sampling(max_new_tokens=12)
EVERYTHING = replace(PLAIN, temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1)
CALLS = 4  # after two a shape is captured, after two more its replays are trusted
FEW = ("speculative", "rate", "mcsd", "speculative_beam")
LEAST = 4  # tokens of a round, whatever the policy says: the longer the draft, the more there is to wait for
PASSES = 5  # after two a shape is captured, after two more its replays are trusted

Checks = dict[str, Callable[[], Finding]]


def checks(device: torch.device, quick: bool) -> Checks:
    """Everything this file can check, by name."""
    torch.backends.cuda.matmul.allow_tf32 = False
    pair, reference = tiny_pair(device), tiny_pair(torch.device("cpu"))
    prompts, limit = ragged_prompts(2 if quick else 5), 6 if quick else 24
    same = partial(decoding, capturing(pair), reference, prompts, Sampling(max_new_tokens=limit))
    runs, tokens = (3_000, 16) if quick else (20_000, 96)
    specinfer = Method("specinfer", Always(), get("specinfer"), TreeProposer(k_config="2x2x1"), max_drafted=3)
    sequences = {"speculative": fixed(3), "block": fixed(3, "block"), "specinfer": specinfer}
    named: Checks = {
        **{f"session: {family}": partial(session, family, device) for family in FAMILIES},
        **{f"distribution: {name}": partial(distribution, name, device) for name in names()},
        **{f"outputs: {name}": partial(whole_outputs, device, method, runs) for name, method in sequences.items()},
        "captures are made and used again": partial(captured, pair),
        "a capture that fails": partial(failed_capture, device),
        "bfloat16, captured against eager": partial(bfloat16_captured, device, tokens),
        "bfloat16, speculative against autoregressive": partial(bfloat16_speculative, device, tokens),
    }
    if importlib.util.find_spec("hydra") is None:
        return {**named, "decoding: all methods": lambda: Finding(None, "needs hydra-core, which is not installed")}
    methods = every_method(random_heads(Path(tempfile.mkdtemp(prefix="heads-")), 16, 16))
    watched = FEW if quick else [name for name in methods if name not in UNDRAFTED]
    return {
        **named,
        **{f"decoding: {name}": partial(same, method) for name, method in methods.items()},
        **{
            f"decoding: {name}, draft reads the target's states": partial(reading_states, same, methods[name])
            for name in ("speculative", "mcsd", "best_source")
        },
        **{f"no waiting while drafting: {name}": partial(waiting, pair, methods[name]) for name in watched},
    }


def tiny_pair(device: torch.device) -> ModelPair:
    """Random Llamas in float64, the same numbers on every device."""
    return eager(llama_pair(device))


def reading_states(same: Callable[..., Finding], method: Method) -> Finding:
    """The same comparison with EAGLE-3 drafts instead of the pairs' own."""
    pair, reference, *rest = same.args  # type: ignore[attr-defined]
    pairs = [replace(old, draft=tiny_eagle3(old.target), drafts=()) for old in (pair, reference)]
    return decoding(capturing(pairs[0]), eager(pairs[1]), *rest, method)


def fixed(num_drafted: int, rule: str = "rejection") -> Method:
    """A fixed number of drafted tokens, verified by a rule for chains; 0 is the target alone."""
    if not num_drafted:
        return Method("autoregressive", Always(), get(rule), max_drafted=0)
    name = f"{rule} K={num_drafted}"
    return Method(name, Fixed(num_drafted), get(rule), min_drafted=1, max_drafted=num_drafted)


def every_method(heads: Path | str) -> dict[str, Method]:
    """The methods of conf/method/ by name; `heads` is a folder with both kinds of head for the pair's draft."""
    from toolkit import config

    methods = {name: config.method(name, head=str(heads)) for name in config.choices("method")}
    return {**methods, "specdec_pp lag=0": config.method("specdec_pp", ["policy.lag=0"], head=str(heads))}


# -- sessions ---------------------------------------------------------------------------------------------------------


def session(family: str, device: torch.device) -> Finding:
    """A tiny model's tree-cached logits against its plain uncached runs, with and without captures."""
    model = tiny_model(family).to(device)
    cached: Known = {}
    worst = _walk(model, open_session(model, 2, 64), cached)
    text = f"off by {worst:.1e} of the largest logit"
    if not static_flow(model):
        return Finding(worst < LOGITS, f"{text}; routed, never captured")
    capturing_session = open_session(model, 2, 64, captures(device))
    replayed = 0.0
    for _ in range(PASSES):
        for row in range(2):
            capturing_session.reset(row)
        replayed = _walk(model, capturing_session, cached)
    held: Any = capturing_session.captures  # type: ignore[attr-defined]
    trusted = sum(left == 0 for left in held.unproven.values())
    text += f", replayed by {replayed:.1e}; {trusted} of {len(held.known)} captured shapes trusted {'; '.join(held.refusals)}"
    good = max(worst, replayed) < LOGITS and trusted == len(held.known) > 0 and not held.refused
    return Finding(good, text.strip())


@torch.inference_mode()
def _walk(model: Any, session: Session, cached: Known) -> float:
    """Ragged prompts, a tree, two nodes kept, another tree, one node kept, a chain: the largest difference anywhere."""
    device, generator = session.index.device, torch.Generator().manual_seed(1)
    prompts = torch.randint(3, VOCAB, (2, 11), generator=generator)
    expected = ExpectedTree([prompts[0].tolist(), prompts[1, 5:].tolist()])
    reading = session.extend(prompts.to(device), counts=[11, 6])
    worst = difference(model, reading.logits[:, 0], expected.contexts, cached)
    for parents, keeps in (
        ([[-1, -1, 0, 0, 3, 2], [-1, 0, 1, 0, -1, 4]], [[4, 5], [2, 3]]),
        ([[-1, 0, 2], [0, 1, 2]], [[4], [3]]),
    ):
        held = [len(nodes) for nodes in expected.nodes]
        tokens = torch.randint(3, VOCAB, (2, len(parents[0])), generator=generator)
        expected.add(tokens, torch.tensor(parents))
        reading = session.extend(tokens.to(device), parents=torch.tensor(parents, device=device), last=len(parents[0]))
        for node in range(len(parents[0])):
            sequences = [expected.text(row, held[row] + node) for row in range(2)]
            worst = max(worst, difference(model, reading.logits[:, node], sequences, cached))
        ids = [expected.keep(row, keeps[row]) for row in range(2)]
        if session.keep(torch.tensor(keeps, device=device)).tolist() != ids:
            return float("inf")
    tail = torch.randint(3, VOCAB, (2, 3), generator=generator)
    reading = session.extend(tail.to(device), last=3)
    for i in range(3):
        sequences = [context + tail[row, : i + 1].tolist() for row, context in enumerate(expected.contexts)]
        worst = max(worst, difference(model, reading.logits[:, i], sequences, cached))
    return worst


# -- distributions -------------------------------------------------------------------------------------------------------------


def distribution(name: str, device: torch.device, rows: int = 32) -> Finding:
    """A rule's distribution on the device against the same on the CPU, on random p and q in float64."""
    if name == SMALL_VOCABULARIES and importlib.util.find_spec("scipy") is None:
        return Finding(None, "needs scipy, which is not installed")
    arguments = _arguments(get(name), *((4, 6, 3) if name == SMALL_VOCABULARIES else (rows, 50, 4)))
    expected, got = (
        _tensors(_distribution(get(name), [argument.to(where) for argument in arguments])) for where in ("cpu", device)
    )
    off = max(
        float((ours.cpu().double() - theirs.double()).abs().max()) for ours, theirs in zip(got, expected, strict=True)
    )
    return Finding(off <= DISTRIBUTIONS, f"off by {off:.1e}")


def _distribution(rule: Any, arguments: list[Tensor]) -> Any:
    """A rule's distribution; of a rule for trees that of chains from p, q and their tokens."""
    if not isinstance(rule, TreeRule):
        return rule.distribution(*arguments)
    p, q, tokens = arguments
    count = torch.full_like(tokens[:, 0], tokens.shape[1])
    return rule.distribution(Proposal(tokens, q, count, count), p)


def _arguments(rule: Any, rows: int, vocab_size: int, depth: int) -> list[Tensor]:
    """Random arguments of a rule's distribution: p, q, candidates that could have been drawn; a width for layers of beams."""
    generator = torch.Generator().manual_seed(5)

    def distributions(*shape: int) -> Tensor:
        return (torch.randn(*shape, vocab_size, generator=generator, dtype=torch.float64) * 2).softmax(-1)

    uniforms = torch.rand(rows, depth, generator=generator, dtype=torch.float64)
    if isinstance(rule, PathRule | TreeRule):
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
    differing, refused = list[str](), list[str]()
    for batch_size in (1, 4):
        if method.policy.couples_rows:  # a row's draft then depends on the rows beside it
            expected = decode(reference, prompts, method, sampling, batch_size=batch_size)
        decode(pair, prompts, method, sampling, batch_size=batch_size)  # captures what recurs
        got = decode(pair, prompts, method, sampling, batch_size=batch_size)
        differing += [
            f"batch {batch_size}: {how}"
            for ours, theirs in zip(got, expected, strict=True)
            if (how := _difference(ours, theirs))
        ]
        refused += [f"a capture was refused: {reason}" for reason in refusals(pair)]
    tokens = sum(len(generation.token_ids) for generation in expected)
    extent = f"{len(prompts)} texts of {tokens} tokens at batch 1 and 4"
    lines = [f"{len(differing)} of {2 * len(prompts)} differ", *differing[:2], *refused[:1], extent]
    return Finding(not differing and not refused, "; ".join(lines))


def _difference(ours: Generation, theirs: Generation) -> str:
    """How two generations differ; empty if they do not."""
    if ours.error or theirs.error:
        return f"row {ours.index}: {ours.error or theirs.error}"
    if (position := parting(ours.token_ids, theirs.token_ids)) is not None:
        return f"row {ours.index} at token {position}"
    if ours.token_ids == theirs.token_ids and ours.counts == theirs.counts:
        return ""
    return f"row {ours.index}: {ours.counts} against {theirs.counts}"


def whole_outputs(device: torch.device, method: Method, runs: int) -> Finding:
    """All outputs of at most 4 tokens of a pair of tables against their exact distribution, by chi-square."""
    counts, expected = output_counts(table_pair(device), method, runs)
    if counts[-1] > 0:
        return Finding(False, f"{int(counts[-1])} outputs that cannot be")
    prob, distance = chi_square(counts, expected), float((counts - expected).abs().sum() / (2 * runs))
    return Finding(prob > LEVEL, f"p = {prob:.3g} (level {LEVEL:g}), total variation {distance:.4f}, {runs} runs")


# -- how a device is kept busy --------------------------------------------------------------------------------------------


def waiting(pair: ModelPair, method: Method, sampling: Sampling | None = None) -> Finding:
    """Whether the host waits for the device between the start of a round's draft and its last token."""
    sampling = sampling or (EVERYTHING if method.beams is None else PLAIN)
    watch = Watch()
    method = replace(method, proposer=watched(method.proposer, watch), min_drafted=min(LEAST, method.max_drafted))
    pair, prompts = capturing(pair), ragged_prompts(2)
    for _ in range(CALLS):
        decode(pair, prompts, method, sampling, batch_size=len(prompts))
    watch.on = True
    try:
        decode(pair, prompts, method, sampling, batch_size=len(prompts))
    except RuntimeError as error:
        return Finding(False, f"waits at {where(error)} ({first_line(error)})")
    return Finding(watch.nodes > 0, f"never, over {watch.rounds} rounds of {watch.nodes} nodes in all")


@dataclass
class Watch:
    """Whether a proposer must not wait for the device from now on, and what it has proposed under that rule."""

    on: bool = False
    rounds: int = 0
    nodes: int = 0


def watched(proposer: Proposer, watch: Watch) -> Proposer:
    """The same proposer; it raises a RuntimeError where it waits while the watch is on."""

    class Watched(type(proposer)):  # type: ignore[misc]
        def propose(self, context: Any, policy: Any, state: Any) -> Any:
            if not watch.on:
                return super().propose(context, policy, state)
            with no_host_reads(context.limits.device):
                proposal, state = super().propose(context, policy, state)
            watch.rounds, watch.nodes = watch.rounds + 1, watch.nodes + proposal.tokens.shape[1]
            return proposal, state

    again = copy(proposer)
    object.__setattr__(again, "__class__", Watched)
    return again


def captured(pair: ModelPair) -> Finding:
    """After a call the captures hold shapes, none refused; later calls find the same caches and need no new ones."""
    pair, prompts, sampling = capturing(pair), ragged_prompts(4), Sampling(max_new_tokens=16)
    caches, shapes = [], []
    for _ in range(4):  # a shape that a call has once is captured by the second one
        decode(pair, prompts, fixed(4), sampling, batch_size=4)
        sessions = held_sessions(pair)
        caches.append([id(session) for session in sessions])
        shapes.append([len(session.captures.known) for session in sessions])
    refused = refusals(pair)
    good = not refused and caches[0] == caches[-1] != [] and min(shapes[-1]) > 0 and shapes[1] == shapes[-1]
    calls = ", then ".join(" and ".join(map(str, counts)) for counts in shapes)
    return Finding(good, f"target and draft shapes after each call: {calls}; refused: {', '.join(refused) or 'none'}")


def failed_capture(device: torch.device) -> Finding:
    """What a forward pass that cannot be captured leaves behind: stream, default generator, captures before and after it."""
    if device.type != "cuda":
        return Finding(None, "CUDA graphs alone can fail to capture")
    tensor, stream = torch.ones(2, 3, device=device), torch.cuda.current_stream(device)

    def double(inputs: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * inputs, inputs + 1

    def waits(inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs * inputs.sum().item(), inputs

    earlier, failing, later = captures(device), captures(device), captures(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        results = [
            held.run((2, 3), forward, [tensor])[0].sum().item()
            for held, forward in ((earlier, double), (failing, waits), (earlier, double), (later, double))
            for _ in range(PASSES)
        ]
    torch.rand(2, device=device)
    expected = [12.0] * PASSES + [36.0] * PASSES + [12.0] * 2 * PASSES
    good = results == expected and failing.refused and not earlier.refused and not later.refused
    good = good and torch.cuda.current_stream(device) == stream
    return Finding(
        good, f"{'; '.join(failing.refusals)}; captured before {len(earlier.known)}, after {len(later.known)}"
    )


# -- bfloat16: reported, never failed -----------------------------------------------------------------------------------


def bfloat16_captured(device: torch.device, tokens: int) -> Finding:
    """Where greedy texts of captured and uncaptured forwards part."""
    pair = eager(ModelPair.toy(str(device), "bfloat16"))
    return _divergence(pair, (capturing(pair), fixed(4)), (pair, fixed(4)), tokens)


def bfloat16_speculative(device: torch.device, tokens: int) -> Finding:
    """Where greedy texts of wide and of narrow forwards part."""
    pair = eager(ModelPair.toy(str(device), "bfloat16"))
    return _divergence(pair, (pair, fixed(4)), (pair, fixed(0)), tokens)


def _divergence(
    pair: ModelPair, first: tuple[ModelPair, Method], second: tuple[ModelPair, Method], tokens: int
) -> Finding:
    """Greedy texts of two ways to decode; the gap between the two largest logits where the first pair of texts parts."""
    prompts = [f"Q: Repeat {word} {count} times.\nA:" for word in ("coral", "amber") for count in (3, 5)]
    sampling = Sampling(temperature=0, max_new_tokens=tokens)
    for _ in range(3):  # captures what recurs
        ours, theirs = ([*decode(p, prompts, method, sampling, batch_size=4)] for p, method in (first, second))
    sequences = [(parting(a.token_ids, b.token_ids), a) for a, b in zip(ours, theirs, strict=True)]
    partings = [(position, text) for position, text in sequences if position is not None]
    total = sum(len(text.token_ids) for text in ours)
    if not partings:
        return Finding(None, f"no difference in {len(ours)} greedy texts of {total} tokens")
    at, text = min(partings, key=lambda entry: entry[0])
    gap = logit_gap(pair, text, at)
    return Finding(None, f"{len(partings)} of {len(ours)} texts part, the first at token {at}, logit gap {gap:.2g}")


@torch.inference_mode()
def logit_gap(pair: ModelPair, text: Generation, position: int | None) -> float:
    """Distance of the target's two largest logits before a token of a text; None: after its last one."""
    ids = torch.tensor([text.prompt_ids + text.token_ids[:position]], device=pair.device)
    top = pair.target(ids).logits[0, -1].float().topk(2).values
    return float(top[0] - top[1])


def parting(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The first position at which two texts differ; None if one is the beginning of the other."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((position for position, (a, b) in pairs if a != b), None)

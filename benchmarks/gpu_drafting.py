"""How a device is kept busy: no waiting while a draft grows, captures made and used again, what bfloat16 changes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.checks import Finding
from benchmarks.gpu_models import capturing, eager, held_sessions, refusals, tiny_pair
from benchmarks.host_reads import no_host_reads, where
from benchmarks.plain_methods import UNDRAFTED, every_method, fixed
from toolkit.decoding import Method, Proposer, Sampling, decode
from toolkit.lines import first_line
from toolkit.pair import ModelPair
from toolkit.testing import ragged_prompts, random_heads
from toolkit.types import Generation

PLAIN = Sampling(max_new_tokens=12)
EVERYTHING = replace(PLAIN, temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1)
CALLS = 4  # after two a shape is captured, after two more its replays are trusted
FEW = ("fixed K=8", "rate", "mcsd", "speculative_beam")
LEAST = 4  # tokens of a round, whatever the policy says: the longer the draft, the more there is to wait for

Checks = dict[str, Callable[[], Finding]]


def checks(device: torch.device, quick: bool) -> Checks:
    """Everything this file can check, by name."""
    pair = tiny_pair(device)
    heads = random_heads(Path(tempfile.mkdtemp(prefix="heads-")), 16, 16)
    methods = {"fixed K=8": fixed(8), **every_method(heads)}
    watched = FEW if quick else [name for name in methods if name not in UNDRAFTED]
    tokens = 16 if quick else 96
    return {
        **{f"no waiting while drafting: {name}": partial(waiting, pair, methods[name]) for name in watched},
        "captures are made and used again": partial(captured, pair),
        "bfloat16, captured against eager": partial(bfloat16_captured, device, tokens),
        "bfloat16, speculative against autoregressive": partial(bfloat16_speculative, device, tokens),
    }


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


# -- bfloat16: reported, never failed ---------------------------------------------------------------------------------


def bfloat16_captured(device: torch.device, tokens: int) -> Finding:
    """Where greedy texts of captured and uncaptured forwards part."""
    pair = eager(ModelPair.toy(str(device), "bfloat16"))
    return _divergence(pair, (capturing(pair), fixed(4)), (pair, fixed(4)), tokens)


def bfloat16_speculative(device: torch.device, tokens: int) -> Finding:
    """Where greedy texts of wide and of narrow forwards part."""
    pair = eager(ModelPair.toy(str(device), "bfloat16"))
    return _divergence(pair, (pair, fixed(4)), (pair, fixed(0)), tokens)


def _divergence(
    pair: ModelPair, one: tuple[ModelPair, Method], other: tuple[ModelPair, Method], tokens: int
) -> Finding:
    """Greedy texts of two ways to decode; the gap between the two largest logits where the first pair of texts parts."""
    prompts = [f"Q: Repeat {word} {count} times.\nA:" for word in ("coral", "amber") for count in (3, 5)]
    sampling = Sampling(temperature=0, max_new_tokens=tokens)
    for _ in range(3):
        ours, theirs = ([*decode(p, prompts, method, sampling, batch_size=4)] for p, method in (one, other))
    partings = [
        (at, a)
        for a, b in zip(ours, theirs, strict=True)
        if (at := next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y), None))
        is not None
    ]
    total = sum(len(generation.token_ids) for generation in ours)
    if not partings:
        return Finding(None, f"no difference in {len(ours)} greedy texts of {total} tokens")
    at, generation = min(partings, key=lambda parting: parting[0])
    gap = _gap(pair, generation, at)
    return Finding(None, f"{len(partings)} of {len(ours)} texts part, the first at token {at}, logit gap {gap:.2g}")


@torch.inference_mode()
def _gap(pair: ModelPair, generation: Generation, at: int) -> float:
    """Distance of the target's two largest logits before a token of a text."""
    ids = torch.tensor([generation.prompt_ids + generation.token_ids[:at]], device=pair.device)
    top = pair.target(ids).logits[0, -1].float().topk(2).values
    return float(top[0] - top[1])

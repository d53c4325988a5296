"""Seconds that stopping policies themselves take in a round: a head's forward, the policy's arithmetic. Measured live.

The method is ours. Every method decodes a few rounds at every batch size, in turn with the others, three times. Its policy is
called and timed, but its decisions are ignored. Every round drafts `DRAFTED` tokens, so a policy that would stop early is
timed as often as any other. The cost table's rounds were measured with fixed draft lengths (`analysis.loads.measured`), so the
seconds of `Fixed` are subtracted. The clock waits for the device before and after every call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from toolkit.decoding import Method, Sampling, decode
from toolkit.errors import InputError
from toolkit.load_cost import LoadCost, RuleSeconds
from toolkit.pair import ModelPair
from toolkit.stopping import Bounded, Fixed
from toolkit.stopping.base import State
from toolkit.types import Drafted, Generation, Judged, Step
from toolkit.verification import get

DRAFTED = 4
WARM_UP = 2  # rounds
REPEATS = 3  # of all policies, interleaved; the median counts, as the machine's speed changes
SETTLING = 2  # decodes that are not timed: forwards are captured
FIXED = ""  # the name of the fixed length that is subtracted: no method's

Decision = tuple[State, Tensor]
T = TypeVar("T")


def with_rules(
    costs: LoadCost,
    pair: ModelPair,
    methods: Mapping[str, Method],
    prompts: Sequence[Any],
    sampling: Sampling,
    batch_sizes: Sequence[int],
    num_rounds: int = 16,
) -> LoadCost:
    """The cost table with the seconds of these methods' policies. Methods that it has already are not measured again.

    methods     by name; chains
    num_rounds  timed rounds per method, batch size and repeat
    """
    missing = {name: method for name, method in methods.items() if name not in costs.rules}
    if not missing:
        return costs
    sizes = sorted(set(batch_sizes))
    ways = {FIXED: _like(None), **{name: _like(method) for name, method in missing.items()}}
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for size in sizes:
        endless = replace(pair, draft=None, end_ids=())
        asked = [prompts[number % len(prompts)] for number in range(size)]
        tokens = (WARM_UP + num_rounds) * (DRAFTED + 1)
        for _ in range(SETTLING):
            settled, _ = _decoded(endless, ways[FIXED], asked, sampling, tokens)
        made = max(len(one.token_ids) / len(one.rounds) for one in settled)  # per round, of the row that makes most
        tokens = math.ceil((WARM_UP + num_rounds) * made)
        for _, (name, way) in itertools.product(range(REPEATS), ways.items()):
            found.setdefault((name, size), []).append(_timed(endless, way, asked, sampling, tokens))
    seconds = {key: np.median(repeats, axis=0) for key, repeats in found.items()}  # per round, per drafted token
    rules = dict(costs.rules)
    for name in missing:
        beyond = [np.maximum(seconds[name, size] - seconds[FIXED, size], 0.0).tolist() for size in sizes]
        rules[name] = RuleSeconds(
            tuple(map(float, sizes)), tuple(one[0] for one in beyond), tuple(one[1] for one in beyond)
        )
    return replace(costs, rules=rules)


def per_round(begins: Sequence[float], drafts: Sequence[bool], observes: Sequence[float]) -> float:
    """Seconds of a policy's calls to `begin` and `observe`, per round [n].

    Of `begin`, only rounds in which it would draft count, or all rounds if it never would. Seconds are means, as a policy may
    plan for several rounds at once. A single call counts for at most ten times the median.
    """
    asked = np.array(begins)[np.array(drafts, dtype=bool)] if any(drafts) else np.array(begins)
    return sum(float(np.minimum(calls, 10 * np.median(calls)).mean()) for calls in (asked, np.array(observes)))


@dataclass
class Watch:
    """Seconds of every call: `begins` and `observes` once per round, `steps` once per drafted token.

    drafts  per round, whether the policy would draft
    """

    device: torch.device
    begins: list[float] = field(default_factory=list)
    drafts: list[bool] = field(default_factory=list)
    observes: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def call(self, into: list[float], function: Callable[[], T]) -> T:
        """The function's value; its seconds are noted."""
        started = self._now()
        value = function()
        into.append(self._now() - started)
        return value

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()


@dataclass(frozen=True)
class Watched(Bounded):
    """A policy that is called and timed. Its decisions are ignored, and drafting goes on."""

    watch: Watch = field(default_factory=lambda: Watch(torch.device("cpu")))

    def bind(self, pair: object) -> Watched:
        return replace(self, policy=self.policy.bind(pair))

    def within(self, max_drafted: int) -> Watched:
        return replace(self, policy=self.policy.within(max_drafted))

    def begin(self, live: Tensor, state: State) -> Decision:
        state, drafts = self.watch.call(self.watch.begins, lambda: self.policy.begin(live, state))
        self.watch.drafts.append(bool(drafts.any()))
        return state, torch.ones_like(live)

    def step(self, step: Step, state: State) -> Decision:
        state, go_on = self.watch.call(self.watch.steps, lambda: self.policy.step(step, state))
        return state, torch.ones_like(go_on)

    def read(self, step: Step, state: State) -> Decision:
        state, go_on = self.watch.call(self.watch.steps, lambda: self.policy.read(step, state))
        return state, torch.ones_like(go_on)

    def observe(self, proposal: Drafted, verdict: Judged, state: State) -> State:
        return self.watch.call(self.watch.observes, lambda: self.policy.observe(proposal, verdict, state))


# -- inside -----------------------------------------------------------------------------------------------------------


def _like(method: Method | None) -> Method:
    """The method, or a fixed length, with rounds of `DRAFTED` tokens."""
    found = Method("fixed", Fixed(DRAFTED), get("rejection")) if method is None else method
    return replace(found, min_drafted=0, max_drafted=DRAFTED)


def _timed(
    pair: ModelPair, method: Method, prompts: Sequence[Any], sampling: Sampling, tokens: int
) -> tuple[float, float]:
    """Seconds of a policy's calls per round that it would draft in, and per drafted token (median)."""
    _, watch = _decoded(pair, method, prompts, sampling, tokens)
    asked = 2 if method.policy.reads else 1
    steps = watch.steps[asked * DRAFTED * WARM_UP :]
    step = sum(float(np.median(steps[question::asked])) for question in range(asked))
    return per_round(watch.begins[WARM_UP:], watch.drafts[WARM_UP:], watch.observes[WARM_UP:]), step


def _decoded(
    pair: ModelPair, method: Method, prompts: Sequence[Any], sampling: Sampling, tokens: int
) -> tuple[list[Generation], Watch]:
    """All prompts side by side, so many tokens behind each, and the seconds of the policy's calls."""
    watch = Watch(pair.device)
    limit = replace(sampling, max_new_tokens=tokens, max_length=None, stop=())
    watched = replace(method, policy=Watched(method.policy, 0, DRAFTED, watch))
    found = decode(pair, prompts, watched, limit, batch_size=len(prompts))
    failed = next((one.error for one in found if one.error is not None), None)
    if failed is not None:
        raise InputError(
            f"the policies' own seconds are measured on {limit.max_new_tokens} tokens behind every prompt, and {failed}; "
            "expected shorter prompts, fewer rounds (rounds=N), or costs=FILE"
        )
    return found, watch

"""Replay stopping policies on a trace: the counts live decoding would have had, without decoding.

`replay` runs the policy objects of the live loop round after round, all texts at once; it serves every policy, those that
remember earlier rounds included. `replay_starts` asks a policy without memory once for every place a round could start
at; `sweep_levels` does that for many thresholds of one score. All three give the same counts.

A round that starts after s tokens drafts K of them. With r = how many are accepted before the first rejection behind s,
n = min(r, K) enter the text and one more follows, corrected (n < K) or bonus; the text's end cuts what is too much.

Shapes: T texts, P positions, S steps of the trace; B rows that draft at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.errors import InputError
from toolkit.stopping import Bounded, StoppingPolicy, Thresholded
from toolkit.stopping.base import State
from toolkit.trace import Trace
from toolkit.types import Counts

GROUP = 50  # policies walked together
Plain = Callable[["RecordedStep", int], bool]


@dataclass
class RecordedStep:
    """A DraftStep read from a trace: same names, for the statistics a policy may ask for."""

    trace: Trace
    depth: int
    index: Tensor  # [B] steps of the trace
    drawn: bool = True

    @property
    def tokens(self) -> Tensor | None:
        """y_k [B]."""
        return self.trace.tokens[self.index].long() if self.drawn else None

    @property
    def draft_prob(self) -> Tensor:
        """q_k(y_k), warped [B]."""
        return self.trace.draft_prob[self.index]

    @property
    def token_prob(self) -> Tensor:
        """Unwarped probability of y_k [B]."""
        return self.trace.token_prob[self.index]

    @property
    def entropy(self) -> Tensor:
        """Of the unwarped law [B], nats."""
        return self.trace.entropy[self.index]

    @property
    def top_probs(self) -> Tensor:
        """The two largest unwarped probabilities [B, 2]."""
        return self.trace.top_probs[self.index]

    @property
    def margin(self) -> Tensor:
        """Between them [B]."""
        return self.top_probs[:, 0] - self.top_probs[:, 1]

    @property
    def hidden(self) -> Tensor:
        """States [B, D] that produced q_k."""
        if self.trace.hidden is None:
            raise InputError("this trace holds no hidden states: record it with hidden=true, or with the policy's head")
        return self.trace.hidden[self.index].float()

    def estimate(self, name: str) -> Tensor:
        """The recorded logit of a head, about y_{k-1} [B]."""
        if name not in self.trace.estimates:
            held = ", ".join(self.trace.estimates) or "none"
            raise InputError(
                f"this trace holds no estimates of {name} (held: {held}); record it with heads={{{name}: FOLDER}}"
            )
        return self.trace.estimates[name][self.index]


@dataclass(frozen=True)
class RecordedEstimator:
    """Stands for a head whose logits are in the trace; `shift` is added to them."""

    name: str
    shift: float = 0.0

    def bind(self, pair: object) -> RecordedEstimator:
        """Nothing to load."""
        return self

    def read_prob(self, step: Any) -> Tensor:
        """P(y_{k-1} accepted) [B]."""
        return torch.sigmoid(step.estimate(self.name) + self.shift)


@dataclass(frozen=True)
class Geometry:
    """What follows from the coins alone, for a round that starts before position i (all [P]).

    run    accepted positions from i on, before the first rejected one or the text's end
    left   positions from i to the text's end
    room   how many tokens a round may draft there
    """

    run: Tensor
    left: Tensor
    room: Tensor

    @classmethod
    def of(cls, trace: Trace) -> Geometry:
        position = torch.arange(trace.num_positions)
        text = torch.repeat_interleave(torch.arange(trace.num_texts), trace.lengths())
        end = trace.text_first[1:][text]
        rejected = torch.where(trace.accepted, trace.num_positions, position)
        first_rejected = torch.minimum(rejected.flip(0).cummin(0).values.flip(0), end)
        produced = position - trace.text_first[:-1][text]
        room = (trace.room[text] - produced).clamp(min=0)
        return cls(first_rejected - position, end - position, room)


@dataclass
class Replayed:
    """Totals per text, and how often each round length came up.

    counts  name of `toolkit.types.Counts` -> [T]
    accepted [T, M + 1]  rounds of each text that accepted so many tokens
    lengths [M + 1] rounds that drafted so many tokens
    reached, passed [M]  rounds whose draft reached depth k with everything before accepted; whose k-th was accepted
    """

    counts: dict[str, NDArray[np.int64]]
    accepted: NDArray[np.int64]
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    reached: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    passed: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def total(self) -> Counts:
        """Over all texts."""
        return Counts(**{name: int(values.sum()) for name, values in self.counts.items()})


def step_at(trace: Trace, geometry: Geometry, starts: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Which step a round visits at `depth` (from 1): its index [B], and whether the recording reaches there [B]."""
    run = geometry.run[starts]
    ahead = depth - 1
    on_path = ahead <= run  # the first rejected position itself is a step on path
    place = starts + torch.minimum(run, torch.tensor(ahead))
    inside = ahead < geometry.left[starts]
    place = torch.minimum(place, starts + geometry.left[starts] - 1)
    behind = ahead - run - 1  # steps into the roll-out
    rolled = (behind >= 0) & (behind < trace.roll_length[place]) & ~trace.accepted[place]
    index = torch.where(on_path, place, trace.roll_first[place] + behind.clamp(min=0))
    exists = torch.where(on_path, inside, rolled)
    return torch.where(exists, index, 0), exists


def draft(
    trace: Trace, geometry: Geometry, starts: Tensor, policy: StoppingPolicy, state: State
) -> tuple[Tensor, Tensor, State]:
    """One round from each of `starts` [B]: tokens drafted [B], forwards paid for [B], the policy's state.

    Raises InputError if the policy can draft more than the trace was recorded for.
    """
    _check_limit(trace, policy.limit)
    drafting = policy.begin(len(starts), state, starts.device) & (geometry.room[starts] > 0)
    num_drafted, num_calls = torch.zeros_like(starts), torch.zeros_like(starts)
    depth = 0
    while bool(drafting.any()):
        depth += 1
        index, _ = step_at(trace, geometry, starts, depth)
        num_calls += drafting
        if policy.reads:
            new, go_on = policy.read(RecordedStep(trace, depth, index, drawn=False), state)  # type: ignore[arg-type]
            state, drafting = _frozen(new, state, drafting), drafting & go_on
        num_drafted += drafting
        new, go_on = policy.step(RecordedStep(trace, depth, index), state)  # type: ignore[arg-type]
        state = _frozen(new, state, drafting)
        following = step_at(trace, geometry, starts, depth + 1)[1]  # not behind an end of text, nor the length limit
        drafting = drafting & go_on & following & (geometry.room[starts] > depth)
    return num_drafted, num_calls, state


def replay(trace: Trace, policy: StoppingPolicy) -> Replayed:
    """Any policy, its memory included: every text's rounds one after another, all texts side by side."""
    geometry = Geometry.of(trace)
    texts = trace.num_texts
    sums = {name: torch.zeros(texts, dtype=torch.long) for name in Counts.__dataclass_fields__}
    width = trace.max_drafted + 1
    lengths, deepest = (torch.zeros(width, dtype=torch.long) for _ in range(2))
    histogram = torch.zeros(texts, width, dtype=torch.long)
    at = trace.text_first[:-1].clone()
    state = policy.init(texts, torch.device("cpu"))
    alive = at < trace.text_first[1:]
    while bool(alive.any()):
        starts = torch.where(alive, at, trace.text_first[:-1])
        num_drafted, num_calls, drafted_state = draft(trace, geometry, starts, policy, state)
        accepted = torch.minimum(num_drafted, geometry.run[starts])
        observed = policy.observe(_Sent(num_drafted), _Judged(accepted), drafted_state)  # type: ignore[arg-type]
        state = _frozen(observed, state, alive)
        produced = torch.minimum(accepted + 1, geometry.left[starts])
        _count(sums, alive, num_drafted, num_calls, produced)
        histogram[torch.arange(texts), accepted] += alive
        lengths += torch.bincount(num_drafted[alive], minlength=width)
        deepest += torch.bincount(torch.minimum(num_drafted, accepted + 1)[alive], minlength=width)
        at = torch.where(alive, at + produced, at)
        alive = at < trace.text_first[1:]
    counts = {name: value.numpy() for name, value in sums.items()}
    reached, passed = _from(deepest), _from(histogram.sum(0))
    return Replayed(counts, histogram.numpy(), lengths.numpy(), reached[1:].numpy(), passed[1:].numpy())


def replay_starts(trace: Trace, policy: StoppingPolicy) -> Replayed:
    """A policy without memory: asked once for every start, then walked."""
    _check_memoryless(policy)
    geometry = Geometry.of(trace)
    starts = torch.arange(trace.num_positions)
    state = policy.init(len(starts), torch.device("cpu"))
    num_drafted, num_calls, _ = draft(trace, geometry, starts, policy, state)
    return walk(trace, geometry, num_drafted.unsqueeze(0), num_calls.unsqueeze(0))[0]


def sweep_levels(
    trace: Trace, policy: Thresholded, levels: Sequence[float], min_drafted: int = 1, max_drafted: int | None = None
) -> list[Replayed]:
    """A threshold policy without memory at many levels: its scores are computed once, for every start and depth."""
    if policy.reads:
        raise InputError("sweep_levels: a policy that reads before it decides is replayed one setting at a time")
    _check_memoryless(policy)
    most = trace.max_drafted if max_drafted is None else max_drafted
    _check_limit(trace, most)
    geometry = Geometry.of(trace)
    found: list[Replayed] = []
    scores, possible = score_table(trace, geometry, policy, most)
    for group in torch.tensor(levels, dtype=scores.dtype).split(GROUP):
        lengths = first_below(scores, possible, group, min_drafted)
        found += walk(trace, geometry, lengths, lengths)
    return found


def score_table(trace: Trace, geometry: Geometry, policy: Thresholded, most: int) -> tuple[Tensor, Tensor]:
    """Scores after 1..M drafted tokens from every start [M, P], and how many tokens can be drafted there [P]."""
    starts = torch.arange(trace.num_positions)
    state = policy.init(len(starts), torch.device("cpu"))
    possible = torch.zeros_like(starts)
    scores = []
    for depth in range(1, most + 1):
        index, exists = step_at(trace, geometry, starts, depth)
        possible += exists & (geometry.room >= depth)
        state, score = policy.score(RecordedStep(trace, depth, index), state)  # type: ignore[arg-type]
        scores.append(score)
    return torch.stack(scores), possible


def first_below(scores: Tensor, possible: Tensor, levels: Tensor, min_drafted: int = 1) -> Tensor:
    """Tokens drafted [G, P] by policies that stop at the first score [M, P] below their level [G]."""
    lowest = scores.cummin(0).values
    lowest[: min_drafted - 1] = torch.inf
    most = torch.tensor(len(scores))
    return torch.stack([((lowest >= level).sum(0) + 1).minimum(most).minimum(possible) for level in levels])


def walk(trace: Trace, geometry: Geometry, num_drafted: Tensor, num_calls: Tensor) -> list[Replayed]:
    """From what G policies draft at every start [G, P] to their counts."""
    groups, positions, texts, width = *num_drafted.shape, trace.num_texts, trace.max_drafted + 1
    accepted = torch.minimum(num_drafted, geometry.run)
    produced = torch.minimum(accepted + 1, geometry.left)
    group, start, text = _rounds(trace, produced)
    cell = group * positions + start
    drafted, calls, accepted, produced = (
        values.reshape(-1)[cell] for values in (num_drafted, num_calls, accepted, produced)
    )
    columns = {
        "num_drafted": drafted,
        "num_draft_calls": calls,
        "num_target_calls": torch.ones_like(drafted),
        "num_generated": produced,
        "num_discarded": drafted + 1 - produced,
    }

    def summed(keys: Tensor, size: int, weights: Tensor | None = None) -> Tensor:
        weights = None if weights is None else weights.double()  # exact: far below 2^53
        return torch.bincount(group * size + keys, weights, minlength=groups * size).view(groups, size).long()

    counts = {name: summed(text, texts, values) for name, values in columns.items()}
    histogram = summed(text * width + accepted, texts * width).view(groups, texts, width)
    lengths, passed = summed(drafted, width), _from(summed(accepted, width))
    reached = _from(summed(torch.minimum(drafted, accepted + 1), width))
    return [
        Replayed(
            {name: values[i].numpy() for name, values in counts.items()},
            histogram[i].numpy(),
            lengths[i].numpy(),
            reached[i, 1:].numpy(),
            passed[i, 1:].numpy(),
        )
        for i in range(groups)
    ]


def _rounds(trace: Trace, produced: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rounds of G policies that produce `produced` [G, P] tokens from each start: their group, start and text."""
    groups = len(produced)
    at, ends = (edge.expand(groups, -1).clone() for edge in (trace.text_first[:-1], trace.text_first[1:]))
    group, text = (
        grid.clone() for grid in torch.meshgrid(torch.arange(groups), torch.arange(trace.num_texts), indexing="ij")
    )
    at, ends, group, text = (values.reshape(-1) for values in (at, ends, group, text))
    found = []
    while True:
        alive = at < ends
        at, ends, group, text = (values[alive] for values in (at, ends, group, text))
        if not len(at):
            break
        found.append((group, at, text))
        at = at + produced[group, at]
    return tuple(torch.cat(values) for values in zip(*found, strict=True))  # type: ignore[return-value]


def replay_plain(trace: Trace, go_on: Plain, max_drafted: int) -> Replayed:
    """A policy as a plain function of (step, depth) -> draft another?, called step by step. Slow, and easy to check."""
    _check_limit(trace, max_drafted)
    geometry = Geometry.of(trace)
    starts = torch.arange(trace.num_positions)
    num_drafted = torch.zeros_like(starts)
    for start in range(len(starts)):
        here = starts[start : start + 1]
        depth, most = 0, min(int(geometry.room[start]), max_drafted)
        while depth < most:
            index, exists = step_at(trace, geometry, here, depth + 1)
            if not bool(exists):
                break
            depth += 1
            if not go_on(RecordedStep(trace, depth, index), depth):
                break
        num_drafted[start] = depth
    return walk(trace, geometry, num_drafted.unsqueeze(0), num_drafted.unsqueeze(0))[0]


def with_recorded_heads(policy: StoppingPolicy, names: Mapping[str, str]) -> StoppingPolicy:
    """A bound policy with its head's estimator replaced by the recorded one; `names`: head folder -> name in the trace."""
    if isinstance(policy, Bounded):
        return Bounded(with_recorded_heads(policy.policy, names), policy.min_drafted, policy.max_drafted)
    estimator: Any = getattr(policy, "estimator", None)
    if estimator is None or not hasattr(estimator, "head"):
        return policy
    if estimator.head not in names:
        raise InputError(
            f"the trace holds no estimates of the head in {estimator.head} (held: {', '.join(names) or 'none'})"
        )
    if estimator.module is None:
        raise InputError("with_recorded_heads: bind the policy to a pair first")
    shift = estimator.module.log_w_rej if estimator.corrected else 0.0
    return replace(policy, estimator=RecordedEstimator(names[estimator.head], shift))  # type: ignore[type-var]


def _check_limit(trace: Trace, limit: int | None) -> None:
    if limit is None or limit > trace.max_drafted:
        raise InputError(
            f"the policy may draft {limit} tokens in a round, the trace was recorded for {trace.max_drafted}: "
            f"bound it by max_drafted={trace.max_drafted}, or record again"
        )


def _check_memoryless(policy: StoppingPolicy) -> None:
    if policy.remembers:
        raise InputError("this policy remembers earlier rounds: replay it round by round (`replay`)")


# -- inside -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sent:
    """What `observe` may ask of a Proposal."""

    num_drafted: Tensor

    @property
    def num_nodes(self) -> int:
        return int(self.num_drafted.max())


@dataclass(frozen=True)
class _Judged:
    """What `observe` may ask of a Verdict."""

    length: Tensor


def _count(sums: dict[str, Tensor], alive: Tensor, num_drafted: Tensor, num_calls: Tensor, produced: Tensor) -> None:
    sums["num_drafted"] += torch.where(alive, num_drafted, 0)
    sums["num_draft_calls"] += torch.where(alive, num_calls, 0)
    sums["num_target_calls"] += alive
    sums["num_generated"] += torch.where(alive, produced, 0)
    sums["num_discarded"] += torch.where(alive, num_drafted + 1 - produced, 0)


def _from(counts: Tensor) -> Tensor:
    """How many are at least k, from how many are k: [..., M + 1]."""
    return counts.flip(-1).cumsum(-1).flip(-1)


def _frozen(new: State, old: State, moving: Tensor) -> State:
    return {key: torch.where(moving.view(-1, *[1] * (value.dim() - 1)), value, old[key]) for key, value in new.items()}

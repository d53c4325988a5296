"""Replay stopping policies on a trace: the counts live decoding would have had, without decoding.

`replay` takes the shorter of two ways. `by_rounds` runs the policy objects of the live loop round after round, all texts at
once. It serves every policy, including those that remember earlier rounds. `by_starts` asks a policy without memory once for
every position where a round could start. `sweep_levels` does that for many thresholds of one score. All give the same counts.

A round that starts after s tokens drafts K of them. Let r be the number of tokens accepted before the first rejection after s.
Then n = min(r, K) enter the text. One more token follows: corrected if n < K, else bonus. Tokens after the text's end are cut.

Shapes: T texts, P positions, S steps of the trace; B rows that draft at a time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit import metrics
from toolkit.decoding.proposers import BestSourceProposer, ChainProposer
from toolkit.decoding.proposers.base import where_active
from toolkit.decoding.proposers.copying import CopyProposer
from toolkit.errors import InputError, warn
from toolkit.stopping import StoppingPolicy, Thresholded
from toolkit.stopping.base import State, check_obeyed
from toolkit.trace import Trace
from toolkit.trace.copies import Copies
from toolkit.trace.steps import Certain, Geometry, RecordedStep, check_recorded, cut_before, recorded_at, step_at
from toolkit.trace.trace import CutError
from toolkit.types import Counts, RoundCounts

GROUP = 50  # policies walked together


@dataclass
class Replayed:
    """Totals per text, and how often each round length came up.

    counts  name of `toolkit.types.Counts` -> [T]
    M is the most tokens of a round, certain ones that ride along included (`Trace.most_sent`).
    accepted [T, M + 1]  rounds of each text that accepted 0, 1, 2, ... tokens
    drafted [T, M + 1]  rounds of each text that drafted 0, 1, 2, ... tokens
    sources  "copy_rounds", "draft_rounds" -> [T], rounds that copied tokens, and that a draft model drafted in
    reached_lengths [T, M + 1]  the same, counting tokens up to and including the first rejected one, or up to the text's end
    lengths [M + 1]  rounds that drafted 0, 1, 2, ... tokens
    reached [M]  rounds whose draft reached depth k with everything before it accepted
    passed [M]  those of them whose k-th token was accepted
    """

    counts: dict[str, NDArray[np.int64]]
    accepted: NDArray[np.int64]
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    reached: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    passed: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    drafted: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    reached_lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    sources: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    @property
    def per_text(self) -> NDArray[np.float64]:
        """Every text's counts [T, counts], in the order of `Counts`."""
        return np.stack([self.counts[name] for name in Counts.__dataclass_fields__], axis=1).astype(np.float64)

    def cost(self, cost_ratio: float) -> NDArray[np.float64]:
        """What every text's forwards cost [T], in target-forward times."""
        draft_calls, target_calls = (self.counts[name] for name in ("num_draft_calls", "num_target_calls"))
        return metrics.cost(draft_calls.astype(np.float64), target_calls.astype(np.float64), cost_ratio)

    @property
    def total(self) -> Counts:
        """The counts over all texts."""
        return Counts(**{name: int(values.sum()) for name, values in self.counts.items()})


def check_replayed(policy: StoppingPolicy, trace: Trace | Copies, copies: Copies | None = None) -> None:
    """Raises InputError if a policy overrides a hook that rounds on a trace do not obey; `copies` as in `replay`."""
    proposer = CopyProposer if isinstance(trace, Copies) else ChainProposer if copies is None else BestSourceProposer
    check_obeyed(policy, proposer.obeys, f"a replay of {proposer.__name__}")


def draft(
    trace: Trace | Copies,
    geometry: Geometry,
    starts: Tensor,
    policy: StoppingPolicy,
    state: State,
    busy: Tensor | None = None,
    wanted: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor, State]:
    """One round from each of `starts` [B]: tokens drafted [B], forwards paid for [B], the policy's state.

    Certain tokens are drafted without asking the policy; those that ride along after the drafted ones do not count here.
    A policy that reads nothing of a draft goes on past a cut, as if no end of text had been drafted there.

    busy    [B] bool: slots that hold a text; the others draft nothing. None: all do
    wanted  hears after which positions the policy would go on past a cut; the round ends there. None: CutError is raised
    Raises InputError if the policy can draft more than the trace was recorded for.
    """
    if isinstance(trace, Copies):
        return trace.draft(starts, policy, state, busy)
    _check_limit(trace, policy.limit)
    room = geometry.room[starts].clamp(max=policy.limit)  # in certain tokens, too
    live = room > 0
    live = live if busy is None else live & busy
    state, begins = policy.begin(live, geometry.in_context(policy, state, starts))
    drafting = begins & live
    num_drafted, num_calls = torch.zeros_like(starts), torch.zeros_like(starts)
    cut, depth, past = geometry.cut, 0, torch.zeros_like(drafting)
    reads_all = trace.certain is None or trace.run is not None  # certain tokens, too
    while bool(drafting.any()):
        depth += 1
        index, _ = recorded_at(trace, geometry, starts, depth)
        asked = drafting if trace.certain is None else drafting & ~trace.certain[index]
        if depth == 1 or not trace.blocks:
            num_calls += drafting if reads_all else asked
        if policy.reads:
            new, go_on = policy.read(RecordedStep(trace, depth, index, drawn=False), state)
            state, drafting, asked = where_active(new, state, asked), drafting & (go_on | ~asked), asked & go_on
            if not bool(drafting.any()):
                break
        num_drafted += drafting
        new, go_on = policy.step(RecordedStep(trace, depth, index, live=drafting), state)
        state = where_active(new, state, asked)
        # Not after an end of text, nor beyond the length limit.
        _, following = recorded_at(trace, geometry, starts, depth + 1)
        drafting = drafting & (go_on | ~asked) & (room > depth)
        if cut is not None and (policy.needs_draft_model or trace.certain is not None):
            past |= drafting & cut[starts] & ~following
        elif cut is not None:
            following = following | cut[starts]
        drafting = drafting & following
    if cut is not None:
        past_cut = cut_before(geometry, starts, past)
        check_recorded([past_cut]) if wanted is None else wanted.append(past_cut)
    return policy.sent(num_drafted, state), num_calls, state


def replay(trace: Trace | Copies, policy: StoppingPolicy, copies: Copies | None = None) -> Replayed:
    """Replay a bound policy: what its rounds count on every text of a trace, or on texts that it copies from alone.

    copies  of a policy that chooses between sources: what it may copy along the trace's texts
    Raises InputError for a policy that needs what the trace does not hold.
    """
    if isinstance(trace, Copies) or copies is not None or policy.uses_history or policy.reads_matches:
        return by_rounds(trace, policy, copies)
    return by_starts(trace, policy)


def past_cuts(trace: Trace, policy: StoppingPolicy) -> Tensor:
    """The positions [n] after which a bound policy would go on past a cut; without memory it is asked from every start."""
    try:
        replay(trace, policy)
    except CutError as error:
        return error.positions
    return torch.zeros(0, dtype=torch.long)


def by_rounds(trace: Trace | Copies, policy: StoppingPolicy, copies: Copies | None = None) -> Replayed:
    """Replay any policy, its memory included: every text's rounds one after another, all texts side by side."""
    return _counted(trace, list(replay_rounds(trace, policy, copies)))


def carried(trace: Trace, policy: StoppingPolicy) -> tuple[Replayed, State]:
    """Replay a policy whose state goes on from text to text, in the order of the recording; and the state after the last."""
    rounds, generator = [], replay_rounds(trace, policy, in_turn=True)
    while True:
        try:
            rounds.append(next(generator))
        except StopIteration as end:
            return _counted(trace, rounds), end.value


def _counted(trace: Trace | Copies, rounds: Sequence[tuple[Tensor, ...]]) -> Replayed:
    text, _, *counts = (torch.cat(values) for values in zip(*rounds, strict=True))
    return tally(trace.num_texts, trace.most_sent + 1, 1, torch.zeros_like(text), text, *counts)[0]


def replay_rounds(
    trace: Trace | Copies, policy: StoppingPolicy, copies: Copies | None = None, in_turn: bool = False
) -> Generator[tuple[Tensor, ...], None, State]:
    """The n-th rounds of all texts that have n rounds: text, start, drafted, forwards, accepted, produced, each [B].

    in_turn  one row has all texts, one after another, and so its state is carried on; the last state is returned
    A position's acceptance draw counts only where the draft model drafts there; a copied token is accepted iff the text has it.
    Raises InputError for a policy that decides on copied tokens without these; at last CutError, if it goes on past cuts.
    """
    _check_alone(policy)
    if policy.reads_matches and copies is None and isinstance(trace, Trace):
        raise InputError("this policy decides on copied tokens, and a recording holds none: expected the texts with it")
    check_replayed(policy, trace, copies)
    geometry = trace.geometry if isinstance(trace, Copies) else Geometry.of(trace)
    where = geometry if copies is None else copies.geometry  # old recordings do not tell contexts
    _say_what_contexts_lack(policy, where)
    first, end = trace.text_first[:-1], trace.text_first[1:]
    if in_turn:
        first, end = first[:1], end[-1:]
    at, state, wanted = first.clone(), policy.init(len(first), torch.device("cpu")), list[Tensor]()
    while bool((alive := at < end).any()):
        starts = torch.where(alive, at, first).clamp(max=trace.num_positions - 1)
        before = state = where.in_context(policy, state, starts)
        if copies is not None:
            room = torch.where(alive, geometry.room[starts], 0).clamp(max=policy.limit)
            num_copied, agreeing, before = copies.round(starts, room, policy, state, room > 0)
        num_drafted, num_calls, drafted_state = draft(trace, geometry, starts, policy, before, alive, wanted)
        accepted = torch.minimum(num_drafted, geometry.run[starts])
        certain = certain_of(trace, geometry, starts, num_drafted)
        if copies is not None:
            by_draft = num_calls > 0
            if certain is not None:
                certain = certain.where(by_draft, copies.certain(starts, num_copied))
            num_drafted = torch.where(by_draft, num_drafted, num_copied)
            accepted = torch.where(by_draft, accepted, agreeing)
        counts = RoundCounts(num_drafted, num_calls, accepted)
        if certain is not None:
            accepted = torch.where(accepted == num_drafted, accepted + certain.after, accepted)
            sent, own = certain.drafted + certain.after, num_drafted - certain.drafted
            counts = RoundCounts(own, num_calls, accepted - certain.kept, sent, certain.kept)
            num_drafted = num_drafted + certain.after
        observed = policy.observe(counts, counts, drafted_state)
        state = where_active(observed, state, alive)
        produced = torch.minimum(accepted + 1, geometry.left[starts])
        text = torch.searchsorted(trace.text_first, starts, right=True) - 1
        columns = (text, starts, num_drafted, num_calls, accepted, produced)
        yield tuple(values[alive] for values in columns)
        at = torch.where(alive, at + produced, at)
    check_recorded(wanted)
    return state


def by_starts(trace: Trace, policy: StoppingPolicy) -> Replayed:
    """Replay a policy without memory: it is asked once for every start, and its rounds are walked then."""
    _check_memoryless(policy)
    _check_alone(policy)
    check_replayed(policy, trace)
    geometry = Geometry.of(trace)
    _say_what_contexts_lack(policy, geometry)
    starts = torch.arange(trace.num_positions)
    state = policy.init(len(starts), torch.device("cpu"))
    num_drafted, num_calls, _ = draft(trace, geometry, starts, policy, state)
    certain = certain_of(trace, geometry, starts, num_drafted)
    sent = num_drafted if certain is None else num_drafted + certain.after
    return walk(trace, geometry, sent.unsqueeze(0), num_calls.unsqueeze(0))[0]


def certain_of(trace: Trace | Copies, geometry: Geometry, starts: Tensor, num_drafted: Tensor) -> Certain | None:
    """The certain tokens of rounds from `starts` [B] that draft or copy so many [B]; None: there is no grammar."""
    if isinstance(trace, Copies):
        return trace.certain(starts, num_drafted)
    return Certain.of(trace, geometry, starts, num_drafted)


def sweep_levels(
    trace: Trace, policy: Thresholded, levels: Sequence[float], min_drafted: int = 1, max_drafted: int | None = None
) -> list[Replayed]:
    """Replay a threshold policy without memory at many levels: its scores are computed once, for every start and depth."""
    if policy.reads:
        raise InputError("sweep_levels: a policy that reads before it decides is replayed one setting at a time")
    _check_memoryless(policy)
    check_obeyed(policy, ("begin", "step"), "sweep_levels")
    most = trace.max_drafted if max_drafted is None else max_drafted
    _check_limit(trace, most)
    geometry = Geometry.of(trace)
    counted: list[Replayed] = []
    scores, possible = score_table(trace, geometry, policy, most)
    for group in torch.tensor(levels, dtype=scores.dtype).split(GROUP):
        lengths = first_below(scores, possible, group, min_drafted)
        counted += walk(trace, geometry, lengths, trace.calls(lengths))
    return counted


def visits(trace: Trace, geometry: Geometry, most: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Depth 1..M, the step [P] that a round from each start visits there, and whether it can be drafted [P]."""
    starts = torch.arange(trace.num_positions)
    for depth in range(1, most + 1):
        index, exists = step_at(trace, geometry, starts, depth)
        yield depth, index, exists & (geometry.room >= depth)


def score_table(trace: Trace, geometry: Geometry, policy: Thresholded, most: int) -> tuple[Tensor, Tensor]:
    """Scores after 1..M drafted tokens from every start [M, P], and how many tokens can be drafted there [P]."""
    check_no_grammar(trace, "a sweep of levels")
    state = policy.init(trace.num_positions, torch.device("cpu"))
    state, begins = policy.begin(geometry.room > 0, state)
    possible = torch.zeros(trace.num_positions, dtype=torch.long)
    scores = []
    for depth, index, can_draft in visits(trace, geometry, most):
        possible += can_draft & begins
        state, score = policy.score(RecordedStep(trace, depth, index), state)
        scores.append(score)
    return torch.stack(scores), possible


def first_below(scores: Tensor, possible: Tensor, levels: Tensor, min_drafted: int = 1) -> Tensor:
    """Tokens drafted [G, P] by policies that stop at the first score [M, P] below their level [G]."""
    heard = scores.clone()
    heard[: min_drafted - 1] = torch.inf  # what is scored before the bound is not asked, then or later
    lowest = heard.cummin(0).values
    most = torch.tensor(len(scores))
    return torch.stack([((lowest >= level).sum(0) + 1).minimum(most).minimum(possible) for level in levels])


def walk(trace: Trace, geometry: Geometry, num_drafted: Tensor, num_calls: Tensor) -> list[Replayed]:
    """The counts of G policies, from what they draft at every start [G, P]."""
    groups, positions = num_drafted.shape
    accepted = torch.minimum(num_drafted, geometry.run)
    produced = torch.minimum(accepted + 1, geometry.left)
    at, ends = (edge.expand(groups, -1).reshape(-1) for edge in (trace.text_first[:-1], trace.text_first[1:]))
    each = torch.meshgrid(torch.arange(groups), torch.arange(trace.num_texts), indexing="ij")
    group, text = (grid.reshape(-1) for grid in each)
    rounds = []  # group, start and text
    while bool((alive := at < ends).any()):
        at, ends, group, text = (values[alive] for values in (at, ends, group, text))
        rounds.append((group, at, text))
        at = at + produced[group, at]
    group, start, text = (torch.cat(values) for values in zip(*rounds, strict=True))
    round_of = group * positions + start
    visited = (values.reshape(-1)[round_of] for values in (num_drafted, num_calls, accepted, produced))
    return tally(trace.num_texts, trace.most_sent + 1, groups, group, text, *visited)


def tally(
    num_texts: int,
    width: int,
    groups: int,
    group: Tensor,
    text: Tensor,
    drafted: Tensor,
    calls: Tensor,
    accepted: Tensor,
    produced: Tensor,
) -> list[Replayed]:
    """The totals of `groups` policies from all their rounds, one entry each: whose, of which text, and its counts.

    num_texts  T;  width  M + 1
    """
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

    def by_text(lengths: Tensor) -> Tensor:
        return summed(text * width + lengths, num_texts * width).view(groups, num_texts, width)

    counts = {name: summed(text, num_texts, values) for name, values in columns.items()}
    by_source = {name: summed(text, num_texts, values) for name, values in sources_of(drafted, calls).items()}
    histogram, drafts, reached_lengths = (by_text(n) for n in (accepted, drafted, torch.minimum(drafted, produced)))
    lengths, passed, reached = drafts.sum(1), _from(histogram.sum(1)), _from(reached_lengths.sum(1))
    return [
        Replayed(
            {name: values[i].numpy() for name, values in counts.items()},
            histogram[i].numpy(),
            lengths[i].numpy(),
            reached[i, 1:].numpy(),
            passed[i, 1:].numpy(),
            drafts[i].numpy(),
            reached_lengths[i].numpy(),
            {name: values[i].numpy() for name, values in by_source.items()},
        )
        for i in range(groups)
    ]


def sources_of(drafted: Tensor, calls: Tensor) -> dict[str, Tensor]:
    """Which rounds [n] copied tokens, and which a draft model drafted in, by what they drafted and paid for."""
    return {"copy_rounds": (calls == 0) & (drafted > 0), "draft_rounds": calls > 0}


def _from(counts: Tensor) -> Tensor:
    """How many are at least k, from how many are k: [..., M + 1]."""
    return counts.flip(-1).cumsum(-1).flip(-1)


def check_no_grammar(trace: Trace, caller: str) -> None:
    """Raises InputError for a recording under a grammar, whose certain tokens the caller does not know."""
    if trace.certain is not None:
        raise InputError(f"{caller}: expected a recording without a grammar; `replay` takes one")


def _check_limit(trace: Trace, limit: int | None) -> None:
    if limit is None or limit > trace.max_drafted:
        raise InputError(
            f"the policy may draft {limit} tokens in a round, the trace was recorded for {trace.max_drafted}: "
            f"bound it by max_drafted={trace.max_drafted}, or record again"
        )


def _say_what_contexts_lack(policy: StoppingPolicy, geometry: Geometry) -> None:
    if policy.reads_context and geometry.context is None:
        warn(
            "this recording, of an older version, does not hold the prompts' lengths: costs are read at the middle of their "
            "contexts; record it again to replay what decoding decides"
        )


def _check_alone(policy: StoppingPolicy) -> None:
    if policy.couples_rows:
        raise InputError(
            "this policy decides for the rows of a batch together, and a replay has none; simulate one with analysis.serving"
        )


def _check_memoryless(policy: StoppingPolicy) -> None:
    if policy.uses_history:
        raise InputError("this policy remembers earlier rounds: replay it round by round (`by_rounds`)")

"""Replay against rounds walked one at a time, in every count: policies with and without memory, sweeps, views of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.toolkit.trace.plain import MOST, NAMES, Text, same, small_trace, while_
from toolkit import metrics
from toolkit.errors import InputError
from toolkit.stopping import Bounded, Confidence, Fixed, StoppingPolicy
from toolkit.trace import bounds as upper_bound
from toolkit.trace import replay as policies
from toolkit.trace import view as token_view
from toolkit.trace.replay import by_rounds, by_starts, sweep_levels
from toolkit.trace.steps import Geometry, step_at
from toolkit.types import Counts


@pytest.fixture(scope="module")
def trace():
    heads = {
        "mine": lambda step: step.entropy,
        "mine.preread": lambda step: torch.stack([step.token_prob, step.entropy], 1),
    }
    return small_trace(heads=heads, upper_bound=True)


@pytest.fixture(scope="module")
def sequences(trace):
    return [Text(trace, number) for number in range(trace.num_texts)]


def every_start(sequences):
    return [(text, start) for text in sequences for start in range(text.first, text.end)]


def test_what_follows_from_the_acceptance_draws(trace, sequences):
    geometry = Geometry.of(trace)
    known = [(text.run(start), text.end - start, text.room(start)) for text, start in every_start(sequences)]
    assert list(zip(geometry.run.tolist(), geometry.left.tolist(), geometry.room.tolist(), strict=True)) == known
    short = replace(trace, room=torch.ones_like(trace.room))
    assert Geometry.of(short).room.tolist() == [int(start == text.first) for text, start in every_start(sequences)]


@pytest.mark.parametrize("prepared", [False, True])
def test_the_steps_that_a_round_visits(trace, sequences, prepared):
    geometry = Geometry.of(trace)
    geometry = geometry.with_steps(trace) if prepared else geometry
    starts = torch.arange(trace.num_positions).flip(0)
    for depth in range(1, MOST + 4):
        index, exists = step_at(trace, geometry, starts, depth)
        known = [text.visited(start) for text, start in reversed(every_start(sequences))]
        # A text whose end was accepted goes no further; a roll-out goes as far as it was recorded.
        assert exists.tolist() == [depth <= len(steps) for steps in known]
        assert index.tolist() == [steps[depth - 1] if depth <= len(steps) else 0 for steps in known]
    if prepared:
        assert geometry.steps[0].shape == (MOST + 1, trace.num_positions)


@dataclass(frozen=True)
class Moody(StoppingPolicy):
    """Decides by all that it was ever told: its state is a number that every call changes."""

    asks: bool = False
    least: float = 0.35
    most: float = 1.0

    @property
    def reads(self):
        return self.asks

    def init(self, num_rows, device):
        return {"mood": torch.zeros(num_rows, dtype=torch.long, device=device)}

    def begin(self, live, state):
        return {"mood": state["mood"] + live}, state["mood"] % 4 != 3

    def read(self, step, state):
        assert step.tokens is None  # not drawn yet
        return {"mood": state["mood"] + 2}, step.entropy + 0.05 * (state["mood"] % 3) < self.most

    def step(self, step, state):
        return {"mood": state["mood"] + 3 * step.tokens + step.depth}, step.token_prob >= self.least

    def observe(self, proposal, verdict, state):
        told = 5 * verdict.length + 7 * proposal.num_drafted + 11 * proposal.num_calls
        return {"mood": state["mood"] + told}


def moody(trace, policy, least, most):
    """The same rule, written down for one text."""

    def of_text():
        mood = 0

        def draft(text, start):
            nonlocal mood
            room, steps, drafted, calls = text.room(start), text.visited(start), 0, 0
            drafting, mood = mood % 4 != 3 and room > 0, mood + (room > 0)
            while drafting:
                step, calls = steps[drafted], calls + 1
                if policy.asks:
                    wanted = float(trace.entropy[step]) + 0.05 * (mood % 3) < policy.most
                    mood += 2
                    if not wanted and drafted + 1 > least:
                        break
                drafted += 1
                mood += 3 * int(trace.tokens[step]) + drafted
                go_on = drafted < least or float(trace.token_prob[step]) >= policy.least
                drafting = go_on and drafted < min(most, room, len(steps))
            mood += 5 * min(drafted, text.run(start)) + 7 * drafted + 11 * calls
            return drafted, calls

        return draft

    drafts = {}
    return lambda text, start: drafts.setdefault(text.number, of_text())(text, start)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize(("least", "most"), [(1, MOST), (2, 3)])
def test_a_policy_with_memory_is_told_what_it_is_told_in_decoding(trace, asks, least, most):
    policy = Moody(asks)
    replayed = by_rounds(trace, Bounded(policy, least, most))
    same(replayed, trace, moody(trace, policy, least, most))
    assert 0 < replayed.total.num_drafted <= replayed.total.num_draft_calls
    assert (replayed.total.num_drafted < replayed.total.num_draft_calls) == asks


def test_rounds_are_told_in_their_order(trace, sequences):
    policy = Bounded(Fixed(3), 1, MOST)
    parts = [tuple(value.tolist() for value in part) for part in policies.replay_rounds(trace, policy)]
    for text in sequences:
        rows = [row for part in parts for row in zip(*part, strict=True) if row[0] == text.number]
        assert [row[1:] for row in rows] == text.rounds(while_(trace, lambda step: True, most=3))
    assert [len(part[0]) for part in parts] == sorted((len(part[0]) for part in parts), reverse=True)


@pytest.mark.parametrize("num_drafted", [0, 1, 3, MOST])
def test_every_fixed_number(trace, num_drafted):
    policy = Bounded(Fixed(num_drafted), min(num_drafted, 1), num_drafted)
    known = while_(trace, lambda step: True, most=num_drafted)
    for replayed in (by_rounds(trace, policy), by_starts(trace, policy), upper_bound.fixed(trace)[num_drafted]):
        same(replayed, trace, known)


def test_slots_without_a_text_draft_nothing(trace):
    geometry, starts = Geometry.of(trace), torch.arange(trace.num_positions)
    busy = starts % 3 != 0
    policy = Bounded(Fixed(2), 1, MOST)
    every, forwards, _ = policies.draft(trace, geometry, starts, policy, {})
    some, paid, _ = policies.draft(trace, geometry, starts, policy, {}, busy)
    assert torch.equal(some, every * busy) and torch.equal(paid, forwards * busy)
    mood = policies.draft(
        trace, geometry, starts, Bounded(Moody(), 1, MOST), Moody().init(len(starts), starts.device), busy
    )
    assert bool((mood[2]["mood"][~busy] == 0).all()) and bool((mood[2]["mood"][busy & (geometry.room > 0)] > 0).all())


@pytest.mark.parametrize(("least", "most"), [(1, MOST), (1, 2), (2, MOST), (MOST, MOST)])
def test_levels_swept_at_once(trace, least, most):
    levels = [0.01 * i for i in range(20, 75)]  # more than are walked together
    sweep = sweep_levels(trace, Confidence(), levels, least, most)
    assert len(sweep) == len(levels)
    for level, each in zip(levels, sweep, strict=True):
        same(each, trace, while_(trace, lambda step, level=level: trace.token_prob[step] >= level, least, most))
    if (least, most) == (1, MOST):
        for one, other in zip(sweep, sweep_levels(trace, Confidence(), levels), strict=True):
            assert one.total == other.total
        assert len({each.total for each in sweep}) >= 3


@dataclass(frozen=True)
class Falling(Confidence):
    """A score that remembers the round's lowest."""

    def init(self, num_rows, device):
        assert device == torch.device("cpu")
        return {"low": torch.ones(num_rows, device=device)}

    def score(self, step, state):
        low = torch.minimum(state["low"], step.token_prob)
        return {"low": low}, low * step.entropy


def test_scores_may_depend_on_the_round(trace):
    def stop(text, start):
        low, drafted, steps = 1.0, 0, text.visited(start)
        while drafted < min(MOST, text.room(start), len(steps)):
            low = min(low, float(trace.token_prob[steps[drafted]]))
            drafted += 1
            if low * float(trace.entropy[steps[drafted - 1]]) < 0.3:
                break
        return drafted, drafted

    (replayed,) = sweep_levels(trace, Falling(), [0.3])
    same(replayed, trace, stop)


def test_a_score_of_exactly_the_level_goes_on(trace):
    level = float(trace.token_prob[3])
    (replayed,) = sweep_levels(trace, Confidence(), [level])
    same(replayed, trace, while_(trace, lambda step: float(trace.token_prob[step]) >= level))


def test_sums_over_texts_and_what_their_forwards_cost(trace):
    replayed = by_rounds(trace, Bounded(Fixed(3), 1, MOST))
    assert replayed.total == Counts(**{name: int(replayed.counts[name].sum()) for name in NAMES})
    assert replayed.per_text.shape == (trace.num_texts, len(NAMES)) and replayed.per_text.dtype == np.float64
    assert replayed.per_text[:, 1].tolist() == replayed.counts[NAMES[1]].tolist()
    known = 0.25 * replayed.counts["num_draft_calls"] + replayed.counts["num_target_calls"]
    assert replayed.cost(0.25).tolist() == known.tolist()
    assert metrics.throughput(replayed.total, 0.25) == pytest.approx(replayed.total.num_generated / known.sum())
    bare = policies.Replayed(replayed.counts, replayed.accepted)
    assert [len(bare.lengths), len(bare.reached), len(bare.passed), bare.drafted.shape, bare.reached_lengths.shape] == [
        0, 0, 0, (0, 0), (0, 0),
    ]  # fmt: skip


def test_what_a_replay_cannot_do_is_said(trace):
    reading, coupled = (
        SimpleNamespace(reads=True, uses_history=False),
        SimpleNamespace(couples_rows=True, uses_history=False, limit=2),
    )
    for call, words in (
        (lambda: by_rounds(trace, Fixed(MOST + 1)), f"recorded for {MOST}: bound it by max_drafted={MOST}"),
        (lambda: by_starts(trace, Fixed(MOST + 1)), f"may draft {MOST + 1} tokens"),
        (lambda: sweep_levels(trace, Confidence(), [0.5], max_drafted=MOST + 1), f"may draft {MOST + 1} tokens"),
        (lambda: by_rounds(trace, Confidence()), "may draft None tokens"),
        (lambda: by_starts(trace, Bounded(Moody(), 1, MOST)), "remembers earlier rounds"),
        (lambda: sweep_levels(trace, Moody(), [0.5]), "remembers earlier rounds"),
        (lambda: sweep_levels(trace, reading, [0.5]), "reads before it decides"),
        (lambda: by_rounds(trace, coupled), "decides for the rows of a batch together"),
        (lambda: by_starts(trace, coupled), "decides for the rows of a batch together"),
    ):
        with pytest.raises(InputError, match=f"^.*{words}.*$"):
            call()


# -- tokens of a few texts --------------------------------------------------------------------------------------------


class Letters:
    def decode(self, ids):
        return "abc"[ids[0]]


@pytest.mark.parametrize(("name", "ahead"), [("mine", 1), ("mine.preread", 0), (None, 0)])
def test_every_token_of_a_text_is_shown_with_what_became_of_it(trace, name, ahead):
    shown = replace(trace, estimates={} if name is None else {name: trace.estimates[name]})
    chosen = [7, 0, trace.num_texts - 1]
    shown_rounds = token_view.token_rounds(shown, Bounded(Fixed(3), 1, MOST), chosen, Letters())
    kinds = set()
    for number, rounds in zip(chosen, shown_rounds, strict=True):
        text = Text(trace, number)
        known = text.rounds(while_(trace, lambda step: True, most=3))
        assert len(rounds) == len(known)
        for told, (start, drafted, _, accepted, produced) in zip(rounds, known, strict=True):
            steps = text.visited(start)
            assert len(told["drafted"]) == drafted
            for depth, (line, step) in enumerate(zip(told["drafted"], steps, strict=False)):
                said = None
                if name is not None and depth + ahead < len(steps):
                    logit = shown.estimates[name][steps[depth + ahead]]
                    said = round(float(torch.sigmoid(logit[0] if logit.dim() else logit)), 4)
                kind = "accepted" if depth < accepted else "rejected" if depth == accepted else "unused"
                assert line == {
                    "text": "abc"[int(trace.tokens[step])], "kind": kind,
                    "draft_prob": round(float(trace.draft_prob[step]), 4),
                    "accept_prob": round(float(trace.accept_prob[step]), 4), "predicted": said,
                }  # fmt: skip
                kinds.add(kind)
            place = start - text.first + accepted
            kind = "bonus" if accepted == drafted else "corrected"
            kinds.add(kind if produced > accepted else "none")
            assert told["extra"] == (None if produced <= accepted else {"kind": kind, "position": place})
    assert kinds == {"accepted", "rejected", "unused", "bonus", "corrected", "none"}


def test_what_is_drafted_after_a_texts_end_is_unused(trace):
    """A stop string may end a text within a round, and the draft has gone on."""
    last = next(int(end) - 1 for end in trace.text_first[2:] if trace.roll_length[end - 1] > 0)
    number, accepted = int(torch.searchsorted(trace.text_first, last, right=True)) - 1, torch.zeros_like(trace.accepted)
    accepted[last] = True
    policy = Bounded(Fixed(MOST), 1, MOST)
    (rounds,) = token_view.token_rounds(replace(trace, accepted=accepted), policy, [number], None)
    first, *others = (line["kind"] for line in rounds[-1]["drafted"])
    assert first == "accepted" and set(others) == {"unused"} and rounds[-1]["extra"] is None


def test_what_was_not_recorded_is_none_and_tokens_without_a_tokenizer_are_numbers(trace):
    blind = replace(trace, accept_prob=torch.full_like(trace.accept_prob, torch.nan))
    (rounds,) = token_view.token_rounds(blind, Bounded(Fixed(1), 1, MOST), [7], None)
    assert rounds[0]["drafted"][0]["accept_prob"] is None
    assert rounds[0]["drafted"][0]["text"] == f"#{int(trace.tokens[Text(trace, 7).first])}"

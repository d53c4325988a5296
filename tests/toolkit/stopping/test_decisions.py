"""Decisions at their borders, what every policy says of itself, and policies that learn against slow references."""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch

from tests.toolkit.stopping.test_policies import DrawnScores, ReadScore, go_on, named, step_of, verdict_of
from toolkit import config, stopping
from toolkit.acceptance import CandidateEstimator, OnlineLogistic
from toolkit.config.notes import Interval, notes
from toolkit.errors import InputError
from toolkit.stopping import (
    AdaEdl,
    Always,
    Bounded,
    Confidence,
    DynamicConfidence,
    Fixed,
    Heuristic,
    OnlineRate,
    Rate,
    StoppingPolicy,
    Survival,
    Svip,
    Tail,
    TreeRate,
)
from toolkit.types import DraftStep, Match, Proposal, Verdict

CPU = torch.device("cpu")
SAYS = {  # limit, reads, uses_history, reads_states, needs_draft_model, couples_rows
    "adaedl": (None, False, True, False, True, False),
    "always": (None, False, False, False, False, False),
    "batch_best_source": (None, False, True, True, True, True),
    "batch_lookup_rate": (None, False, True, False, False, True),
    "batch_rate": (None, False, True, True, True, True),
    "batch_rate_confidence": (None, False, True, True, True, True),
    "best_source": (None, False, True, True, True, False),
    "block_budget": (None, True, True, True, True, True),
    "block_draft_rate": (None, True, True, True, True, False),
    "confidence": (None, False, False, False, True, False),
    "dynamic_confidence": (None, False, True, False, True, False),
    "fixed": (4, False, False, False, False, False),
    "heuristic": (None, False, True, False, False, False),
    "largest": (None, True, False, False, True, False),
    "lookup_rate": (None, False, True, False, False, False),
    "online_rate": (None, False, True, False, True, False),
    "rate": (None, False, True, True, True, False),
    "survival": (None, False, False, True, True, False),
    "svip": (None, False, False, False, True, False),
    "tail": (None, False, False, False, True, False),
    "tree_rate": (None, False, True, False, True, False),
}


def said(policy: StoppingPolicy) -> tuple[object, ...]:
    names = ("limit", "reads", "uses_history", "reads_states", "needs_draft_model", "couples_rows")
    return tuple(getattr(policy, name) for name in names)


@pytest.mark.parametrize("name", config.choices("stopping"))
class TestEveryPolicy:
    def test_it_says_what_it_needs_and_its_bounds_say_the_same(self, name):
        assert said(named(name)) == SAYS[name]
        limit, *others = SAYS[name]
        assert said(Bounded(named(name), 1, 6)) == (limit or 6, *others)

    def test_it_decides_with_truth_values_on_the_device_of_its_rows(self, name):
        """A tensor that is made without its device would lie on "meta" here, which cannot be mixed with real ones."""
        policy, live = Bounded(named(name), 1, 6).bind(None), torch.tensor([True, False, True])
        logits, tokens = torch.tensor([[0.1, 0.2, 0.3]] * 3), torch.tensor([0, 1, 2])
        match = Match(*torch.full((3, 3), 0.5))
        step = DraftStep(2, logits, logits.softmax(-1), torch.full((3, 2), 0.5), tokens, live, match=match)
        drafted, length = torch.tensor([3, 0, 3]), torch.tensor([1, 0, 3])
        proposal = Proposal(torch.zeros(3, 3, dtype=torch.long), torch.zeros(3, 3, 3), drafted, drafted)
        verdict = Verdict(proposal.tokens, length, length, length == drafted, live)

        def one_round():
            state = policy.init(3, CPU)
            states, decisions = [state], []
            for decide in (policy.begin, policy.read, policy.step):
                if decide != policy.read or policy.reads or name in ("always", "fixed"):
                    state, decision = decide(live if decide == policy.begin else step, state)
                    decisions.append(decision)
            states += [state, policy.observe(proposal, verdict, state)]
            return decisions, states

        decisions, states = one_round()
        assert all(decision.dtype == torch.bool and decision.shape == (3,) for decision in decisions)
        shapes = [{key: (tensor.shape, tensor.dtype) for key, tensor in state.items()} for state in states]
        assert shapes[0] == shapes[1] == shapes[2]
        with torch.device("meta"):
            again, states_again = one_round()
        for one, other in zip((*decisions, *values(states)), (*again, *values(states_again)), strict=True):
            assert other.device == CPU and torch.equal(one, other)


def values(states: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for state in states for tensor in state.values()]


CLASSES = [one for one in vars(stopping).values() if dataclasses.is_dataclass(one)]
NEEDED = {"estimator": DrawnScores(), "copies": DrawnScores(), "policy": Always()}


@pytest.mark.parametrize(
    ("kind", "field"), [(k, f.name) for k in CLASSES for f in dataclasses.fields(k)], ids=lambda one: str(one)
)
def test_every_setting_is_refused_outside_its_range(kind, field):
    hints = typing.get_type_hints(kind, include_extras=True)
    own = {OnlineRate: OnlineLogistic(), TreeRate: CandidateEstimator()}
    needed = NEEDED | ({"estimator": own[kind]} if kind in own else {})
    given = {name: value for name, value in needed.items() if name in hints}
    where = "" if kind is Bounded else r"policy\."
    for interval in (note for note in notes(hints[field]) if isinstance(note, Interval)):
        with pytest.raises(InputError, match=f"^{where}{field}: expected"):
            kind(**{**given, field: interval.low - 1})


def test_a_score_at_its_level_goes_on():
    even, certain = step_of([0.5, 0.5], 0), step_of([1.0, 0.0], 0)
    for policy, step in (
        (Confidence(0.5), even),
        (Tail(0.5), even),
        (Svip(0.0), certain),
        (AdaEdl(threshold=1.0), certain),
        (DynamicConfidence(threshold=0.5), even),
    ):
        assert policy.step(step, policy.init(1, CPU))[1].tolist() == [True]
    wide = torch.tensor([[0.4, 0.6]], dtype=torch.float64)
    step, policy = DraftStep(1, wide.log(), wide, wide, torch.tensor([0])), DynamicConfidence(threshold=0.4)
    assert policy.step(step, policy.init(1, CPU))[1].tolist() == [True]  # the threshold is a number of fewer digits
    for rate in (2.0, None):
        policy = Rate(DrawnScores(), cost_ratio=0.25, rate=rate, initial_rate=2.0, memory=16.0)
        assert go_on(policy, policy.init(1, CPU), 1, 1.0, 0.5)[1]
    second = step_of([0.5, 0.5], 0, depth=2, hidden=0.5)
    late, early = (Survival(ReadScore(), 0.5, lag) for lag in (1, 0))
    assert late.step(second, late.init(1, CPU))[1].tolist() == [True]
    assert early.read(second, early.init(1, CPU))[1].tolist() == [True]


def test_adaedl_stops_where_its_bound_falls_below_the_threshold():
    bound = 1 - (0.2 * 0.6931471805599453) ** 0.5
    for threshold, goes in ((bound - 1e-4, True), (bound + 1e-4, False)):
        policy = AdaEdl(threshold=threshold)
        assert bool(policy.step(step_of([0.5, 0.5], 0), policy.init(1, CPU))[1]) == goes


@pytest.mark.parametrize(
    "policy",
    [
        AdaEdl(),
        AdaEdl(threshold=0.5, rate_decay=0.25, threshold_decay=0.5, target_rate=0.5, step_size=0.125),
        AdaEdl(threshold=0.5, rate_decay=0.0, target_rate=0.5),  # met exactly by a round
        AdaEdl(threshold=0.9, step_size=5.0),  # up to 1
        AdaEdl(threshold=0.1, target_rate=0.1, step_size=5.0),  # down to 0
    ],
)
def test_adaedl_moves_as_its_definition_says(policy):
    """Round after round by hand; a row that drafted nothing learns nothing."""
    state, threshold, rate = policy.init(1, CPU), policy.threshold, policy.target_rate
    for drafted, accepted in ((1, 0), (0, 0), (1, 1), (2, 1), (4, 1), (0, 0), (4, 4), (2, 2), (7, 7), (3, 3), (3, 0)):
        state = policy.observe(*verdict_of(drafted, accepted), state)
        if drafted:
            rate = policy.rate_decay * rate + (1 - policy.rate_decay) * accepted / drafted
            sign = (rate < policy.target_rate) - (rate > policy.target_rate)
            moved = threshold + policy.step_size * sign
            threshold = policy.threshold_decay * threshold + (1 - policy.threshold_decay) * moved
            threshold = min(max(threshold, 0.0), 1.0)
        assert float(state["rate"]) == pytest.approx(rate, abs=1e-5)
        assert float(state["threshold"]) == pytest.approx(threshold, abs=1e-5)


def test_heuristic_drafts_its_length_and_learns_only_from_rounds_that_drafted():
    policy = Heuristic(3)
    state = policy.init(1, CPU)
    assert [bool(policy.step(step_of([0.5, 0.5], 0, k), state)[1]) for k in (1, 2, 3, 4)] == [True, True, False, False]
    assert int(policy.observe(*verdict_of(0, 0), state)["length"]) == 3
    assert int(policy.observe(*verdict_of(1, 1), state)["length"]) == 5
    assert int(policy.observe(*verdict_of(1, 0), state)["length"]) == 2


def test_a_bound_survival_rule_keeps_its_settings():
    for lag in (0, 1):
        bound = Survival(ReadScore(), 0.25, lag).bind(None)
        assert (bound.threshold, bound.lag, bound.reads) == (0.25, lag, lag == 0)


def test_bounds_pass_on_the_pair_and_draft_nothing_only_where_nothing_may_be_drafted():
    class Remembers(StoppingPolicy):
        def bind(self, pair: object) -> StoppingPolicy:
            self.pair = pair
            return self

    assert Bounded(Remembers(), 1, 5).bind("pair").policy.pair == "pair"
    live = torch.tensor([True, False])
    for most, goes in ((0, False), (1, True), (2, True)):
        assert Bounded(Always(), 0, most).begin(live, {})[1].tolist() == [goes, False]
        assert Bounded(Fixed(most), 0, 5).begin(live, {})[1].tolist() == [goes, False]


def test_what_is_foreseen_is_the_next_tokens_probability():
    step = step_of([0.5, 0.5], 0)
    step.hidden = torch.tensor([[0.25, 0.75]])
    rate = Rate(DrawnScores())
    assert rate.foresee(step).tolist() == Bounded(rate).foresee(step).tolist() == [0.75]
    assert Bounded(Always()).foresee(step) is Fixed(3).foresee(step) is None


@pytest.mark.parametrize(("history", "miss_cost"), [(1, 3.0), (3, 1.5), (7, 0.5), (64, 1.0)])
def test_dynamic_confidence_fits_to_the_newest_tokens_of_every_row(history, miss_cost):
    """Two rows, by search over the scores kept; of a round longer than the history its first tokens are kept."""
    policy = DynamicConfidence(miss_cost=miss_cost, history=history)
    state, generator = policy.init(2, CPU), torch.Generator().manual_seed(history)
    kept: list[list[tuple[float, bool]]] = [[], []]
    fitted = 0
    for _ in range(30):
        scores = torch.randint(1, 12, (2, 4), generator=generator) / 12
        drafted, most = torch.randint(0, 5, (2,), generator=generator), 4
        length = (drafted * torch.rand(2, generator=generator) * 1.4).long().clamp(max=drafted)
        for depth in range(1, most + 1):
            probs = torch.stack([scores[:, depth - 1], 1 - scores[:, depth - 1]], 1)
            step = DraftStep(depth, probs.log(), probs, probs[:, :0], torch.zeros(2, dtype=torch.long))
            state, _ = policy.step(step, state)
        before = state["threshold"].tolist()
        proposal = Proposal(torch.zeros(2, most, dtype=torch.long), torch.zeros(2, most, 2), drafted, drafted)
        state = policy.observe(
            proposal, Verdict(proposal.tokens, length, length, length == drafted, length >= 0), state
        )
        for row, tokens in enumerate(kept):
            count, accepted = int(drafted[row]), int(length[row])
            new = [(float(scores[row, k]), k < accepted) for k in range(min(count, accepted + 1))]
            tokens[:] = (tokens + new[:history])[-history:]
            threshold, costs = float(state["threshold"][row]), error_costs(tokens, miss_cost)
            if new and costs:
                least, fitted = min(costs.values()), fitted + 1
                assert min(costs[score] for score in costs if abs(score - threshold) < 1e-6) == pytest.approx(
                    least, abs=1e-5
                )
            else:
                assert threshold == before[row]
    assert fitted > 10 or history == 1


def test_one_accepted_token_is_all_that_can_be_missed():
    """FNR 1 at every threshold but the lowest: .9 and 1/6 of the rejected ones is more than all of those."""
    policy = DynamicConfidence(miss_cost=0.9)
    state = policy.init(1, CPU)
    for score, accepted in ((0.1, 1), (0.2, 0), (0.3, 0), (0.4, 0), (0.5, 0), (0.6, 0), (0.7, 0)):
        state, _ = policy.step(step_of([score, 1 - score], 0), state)
        state = policy.observe(*verdict_of(1, accepted), state)
    assert float(state["threshold"]) == pytest.approx(0.1)


def error_costs(tokens: list[tuple[float, bool]], miss_cost: float) -> dict[float, float]:
    """FPR + miss_cost FNR of every score as a threshold; none unless (score, accepted) are of both kinds."""
    good, bad = ([score for score, ok in tokens if ok is kind] for kind in (True, False))
    if not good or not bad:
        return {}
    return {
        at: sum(s >= at for s in bad) / len(bad) + miss_cost * sum(s < at for s in good) / len(good) for at, _ in tokens
    }

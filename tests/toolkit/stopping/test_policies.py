"""Stopping policies, one by one against their definition, and all of them (found by their yaml) against the contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from toolkit import ModelPair, config
from toolkit.config import instantiate
from toolkit.costs.load import LoadCost
from toolkit.decoding import (
    BestSourceProposer,
    ChainProposer,
    DraftContext,
    Method,
    Sampling,
    SuffixProposer,
    TextProposer,
    decode,
)
from toolkit.engine import TabularModel, open_session
from toolkit.errors import InputError
from toolkit.stopping import (
    AdaEdl,
    Bounded,
    Confidence,
    DynamicConfidence,
    Fixed,
    Heuristic,
    Rate,
    Survival,
    Svip,
    Tail,
)
from toolkit.stopping.base import StoppingPolicy
from toolkit.testing import check_policy
from toolkit.types import DraftStep, Match, Proposal, Verdict
from toolkit.verification import get


class ReadScore:
    """An estimator for tests: the state that has read the token says how likely it was accepted (its first entry)."""

    def bind(self, pair: object) -> ReadScore:
        return self

    def read_prob(self, step: DraftStep) -> torch.Tensor:
        return step.hidden[:, 0]


def named(name: str) -> StoppingPolicy:
    """A policy from its yaml; heads are replaced by a score that is always .9."""
    settings = config.plain(config.compose("method_only", [f"+stopping@policy={name}"])["policy"])
    if "head" in settings.get("estimator", ()):
        settings.pop("estimator")
        return instantiate({**settings, "_partial_": True})(estimator=ConstantScore())
    return instantiate(settings)


def proposer_of(name: str) -> TextProposer:
    """What drafts for a policy: a chain, copies where it reads those, or both where it chooses."""
    policy = named(name)
    copies = BestSourceProposer() if policy.needs_draft_model else SuffixProposer()
    return copies if policy.reads_matches else ChainProposer()


class ConstantScore(ReadScore):
    """P(accepted) = .9, whatever is seen."""

    def read_prob(self, step: DraftStep) -> torch.Tensor:
        return step.hidden.new_full((len(step.hidden),), 0.9)

    def drawn_probs(self, step: DraftStep) -> tuple[torch.Tensor, torch.Tensor]:
        return self.read_prob(step), self.read_prob(step)


def step_of(probs: list[float], token: int, depth: int = 1, hidden: float = 0.5) -> DraftStep:
    distribution = torch.tensor([probs])
    return DraftStep(depth, distribution.log(), distribution, torch.tensor([[hidden]]), torch.tensor([token]))


def verdict_of(num_drafted: int, length: int) -> tuple[Proposal, Verdict]:
    drafted, count = torch.tensor([num_drafted]), torch.tensor([length])
    tokens = torch.zeros(1, num_drafted, dtype=torch.long)
    proposal = Proposal(tokens, torch.zeros(1, num_drafted, 3), drafted, drafted)
    yes = torch.ones(1, dtype=torch.bool)
    return proposal, Verdict(tokens, count, count, count == drafted, yes)


LINEAR = [name for name in config.choices("stopping") if not named(name).chooses_nodes]  # trees: test_best_first.py


@pytest.mark.parametrize("name", LINEAR)
class TestEveryPolicy:
    def test_state_is_per_row(self, name):
        """Rows of a batch of three behave like three batches of one; those that decide together: test_batch_rate.py."""
        if not named(name).couples_rows:
            check_policy(Bounded(named(name), 1, 6).bind(None))

    def test_bounds_hold_and_drawn_tokens_are_sent(self, name, table_pair):
        method = Method(name, named(name), get("rejection"), proposer_of(name), min_drafted=2, max_drafted=5)
        for generation in decode(table_pair, [[0], [1], [0, 1]] * 5, method, Sampling(max_new_tokens=30)):
            room = 30
            for r in generation.rounds:
                assert r.num_drafted <= min(5, room - 1)
                copied = method.proposer.shows_matches and r.num_draft_calls == 0
                assert r.num_draft_calls >= r.num_drafted or copied
                room -= r.num_produced

    def test_a_round_has_its_least_length(self, name, table_pair):
        """Where no drafted token ends the text; a batch that drafts nothing at all is not overruled."""
        if named(name).reads_matches:
            pytest.skip("there is not always as much to copy")
        endless = ModelPair(target=table_pair.target, draft=table_pair.draft)
        method = Method(name, named(name), get("rejection"), min_drafted=2, max_drafted=5)
        lengths = set()
        for generation in decode(endless, [[0], [1], [0, 1]] * 3, method, Sampling(max_new_tokens=30)):
            room = 30
            for r in generation.rounds:
                lengths.add(r.num_drafted)
                assert r.num_drafted >= min(2, room - 1) or (r.num_drafted == 0 and method.couples_rows)
                room -= r.num_produced
        assert {2, 5} & lengths

    def test_zero_is_allowed(self, name, table_pair):
        method = Method(name, named(name), get("rejection"), proposer_of(name), min_drafted=0, max_drafted=0)
        (generation,) = decode(table_pair, [[0]], method, Sampling(max_new_tokens=6))
        assert generation.counts.num_draft_calls == 0
        assert generation.counts.num_target_calls == generation.counts.num_generated


def test_fixed():
    assert [bool(Fixed(3).step(step_of([0.5, 0.5], 0, depth), {})[1]) for depth in (1, 2, 3)] == [True, True, False]


def test_confidence_looks_at_the_unwarped_probability_of_the_token():
    assert bool(Confidence(0.4).step(step_of([0.4, 0.6], 0), {})[1])
    assert not bool(Confidence(0.41).step(step_of([0.4, 0.6], 0), {})[1])
    greedy = DraftStep(
        1, torch.tensor([[0.4, 0.6]]).log(), torch.tensor([[0.0, 1.0]]), torch.zeros(1, 1), torch.tensor([1])
    )
    assert bool(Confidence(0.55).step(greedy, {})[1])
    assert not bool(Confidence(0.65).step(greedy, {})[1])


def test_tail_multiplies_and_starts_again_each_round():
    policy, state = Tail(0.2), Tail(0.2).init(1, torch.device("cpu"))
    state, go = policy.step(step_of([0.5, 0.5], 0), state)
    assert bool(go)
    state, go = policy.step(step_of([0.3, 0.7], 0, 2), state)
    assert not bool(go)
    assert float(policy.observe(*verdict_of(2, 1), state)["product"]) == 1


def test_svip_and_adaedl_by_hand():
    entropy = 2 * 0.5 * 0.6931471805599453
    bound = (0.15 * entropy) ** 0.5
    assert bool(Svip(bound + 1e-4).step(step_of([0.5, 0.5], 0), {})[1])
    assert not bool(Svip(bound - 1e-4).step(step_of([0.5, 0.5], 0), {})[1])
    policy = AdaEdl(threshold=0.5)
    state = policy.init(1, torch.device("cpu"))
    assert bool(policy.step(step_of([0.5, 0.5], 0), state)[1]) == (1 - (0.2 * entropy) ** 0.5 >= 0.5)
    state = policy.observe(*verdict_of(4, 1), state)  # rate .5 * .9 + .5 * .25 = .575 < .9: lambda moves up
    assert float(state["rate"]) == pytest.approx(0.575)
    assert float(state["threshold"]) == pytest.approx(0.9 * 0.5 + 0.1 * 0.51)


def test_heuristic_schedule():
    policy, lengths = Heuristic(5), []
    state = policy.init(1, torch.device("cpu"))
    for num_drafted, accepted in ((5, 5), (7, 7), (9, 2), (8, 0), (7, 7)):
        state = policy.observe(*verdict_of(num_drafted, accepted), state)
        lengths.append(int(state["length"]))
    assert lengths == [7, 9, 8, 7, 9]
    floor = Heuristic(1)
    assert int(floor.observe(*verdict_of(1, 0), floor.init(1, torch.device("cpu")))["length"]) == 1


def test_dynamic_confidence_minimises_its_cost_over_the_verified_tokens():
    """Against a brute-force search over every observed score, round after round."""
    policy = DynamicConfidence(history=64)
    state = policy.init(1, torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    seen: list[tuple[float, bool]] = []
    for _ in range(12):
        scores = (torch.randint(1, 20, (4,), generator=generator) / 20).tolist()
        accepted = int(torch.randint(0, 5, (), generator=generator))
        for depth, score in enumerate(scores, start=1):
            state, _ = policy.step(step_of([score, 1 - score], 0, depth), state)
        state = policy.observe(*verdict_of(4, accepted), state)
        seen += [(score, k < accepted) for k, score in enumerate(scores[: accepted + 1])]
        good, bad = [s for s, ok in seen if ok], [s for s, ok in seen if not ok]
        if not good or not bad:
            assert float(state["threshold"]) == pytest.approx(0.4)
            continue
        best = min(error_cost(score - 1e-4, good, bad) for score, _ in seen)
        assert error_cost(float(state["threshold"]) - 1e-4, good, bad) == pytest.approx(best)


def error_cost(threshold: float, good: list[float], bad: list[float]) -> float:
    """FPR + 3 FNR."""
    return sum(s >= threshold for s in bad) / len(bad) + 3 * sum(s < threshold for s in good) / len(good)


def hidden_pair():
    """A draft whose hidden states (one-hot table rows) let an estimator score the token that was read."""
    generator = torch.Generator().manual_seed(3)
    return TabularModel.random(3, 1, generator)


def run_survival(lag: int, threshold: float, scores: list[float]) -> tuple[int, int]:
    """Tokens drafted and forwards paid when the token read k-th is scored scores[k]."""

    class Scripted(ReadScore):
        def read_prob(self, step: DraftStep) -> torch.Tensor:
            return torch.tensor([scores[step.depth - 2]])

    model = hidden_pair()
    session = open_session(model, 1, 32)
    context = DraftContext(
        sequences=[[0]], vocab_size=3, sessions=[session],
        unread=lambda draft: (torch.tensor([[0]]), [1]), limits=torch.tensor([20]), room=[20],
        uniforms=torch.rand(1, 20, generator=torch.Generator().manual_seed(0)), sampling=Sampling(),
        fit=lambda logits: logits, seen=None, end_ids=(),
    )  # fmt: skip
    policy = Bounded(Survival(Scripted(), threshold, lag), 1, 20)
    proposal, _ = ChainProposer().propose(context, policy, policy.init(1, torch.device("cpu")))
    return int(proposal.num_drafted), int(proposal.num_calls)


def test_survival_with_its_lag_carries_one_unscored_token():
    """Scores of y_1, y_2, ...: 1 - .9 = .1, 1 - .9 * .5 = .55 > .5: with y_2's score known at step 3, y_3 is drawn."""
    assert run_survival(1, 0.5, [0.9, 0.5, 0.9]) == (3, 3)
    assert run_survival(1, 0.05, [0.9, 0.5, 0.9]) == (2, 2)


def test_survival_without_lag_pays_one_more_forward_than_it_drafts():
    assert run_survival(0, 0.5, [0.9, 0.5, 0.9]) == (2, 3)
    assert run_survival(0, 0.05, [0.9, 0.5, 0.9]) == (1, 2)


def test_bounds_are_inclusive():
    never = Bounded(Confidence(1.0), min_drafted=3, max_drafted=4)
    assert [bool(never.step(step_of([0.5, 0.5], 0, d), {})[1]) for d in (1, 2, 3, 4)] == [True, True, False, False]
    always = Bounded(Confidence(0.0), min_drafted=1, max_drafted=4)
    assert [bool(always.step(step_of([0.5, 0.5], 0, d), {})[1]) for d in (1, 3, 4)] == [True, True, False]


def test_bounds_hold_for_policies_that_look_before_they_draw():
    """`read` at depth d decides whether token d is drawn at all: the first `min_drafted` always are."""
    bounded = Bounded(Survival(ConstantScore(), 0.0, lag=0), min_drafted=3, max_drafted=9)
    assert bounded.reads
    state, decisions = bounded.init(1, torch.device("cpu")), []
    for depth in (1, 2, 3, 4, 5):
        state, go_on = bounded.read(step_of([0.5, 0.5], 0, depth), state)
        decisions.append(bool(go_on))
    assert decisions == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Fixed(-1), "policy.num_drafted: expected at least 0, got -1"),
        (lambda: Confidence(1.5), "policy.threshold: expected a probability"),
        (lambda: Survival(ReadScore(), 0.5, lag=2), "policy.lag: expected one of 0, 1, got 2"),
        (lambda: Bounded(Fixed(1), -1, 2), "min_drafted"),
    ],
)
def test_bad_settings_are_refused(build, words):
    with pytest.raises(InputError, match=words):
        build()


class DrawnScores(ReadScore):
    """An estimator for tests: the state's two entries are P(y_k accepted) and P(y_{k+1} accepted)."""

    def drawn_probs(self, step: DraftStep) -> tuple[torch.Tensor, torch.Tensor]:
        return step.hidden[:, 0], step.hidden[:, 1]

    def prob(self, match: Match, depth: int) -> torch.Tensor:
        return match.agreement


def go_on(policy: StoppingPolicy, state: dict, depth: int, accepted: float, following: float) -> tuple[dict, bool]:
    step = step_of([0.5, 0.5], 0, depth)
    step.hidden = torch.tensor([[accepted, following]])
    state, go = policy.step(step, state)
    return state, bool(go)


def test_rate_drafts_while_the_next_token_is_worth_its_forward():
    policy = Rate(DrawnScores(), cost_ratio=0.2, rate=2.0)  # lambda c = .4
    assert not policy.uses_history and policy.level == pytest.approx(0.4)
    state, go = go_on(policy, policy.init(1, torch.device("cpu")), 1, 0.9, 0.5)  # .45
    assert go
    state, go = go_on(policy, state, 2, 0.9, 0.45)  # .81 * .45 = .36
    assert not go
    state = policy.observe(*verdict_of(2, 2), state)
    assert go_on(policy, state, 1, 1.0, 0.41)[1] and not go_on(policy, state, 1, 1.0, 0.39)[1]


def test_a_tracked_rate_is_the_prompts_tokens_over_its_cost():
    policy = Rate(DrawnScores(), cost_ratio=0.2, initial_rate=2.0, memory=10.0)
    assert policy.uses_history
    state = policy.init(1, torch.device("cpu"))
    assert go_on(policy, state, 1, 1.0, 0.41)[1] and not go_on(policy, state, 1, 1.0, 0.39)[1]
    for _ in range(200):  # 5 tokens for 1 + 4 * .2
        state = policy.observe(*verdict_of(4, 4), state)
    rate = (2.0 * 10 + 200 * 5) / (10 + 200 * 1.8)
    assert go_on(policy, state, 1, 1.0, 0.2 * rate + 0.01)[1] and not go_on(policy, state, 1, 1.0, 0.2 * rate - 0.01)[1]
    for wrong in (
        {"rate": 0.0},
        {"cost_ratio": -1.0},
        {"memory": 0.0},
        {"initial_rate": 0.0},
        {"initial_rate": 1e300},
        {"memory": 1e39},
    ):
        (name,) = wrong
        with pytest.raises(InputError, match=rf"policy\.{name}: expected"):
            Rate(DrawnScores(), **wrong)


def test_a_tracked_rate_counts_the_drafts_forward_passes_not_its_tokens():
    """The branches of a tree are drafted side by side."""
    policy = Rate(DrawnScores(), cost_ratio=0.2, initial_rate=2.0, memory=10.0)
    proposal, verdict = verdict_of(6, 2)
    tree = replace(proposal, num_calls=torch.tensor([2]))
    state = policy.observe(tree, verdict, policy.init(1, torch.device("cpu")))
    assert float(state["tokens"]) == 2.0 * 10 + 3 and float(state["cost"]) == pytest.approx(10 + 1 + 2 * 0.2)


def test_rate_with_an_acceptance_head_is_the_survival_rule_at_the_threshold_of_theory(tiny_pair, tmp_path):
    from toolkit import ModelPair
    from toolkit.acceptance import AcceptanceHead, HeadEstimator, PrereadEstimator

    pair = ModelPair.from_pretrained(target=str(tiny_pair / "target"), draft=str(tiny_pair / "draft"))
    torch.manual_seed(0)
    folder = str(AcceptanceHead(16, log_w_rej=0.5).save(tmp_path / "head"))
    rate = Rate(PrereadEstimator(folder), cost_ratio=0.25, rate=1.4).bind(pair)
    survival = Survival(HeadEstimator(folder, corrected=True), threshold=1 - 1.4 * 0.25).bind(pair)
    states, decisions = [policy.init(64, torch.device("cpu")) for policy in (rate, survival)], []
    generator = torch.Generator().manual_seed(1)
    for depth in range(1, 6):
        logits = torch.randn(64, 7, generator=generator)
        hidden = torch.randn(64, 16, generator=generator)
        step = DraftStep(depth, logits, logits.softmax(-1), hidden, torch.zeros(64, dtype=torch.long))
        for i, policy in enumerate((rate, survival)):
            states[i], go = policy.step(step, states[i])
            decisions.append(go)
        assert torch.equal(decisions[-1], decisions[-2])
    assert 0 < int(decisions[2].sum()) < 64  # at depth 2


@pytest.mark.parametrize(("ratio", "column"), [(0.35, 0.1), (0.1, 0.0)])
def test_a_text_begins_at_the_rate_of_the_best_fixed_depth(ratio, column, tmp_path):
    """A lambda of 2 drafted nothing where drafts are dear, though the best fixed depth made 1.5."""
    costs = LoadCost.ratio(ratio, column).save(tmp_path / "costs.json")
    policy = Rate(DrawnScores(), costs=str(costs), acceptance=0.85).within(8).bind(ModelPair.toy())
    depths = range(9)
    tokens = [sum(0.85**k for k in range(depth + 1)) for depth in depths]
    expected = max(made / (1 + depth * (ratio + column)) for made, depth in zip(tokens, depths, strict=True))
    state = policy.init(1, torch.device("cpu"))
    assert float(policy.reached(state)) == pytest.approx(expected)
    assert bool(policy.begin(torch.tensor([True]), state)[1])
    assert float(policy.reached(replace(policy, initial_rate=3.0).init(1, torch.device("cpu")))) == pytest.approx(3)

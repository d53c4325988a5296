"""Replay against the live loop: forced with the recorded tokens and acceptance draws count for count, free at temperature 0."""

import numpy as np
import pytest
import torch

from analysis.replay.calibrating import Scored
from analysis.replay.policies import replay, replay_starts, sweep_levels, walk
from analysis.replay.recorded_heads import RecordedScorer, with_recorded_heads
from data_gen.held_out import load_frozen
from data_gen.recording import Recorder
from toolkit import ModelPair, config
from toolkit.acceptance import HeadEstimator
from toolkit.acceptance.folder import recorded_scorers
from toolkit.decoding import Method, decode
from toolkit.decoding.proposers import ChainProposer
from toolkit.errors import InputError
from toolkit.sampling import Sampling
from toolkit.stopping import Bounded, Confidence, Fixed, Heuristic, Survival, Svip, Tail
from toolkit.trace import Trace, join
from toolkit.trace.rounds import Geometry, step_at
from toolkit.trace.step import RecordedStep
from toolkit.types import Counts, Verdict
from toolkit.verification import TextRule

POLICIES = [
    name
    for name in config.choices("stopping")
    if not name.startswith("batch_rate") and name not in ("lookup_rate", "best_source")
]  # a batch's: tests/analysis/loads; of copies: tests/toolkit/test_prompt_lookup.py; test_best_source.py
SAMPLINGS = {
    "sampled": Sampling(temperature=1.0, max_new_tokens=40),
    "warped": Sampling(temperature=0.5, top_k=50, top_p=0.95, max_new_tokens=40),
    "greedy": Sampling(temperature=0.0, max_new_tokens=40),
    "stopped": Sampling(temperature=0.7, repetition_penalty=1.3, stop=("\n", "re", "="), max_new_tokens=40),
    "greedy_stopped": Sampling(temperature=0.0, repetition_penalty=1.3, stop=("\n", "re", "="), max_new_tokens=40),
}
MAX_DRAFTED = 10


@pytest.fixture(scope="module")
def pair():
    return ModelPair.toy()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) if name == "warped" else name for name in SAMPLINGS],
)
def recorded(request, pair):
    sampling = SAMPLINGS[request.param]
    prompts = [e.prompt for domain in ("math", "code") for e in load_frozen(domain, "dev")[:3]]
    generations = decode(pair, prompts, config.method("autoregressive"), sampling)
    texts = [(g.prompt_ids, g.token_ids) for g in generations]
    scorers = recorded_scorers(pair, {"own": pair.head})
    recorder = Recorder(pair, sampling, MAX_DRAFTED, scorers, hidden=True)
    return request.param, texts, recorder.record(texts, range(len(texts)))


class ForcedProposer(ChainProposer):
    """Draws what the trace says."""

    def __init__(self, trace, text, num_prompt):
        self.trace, self.geometry = trace, Geometry.of(trace)
        self.first, self.num_prompt = int(trace.text_first[text]), num_prompt

    def propose(self, context, policy, state):
        (_, counts), session = context.unread(0), context.sessions[0]
        self.start = self.first + session.lengths[0] + counts[0] - self.num_prompt
        return super().propose(context, policy, state)

    def draw(self, context, depth, probs):
        run = int(min(self.geometry.run[self.start], self.geometry.left[self.start] - 1))
        place = self.start + min(run, depth - 1)
        token = (
            self.trace.tokens[place]
            if depth <= run + 1
            else self.trace.tokens[int(self.trace.roll_first[place]) + depth - run - 2]
        )
        assert depth <= run + 1 or depth - run - 2 < int(self.trace.roll_length[place])
        assert probs[0, int(token)] > 0
        return torch.tensor([int(token)])


class ForcedRule(TextRule):
    """Accepts by the recorded acceptance draws and emits the recorded text."""

    lossless, schemes = True, ("iid",)

    def __init__(self, proposer, produced):
        self.proposer, self.produced = proposer, produced

    def verify(self, proposal, target_probs, uniforms):
        run = self.proposer.geometry.run[self.proposer.start]
        length = torch.minimum(proposal.num_drafted, run)
        extra = self.proposer.start - self.proposer.first + int(length)
        token = self.produced[extra] if extra < len(self.produced) else 0
        path = torch.arange(max(proposal.num_nodes, 1)).unsqueeze(0)
        bonus = length == proposal.num_drafted
        return Verdict(path, length, torch.tensor([token]), bonus, torch.tensor([True]))


def forced_counts(pair, method, trace, texts, sampling):
    counts = []
    for number, (prompt, produced) in enumerate(texts):
        if not pair.drafts or not produced:
            continue
        proposer = ForcedProposer(trace, number, len(prompt))
        forced = Method(
            "forced", method.policy, ForcedRule(proposer, produced), proposer, method.min_drafted, method.max_drafted
        )
        (generation,) = decode(pair, [prompt], forced, sampling)
        assert generation.token_ids == produced
        counts.append(generation.counts)
    return counts


def bounded(method, pair):
    return with_recorded_heads(method.bind(pair).policy, {pair.head: "own"})


def per_text(replayed):
    return [
        Counts(*(int(replayed.counts[n][i]) for n in Counts.__dataclass_fields__))
        for i in range(len(replayed.counts["num_drafted"]))
    ]


def method_of(policy, overrides=()):
    """A chain with token-level rejection under any policy of conf/stopping/."""
    words = ["method=rate", f"stopping@method.policy={policy}", f"method.max_drafted={MAX_DRAFTED}"]
    return config.instantiate(config.compose("method_only", [*words, *(f"method.{word}" for word in overrides)]).method)


def policies():
    for name in POLICIES:
        yield name, []
    yield "fixed", ["policy.num_drafted=2"]
    yield "fixed", ["policy.num_drafted=8"]
    yield "survival", ["policy.threshold=0.3", "min_drafted=2"]
    yield "survival", ["policy.lag=0"]


def replay_plain(trace, go_on, max_drafted):
    """A policy as a plain function of (step, depth) -> draft another?, called step by step. Slow, and easy to check."""
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


@pytest.mark.parametrize(("name", "overrides"), list(policies()))
def test_forced_live_decoding_equals_replay_count_for_count(recorded, pair, name, overrides):
    label, texts, trace = recorded
    method = method_of(name, overrides)
    live = forced_counts(pair, method, trace, texts, SAMPLINGS[label])
    assert per_text(replay(trace, bounded(method, pair))) == live


@pytest.mark.parametrize("recorded", ["greedy", "greedy_stopped"], indirect=True)
@pytest.mark.parametrize("name", POLICIES)
def test_greedy_live_decoding_equals_replay_exactly(recorded, pair, name):
    label, texts, trace = recorded
    method = method_of(name)
    live = decode(pair, [prompt for prompt, _ in texts], method, SAMPLINGS[label])
    assert [g.token_ids for g in live] == [produced for _, produced in texts]
    assert per_text(replay(trace, bounded(method, pair))) == [g.counts for g in live]


@pytest.mark.parametrize("recorded", ["stopped"], indirect=True)
def test_a_draft_goes_on_behind_the_stop_string_that_ends_the_text(recorded):
    _, _, trace = recorded
    last = trace.text_first[1:] - 1
    behind = trace.roll_length[last][trace.accepted[last]]
    assert bool((behind > 0).any()), (
        "no text ends by an accepted token: the tests of this recording show less than they say"
    )
    most = replay(trace, Bounded(Fixed(8), 1, 8))
    assert most.counts["num_discarded"].sum() > replay(trace, Bounded(Fixed(1), 1, 1)).counts["num_discarded"].sum()


@pytest.mark.parametrize("recorded", ["stopped"], indirect=True)
@pytest.mark.parametrize("name", ["own", "own.preread"])
def test_calibrations_leave_out_what_the_target_never_judged(recorded, name):
    _, _, trace = recorded
    scored = Scored(trace, trace.estimates[name], preread=name != "own")
    for depth, product, label in scored.products(torch.sigmoid, 6):
        assert len(product) and bool(label.isfinite().all()), depth


def test_the_three_ways_agree(recorded):
    _, _, trace = recorded
    for policy in (Fixed(3), Confidence(0.6), Tail(0.3)):
        limited = Bounded(policy, 1, MAX_DRAFTED)
        rounds, starts = replay(trace, limited), replay_starts(trace, limited)
        for name in rounds.counts:
            assert np.array_equal(rounds.counts[name], starts.counts[name])
        assert np.array_equal(rounds.accepted, starts.accepted)
        assert np.array_equal(rounds.lengths, starts.lengths)
        assert np.array_equal(rounds.reached, starts.reached)
        assert np.array_equal(rounds.passed, starts.passed)
    for policy in (
        Confidence(0.6),
        Tail(0.3),
        Svip(0.4),
        Survival(HeadEstimator("own", scorer=RecordedScorer("own")), 0.4),
    ):
        (swept,) = sweep_levels(trace, policy, [policy.level], max_drafted=MAX_DRAFTED)
        alone = replay(trace, Bounded(policy, 1, MAX_DRAFTED))
        for name in alone.counts:
            assert np.array_equal(swept.counts[name], alone.counts[name])
    plain = replay_plain(trace, lambda step, depth: float(step.token_prob) >= 0.6, MAX_DRAFTED)
    same = replay_starts(trace, Bounded(Confidence(0.6), 1, MAX_DRAFTED))
    assert plain.total == same.total


def test_counts_obey_the_identity_and_lengths_add_up(recorded):
    _, texts, trace = recorded
    for policy in (Bounded(Fixed(4), 1, 10), Bounded(Heuristic(), 1, 10), Bounded(Fixed(0), 0, 0)):
        found = replay(trace, policy)
        total = found.total
        assert total.num_drafted + total.num_target_calls == total.num_generated + total.num_discarded
        assert total.num_generated == sum(len(produced) for _, produced in texts)
        assert found.lengths.sum() == total.num_target_calls
        assert (found.lengths * np.arange(len(found.lengths))).sum() == total.num_drafted
        assert (found.passed <= found.reached).all()


def test_a_trace_survives_its_file_and_being_joined(recorded, tmp_path, pair):
    label, texts, trace = recorded
    loaded = Trace.load(trace.save(tmp_path / "t.safetensors"))
    assert loaded.max_drafted == trace.max_drafted
    recorder = Recorder(pair, SAMPLINGS[label], MAX_DRAFTED, recorded_scorers(pair, {"own": pair.head}), hidden=True)
    halves = join([recorder.record(texts[:2], range(2)), recorder.record(texts[2:], range(2, len(texts)))])
    for policy in (Bounded(Fixed(5), 1, 10), Bounded(Confidence(0.5), 1, 10)):
        whole = per_text(replay(trace, policy))
        assert per_text(replay(loaded, policy)) == whole
        assert per_text(replay(halves, policy)) == whole


def test_bad_input_is_named(recorded, pair, tmp_path):
    _, texts, trace = recorded
    with pytest.raises(InputError, match="recorded for 10"):
        replay(trace, Bounded(Fixed(11), 1, 20))
    with pytest.raises(InputError, match="recorded for 10"):
        sweep_levels(trace, Confidence(), [0.5], max_drafted=11)
    with pytest.raises(InputError, match="remembers earlier rounds"):
        replay_starts(trace, Bounded(Heuristic(), 1, 10))
    with pytest.raises(InputError, match="holds no estimates of other"):
        replay(trace, Bounded(Survival(HeadEstimator("other", scorer=RecordedScorer("other"))), 1, 10))
    with pytest.raises(InputError, match="no trace|found none"):
        Trace.load(tmp_path / "none.safetensors")
    whole = trace.save(tmp_path / "cut.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="not a whole trace"):
        Trace.load(tmp_path / "cut.safetensors")
    greedy = Recorder(pair, Sampling(temperature=0.0, max_new_tokens=40), MAX_DRAFTED)
    prompt = texts[0][0]
    with pytest.raises(InputError, match="probability 0 under this target"):
        greedy.record([(prompt, [5] * 40)], [0])


@pytest.mark.parametrize("min_drafted", [1, 2, 4])
def test_levels_swept_at_once_are_policies_replayed_one_by_one(recorded, min_drafted):
    """A low score before the lower bound is not heard, and forgotten."""
    _, _, trace = recorded
    levels = [0.3, 0.6, 0.9]
    for level, found in zip(levels, sweep_levels(trace, Confidence(), levels, min_drafted), strict=True):
        alone = replay_starts(trace, Bounded(Confidence(level), min_drafted, MAX_DRAFTED))
        assert per_text(found) == per_text(alone)

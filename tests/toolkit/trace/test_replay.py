"""Replay against the live loop: forced with the recorded tokens and acceptance draws count for count, free at temperature 0.

The policies of the group `stopping` on a chain, and rounds that choose between the draft model and copies.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from data_gen.held_out import load_frozen
from toolkit import ModelPair, config
from toolkit.acceptance import HeadEstimator
from toolkit.acceptance.folder import head_hash
from toolkit.costs.table import CostTable
from toolkit.decoding import BestSourceProposer, Method, decode
from toolkit.decoding.proposers import ChainProposer
from toolkit.errors import InputError
from toolkit.sampling import Sampling
from toolkit.stopping import Bounded, Confidence, Fixed, Survival, Svip, Tail
from toolkit.trace.copies import Copies
from toolkit.trace.record import Recorder
from toolkit.trace.replay import by_rounds, by_starts, sweep_levels
from toolkit.trace.score import named_scorers
from toolkit.trace.steps import Geometry
from toolkit.types import Counts, Verdict
from toolkit.verification import TextRule

POLICIES = [
    name
    for name in config.choices("stopping")
    if not name.startswith("batch_") and name not in ("lookup_rate", "best_source", "block_budget", "tree_rate")
]  # trees are live; a batch's: tests/analysis/loads; of copies: tests/toolkit/test_prompt_lookup.py; best_source: below
SAMPLINGS = {
    "sampled": Sampling(temperature=1.0, max_new_tokens=40),
    "greedy": Sampling(temperature=0.0, max_new_tokens=40),
    "warped": Sampling(0.7, 50, 0.95, repetition_penalty=1.3, stop=("\n", "re", "="), max_new_tokens=40),
    "greedy_stopped": Sampling(temperature=0.0, repetition_penalty=1.3, stop=("\n", "re", "="), max_new_tokens=40),
}
MAX_DRAFTED = 10
sampled = pytest.mark.parametrize("recorded", ["sampled", "warped"], indirect=True)
greedy = pytest.mark.parametrize("recorded", ["greedy", "greedy_stopped"], indirect=True)


@pytest.fixture(scope="module")
def pair():
    return ModelPair.toy()


def prompts(count):
    return [e.prompt for domain in ("math", "code", "instruct") for e in load_frozen(domain, "dev")[:count]]


@pytest.fixture(scope="module")
def recorded(request, pair):
    sampling = SAMPLINGS[request.param]
    generations = decode(pair, prompts(2), config.method("autoregressive"), sampling)
    sequences = [(g.prompt_ids, g.token_ids) for g in generations]
    recorder = Recorder(
        pair, sampling, MAX_DRAFTED, named_scorers(pair, {head_hash(pair.head): pair.head}), hidden=True
    )
    return request.param, sequences, recorder.record(sequences, range(len(sequences)))


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


def forced_counts(pair, method, trace, sequences, sampling, proposer=ForcedProposer, rule=ForcedRule):
    counts = []
    for number, (prompt, produced) in enumerate(sequences):
        drafts = proposer(trace, number, len(prompt))
        forced = Method("forced", method.policy, rule(drafts, produced), drafts, method.min_drafted, method.max_drafted)
        (generation,) = decode(pair, [prompt], forced, sampling)
        assert generation.token_ids == produced
        counts.append(generation.counts)
    return counts


def bounded(method, pair):
    return method.bind(pair).policy


def per_text(replayed):
    return [
        Counts(*(int(replayed.counts[n][i]) for n in Counts.__dataclass_fields__))
        for i in range(len(replayed.counts["num_drafted"]))
    ]


def method_of(policy, overrides=()):
    """A chain with token-level rejection under any policy of the group `stopping`."""
    words = ["method=rate", f"stopping@method.policy={policy}", f"method.max_drafted={MAX_DRAFTED}"]
    return config.instantiate(config.compose("method_only", [*words, *(f"method.{word}" for word in overrides)]).method)


@sampled
@pytest.mark.parametrize(("name", "overrides"), [
    *((name, []) for name in POLICIES), ("fixed", ["policy.num_drafted=2"]), ("fixed", ["policy.num_drafted=8"]),
    ("survival", ["policy.threshold=0.3", "min_drafted=2"]), ("survival", ["policy.lag=0"]),
    ("rate", ["policy.costs=COSTS"]),
])  # fmt: skip
def test_forced_live_decoding_equals_replay_count_for_count(recorded, pair, name, overrides, tmp_path):
    label, sequences, trace = recorded
    costs = CostTable(1, (1, 2, 4), (0,), ((1.0, 1.6, 1.3),), (0.1,)).save(tmp_path / "costs.json")
    method = method_of(name, [word.replace("COSTS", str(costs)) for word in overrides])
    live = forced_counts(pair, method, trace, sequences, SAMPLINGS[label])
    assert per_text(by_rounds(trace, bounded(method, pair))) == live


BY_CONTEXT = CostTable(1, (1, 2, 4), (30, 80), ((1.0, 1.05, 1.1), (1.0, 1.9, 2.6)), (0.02, 0.5))


@sampled
def test_decisions_by_a_rows_context_are_replayed_and_need_the_prompts_lengths(recorded, pair, tmp_path):
    """A table by which drafting pays after few tokens and not after many; a recording of an older version has its middle."""
    label, sequences, trace = recorded
    costs = [f"policy.costs={BY_CONTEXT.save(tmp_path / 'costs.json')}"]
    rate, older = method_of("rate", costs), replace(trace, prompt_lengths=None)
    live = forced_counts(pair, rate, trace, sequences, SAMPLINGS[label])
    assert per_text(by_rounds(trace, bounded(rate, pair))) == live
    with pytest.warns(RuntimeWarning, match="does not hold the prompts' lengths"):
        assert per_text(by_rounds(older, bounded(rate, pair))) != live
    source = best_source("doubtful", costs)
    live = forced_counts(pair, source, trace, sequences, SAMPLINGS[label], ForcedBestSource, ForcedSource)
    assert per_text(replayed(pair, source, older, sequences, SAMPLINGS[label])) == live, "the texts tell"


@greedy
@pytest.mark.parametrize("name", POLICIES)
def test_greedy_live_decoding_equals_replay_exactly(recorded, pair, name):
    label, sequences, trace = recorded
    method = method_of(name)
    live = decode(pair, [prompt for prompt, _ in sequences], method, SAMPLINGS[label])
    assert [g.token_ids for g in live] == [produced for _, produced in sequences]
    assert per_text(by_rounds(trace, bounded(method, pair))) == [g.counts for g in live]


@pytest.mark.parametrize("recorded", ["warped"], indirect=True)
def test_a_draft_goes_on_behind_the_stop_string_that_ends_the_text(recorded):
    _, _, trace = recorded
    last = trace.text_first[1:] - 1
    behind = trace.roll_length[last][trace.accepted[last]]
    assert bool((behind > 0).any()), (
        "no text ends by an accepted token: the tests of this recording show less than they say"
    )
    most = by_rounds(trace, Bounded(Fixed(8), 1, 8))
    assert most.counts["num_discarded"].sum() > by_rounds(trace, Bounded(Fixed(1), 1, 1)).counts["num_discarded"].sum()


@sampled
def test_the_three_ways_agree(recorded, pair):
    _, _, trace = recorded
    survival = Survival(HeadEstimator(), 0.4).bind(pair)
    for policy in (Confidence(0.6), Tail(0.3), Svip(0.4), survival):
        limited = Bounded(policy, 1, MAX_DRAFTED)
        alone, (swept,) = (
            by_rounds(trace, limited),
            sweep_levels(trace, policy, [policy.level], max_drafted=MAX_DRAFTED),
        )
        for other in (swept, by_starts(trace, limited)):
            assert per_text(other) == per_text(alone)
            for name in ("accepted", "lengths", "reached", "passed"):
                assert np.array_equal(getattr(other, name), getattr(alone, name)), name


# -- rounds that choose their source ----------------------------------------------------------------------------------

SETTINGS = {
    "defaults": [],
    "dear draft": ["method.policy.cost_ratio=.6"],
    "free columns": ["method.policy.column_cost=0", "method.policy.cost_ratio=.4", "method.policy.acceptance=.9",
                     "method.max_drafted=4"],
    "doubtful": ["method.policy.acceptance=.2", "method.policy.evidence=40"],
    "at least two": ["method.min_drafted=2", "method.policy.cost_ratio=.4"],
    "heads": ["~method.policy.estimator",
              "+method.policy.estimator={_target_: toolkit.acceptance.PrereadEstimator, head: null}"],
}  # fmt: skip


def best_source(setting, overrides=()):
    words = ["method=best_source", f"method.max_drafted={MAX_DRAFTED}", *SETTINGS[setting]]
    words += [f"method.{word}" for word in overrides]
    return config.instantiate(config.compose("method_only", words).method)


class ForcedBestSource(ForcedProposer, BestSourceProposer):
    """Draws what the trace says where the draft model draws."""

    def __init__(self, trace, text, num_prompt):
        ForcedProposer.__init__(self, trace, text, num_prompt)
        self.copies = BestSourceProposer().copies


class ForcedSource(ForcedRule):
    """Accepts a draft by the recorded draws, a copy where the text has it."""

    def verify(self, proposal, target_probs, uniforms):
        verdict = super().verify(proposal, target_probs, uniforms)
        if int(proposal.num_calls) > 0:
            return verdict
        start = self.proposer.start - self.proposer.first
        copied, rest = proposal.tokens[0, : int(proposal.num_drafted)].tolist(), self.produced[start:]
        length = 0
        while length < min(len(copied), len(rest)) and copied[length] == rest[length]:
            length += 1
        token = rest[length] if length < len(rest) else 0
        return type(verdict)(verdict.path, torch.tensor([length]), torch.tensor([token]), verdict.bonus, verdict.valid)


def replayed(pair, method, trace, sequences, sampling):
    bound = method.bind(pair)
    copies = Copies(bound.proposer.copies, sequences, bound.limit, sampling.max_new_tokens, pair.ends(sampling))
    return by_rounds(trace, bound.policy, copies)


@sampled
@pytest.mark.parametrize("setting", SETTINGS)
def test_forced_rounds_of_either_source_equal_replay(recorded, pair, setting):
    label, sequences, trace = recorded
    method, sampling = best_source(setting), SAMPLINGS[label]
    live = forced_counts(pair, method, trace, sequences, sampling, ForcedBestSource, ForcedSource)
    assert per_text(replayed(pair, method, trace, sequences, sampling)) == live


@greedy
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_rounds_of_either_source_equal_replay(recorded, pair, setting):
    label, sequences, trace = recorded
    method = best_source(setting)
    live = decode(pair, [prompt for prompt, _ in sequences], method, SAMPLINGS[label])
    assert [g.token_ids for g in live] == [produced for _, produced in sequences]
    assert per_text(replayed(pair, method, trace, sequences, SAMPLINGS[label])) == [g.counts for g in live]
    if (setting, label) == ("free columns", "greedy"):
        rounds = [r for g in live for r in g.rounds]
        assert sum(r.num_draft_calls > 0 for r in rounds) > 5
        assert sum(r.num_draft_calls == 0 and r.num_drafted > 0 for r in rounds) > 5


@pytest.mark.parametrize("recorded", ["greedy"], indirect=True)
def test_a_recording_without_the_texts_is_refused(pair, recorded):
    _, _, trace = recorded
    policy = best_source("defaults").bind(pair).policy
    with pytest.raises(InputError, match="decides on copied tokens, and a recording holds none"):
        by_rounds(trace, policy)
    with pytest.raises(InputError, match="remembers earlier rounds"):
        by_starts(trace, policy)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["defaults", "free columns"])
def test_sampled_live_decoding_counts_as_replay_does(pair, setting):
    """At T = 1, with draws and texts of their own: means over prompts of every count lie within four standard errors."""
    sampling, method = Sampling(max_new_tokens=48), best_source(setting)
    generations = decode(pair, prompts(24), config.method("autoregressive"), sampling, batch_size=24)
    sequences = [(g.prompt_ids, g.token_ids) for g in generations]
    trace = Recorder(pair, sampling, MAX_DRAFTED).record_all(sequences, range(len(sequences)))
    replays = replayed(pair, method, trace, sequences, sampling)
    live = decode(pair, prompts(24), method, replace(sampling, seed=7), batch_size=24)
    counts = {name: [getattr(g.counts, name) for g in live] for name in replays.counts}
    counts |= {name: [sum(f"{r.source}_rounds" == name for r in g.rounds) for g in live] for name in replays.sources}
    for name, values in counts.items():
        difference = np.array(values) - {**replays.counts, **replays.sources}[name]
        error = difference.std(ddof=1) / len(live) ** 0.5
        assert abs(difference.mean()) < 4 * error, f"{name}: {difference.mean():.3f} +- {error:.3f}"
    assert sum(counts["copy_rounds"]) > 50 < sum(counts["draft_rounds"])

"""Replay of rounds that choose their source, against the live loop with the recorded draws, and freely at temperature 0."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.replay.policies import replay, replay_starts
from analysis.replay.prompt_lookup import Copies
from analysis.replay.recorded_heads import with_recorded_heads
from data_gen.held_out import load_frozen
from data_gen.recording import Recorder
from tests.analysis.replay.test_policies import MAX_DRAFTED, SAMPLINGS, ForcedProposer, ForcedRule, per_text
from toolkit import ModelPair, config
from toolkit.acceptance.folder import recorded_scorers
from toolkit.decoding import BestSourceProposer, Method, decode
from toolkit.errors import InputError
from toolkit.sampling import Sampling

SETTINGS = {
    "defaults": [],
    "dear draft": ["policy.cost_ratio=.6"],
    "free columns": ["policy.column_cost=0", "policy.cost_ratio=.4", "policy.acceptance=.9", "max_drafted=4"],
    "doubtful": ["policy.acceptance=.2", "policy.evidence=40"],
    "at least two": ["min_drafted=2", "policy.cost_ratio=.4"],
    "heads": ["~policy.estimator", "+policy.estimator={_target_: toolkit.acceptance.PrereadEstimator, head: null}"],
}


def method_of(label):
    words = [
        f"~method.{w[1:]}" if w[0] == "~" else f"+method.{w[1:]}" if w[0] == "+" else f"method.{w}"
        for w in SETTINGS[label]
    ]
    bound = (
        [] if any(word.startswith("method.max_drafted") for word in words) else [f"method.max_drafted={MAX_DRAFTED}"]
    )
    return config.instantiate(config.compose("method_only", ["method=best_source", *bound, *words]).method)


@pytest.fixture(scope="module")
def pair():
    return ModelPair.toy()


@pytest.fixture(scope="module", params=["sampled", "greedy", "stopped", "greedy_stopped"])
def recorded(request, pair):
    sampling = SAMPLINGS[request.param]
    prompts = [e.prompt for domain in ("math", "code", "instruct") for e in load_frozen(domain, "dev")[:2]]
    generations = decode(pair, prompts, config.method("autoregressive"), sampling)
    texts = [(g.prompt_ids, g.token_ids) for g in generations]
    recorder = Recorder(pair, sampling, MAX_DRAFTED, recorded_scorers(pair, {"own": pair.head}), hidden=True)
    return request.param, texts, recorder.record(texts, range(len(texts)))


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


def forced_counts(pair, method, trace, texts, sampling):
    counts = []
    for number, (prompt, produced) in enumerate(texts):
        proposer = ForcedBestSource(trace, number, len(prompt))
        rule = ForcedSource(proposer, produced)
        forced = Method("forced", method.policy, rule, proposer, method.min_drafted, method.max_drafted)
        (generation,) = decode(pair, [prompt], forced, sampling)
        assert generation.token_ids == produced
        counts.append(generation.counts)
    return counts


def replayed(pair, method, trace, texts, sampling):
    bound = method.bind(pair)
    copies = Copies(bound.proposer.copies, texts, bound.limit, sampling.max_new_tokens, pair.ends(sampling))
    return replay(trace, with_recorded_heads(bound.policy, {pair.head: "own"}), copies)


@pytest.mark.parametrize("setting", SETTINGS)
def test_forced_live_decoding_equals_replay_count_for_count(recorded, pair, setting):
    label, texts, trace = recorded
    method = method_of(setting)
    found = replayed(pair, method, trace, texts, SAMPLINGS[label])
    assert per_text(found) == forced_counts(pair, method, trace, texts, SAMPLINGS[label])


@pytest.mark.parametrize("recorded", ["greedy", "greedy_stopped"], indirect=True)
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_live_decoding_equals_replay_exactly(recorded, pair, setting):
    label, texts, trace = recorded
    method = method_of(setting)
    live = decode(pair, [prompt for prompt, _ in texts], method, SAMPLINGS[label])
    assert [g.token_ids for g in live] == [produced for _, produced in texts]
    found = replayed(pair, method, trace, texts, SAMPLINGS[label])
    assert per_text(found) == [g.counts for g in live]
    by_draft, copied = ([sum(pick(r) for r in g.rounds) for g in live] for pick in (
        lambda r: r.num_draft_calls > 0, lambda r: r.num_draft_calls == 0 and r.num_drafted > 0
    ))  # fmt: skip
    if (setting, label) == ("free columns", "greedy"):
        assert sum(by_draft) > 5 and sum(copied) > 5


def test_a_recording_without_the_texts_is_refused(pair, recorded):
    _, _, trace = recorded
    policy = method_of("defaults").bind(pair).policy
    with pytest.raises(InputError, match="decides on copied tokens, and a recording holds none"):
        replay(trace, policy)
    with pytest.raises(InputError, match="remembers earlier rounds"):
        replay_starts(trace, policy)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["defaults", "free columns"])
def test_sampled_live_decoding_counts_as_replay_does(pair, setting):
    """At T = 1, with draws and texts of their own: means over prompts of every count lie within four standard errors."""
    sampling, method = Sampling(max_new_tokens=48), method_of(setting)
    prompts = [e.prompt for domain in ("math", "code", "instruct") for e in load_frozen(domain, "dev")[:24]]
    generations = decode(pair, prompts, config.method("autoregressive"), sampling, batch_size=24)
    texts = [(g.prompt_ids, g.token_ids) for g in generations]
    trace = Recorder(pair, sampling, MAX_DRAFTED).record_all(texts, range(len(texts)))
    found = replayed(pair, method, trace, texts, sampling)
    live = decode(pair, prompts, method, replace(sampling, seed=7), batch_size=24)
    counts = {name: [getattr(g.counts, name) for g in live] for name in found.counts}
    counts |= {name: [sum(f"{r.source}_rounds" == name for r in g.rounds) for g in live] for name in found.sources}
    for name, values in counts.items():
        difference = np.array(values) - {**found.counts, **found.sources}[name]
        error = difference.std(ddof=1) / len(prompts) ** 0.5
        assert abs(difference.mean()) < 4 * error, f"{name}: {difference.mean():.3f} +- {error:.3f}"
    assert sum(counts["copy_rounds"]) > 50 < sum(counts["draft_rounds"])

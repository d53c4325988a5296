"""The depth in the round as an input of heads: drawn for training, computed per start and depth for replays, known live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from analysis.replay.policies import replay, replay_rounds, replay_starts
from analysis.replay.recorded_heads import scorer_of, threshold_policy, with_logits, with_recorded_heads
from data_gen.held_out import load_frozen
from data_gen.recording import Recorder
from toolkit import ModelPair
from toolkit.acceptance import AcceptanceHead, HeadEstimator, PrereadEstimator, PrereadHead, from_states
from toolkit.acceptance.folder import scorer
from toolkit.acceptance.inputs import Inputs
from toolkit.acceptance.preread import embedding_table
from toolkit.config import method
from toolkit.decoding import Method, decode
from toolkit.errors import InputError
from toolkit.sampling import Sampling
from toolkit.stopping import Bounded, Rate, Survival
from toolkit.trace import join
from toolkit.trace.rounds import Geometry, logits_at, step_at
from toolkit.trace.step import RecordedStep
from toolkit.training.recorded import TracedStates, drawn_depths
from toolkit.types import Generation
from toolkit.verification.rules.rejection import Rejection

MOST = 8
GREEDY = Sampling(temperature=0.0, max_new_tokens=40)


@pytest.fixture(scope="module")
def pair():
    return ModelPair.toy()


@pytest.fixture(scope="module")
def folder(pair, tmp_path_factory):
    """Both heads of the toy draft, the depth weighing much."""
    torch.manual_seed(5)
    place = tmp_path_factory.mktemp("depth") / "head"
    preread = PrereadHead(96, 96, width=16, earlier=2, likelihood=True, round_depth=5)
    for parameter in preread.parameters():
        parameter.data *= 1.7
    preread.layers[0].weight.data[:, -5:] *= 20
    preread.layers[-1].bias.data += 1.5
    survival = AcceptanceHead(96, depth=1, round_depth=5)
    read = survival.readout.weight.data[0]
    survival.more.weight.data = torch.outer(read / read.square().sum(), torch.tensor([4.0, 2.0, 0.0, -1.0, -3.0]))
    preread.save(place)
    return str(survival.save(place))


@pytest.fixture(scope="module")
def texts(pair):
    asked = [load_frozen(domain, "dev")[i].prompt for domain in ("instruct", "math", "code") for i in range(2)]
    return asked, decode(pair, asked, method("autoregressive"), GREEDY)


def policies(folder):
    for rate in (1.0, 2.5):
        yield Rate(PrereadEstimator(folder), 0.2, rate)
    for threshold, lag in ((0.3, 1), (0.6, 1), (0.6, 0)):
        yield Survival(HeadEstimator(folder, corrected=True), threshold, lag)


def lengths_alike(
    pair: Any,
    asked: Sequence[Any],
    plain: Sequence[Generation],
    trace: Any,
    policy: Bounded,
    names: Mapping[str, str],
    sampling: Sampling,
    batch_size: int,
) -> set[int]:
    """Asserts that tokens, drafted tokens, draft forwards and produced tokens are equal in every round; the draft lengths.

    plain  plain decoding's generations of `asked`, which the trace records;  names  of recorded heads, by folder
    """
    method = Method("m", policy, Rejection(), max_drafted=policy.max_drafted)
    live = decode(pair, asked, method, sampling, batch_size=batch_size)
    found: list[list[tuple[int, ...]]] = [[] for _ in asked]
    for text, _, drafted, calls, _, produced in replay_rounds(trace, with_recorded_heads(policy.bind(pair), names)):
        for number, *counts in zip(*(v.tolist() for v in (text, drafted, calls, produced)), strict=True):
            found[number].append(tuple(counts))
    for generation, other, rounds in zip(live, plain, found, strict=True):
        assert generation.token_ids == other.token_ids
        assert [(r.num_drafted, r.num_draft_calls, r.num_produced) for r in generation.rounds] == rounds
    return {one[0] for rounds in found for one in rounds}


def test_live_rounds_are_replayed_rounds(pair, folder, texts):
    """At temperature 0, where texts and drafts are certain: tokens and rounds are equal one by one, for both heads."""
    asked, plain = texts
    heads = {"mine": scorer(pair, folder, "survival"), "mine.preread": scorer(pair, folder, "preread")}
    trace = Recorder(pair, GREEDY, MOST, heads).record_all([(g.prompt_ids, g.token_ids) for g in plain], range(6))
    assert trace.estimates["mine.preread"].shape == (trace.num_positions, MOST + 1, 2)
    lengths = set()
    for policy in (Bounded(one, 1, MOST) for one in policies(folder)):
        lengths |= lengths_alike(pair, asked, plain, trace, policy, {folder: "mine"}, GREEDY, batch_size=4)
    assert len(lengths) > 4


@pytest.fixture(scope="module")
def trace(pair, texts):
    sampling = Sampling(temperature=1.0, max_new_tokens=24, seed=2)
    plain = decode(pair, texts[0], method("autoregressive"), sampling)
    return Recorder(pair, sampling, MOST, hidden=True, upper_bound=True).record_all(
        [(g.prompt_ids, g.token_ids) for g in plain], range(6)
    )


@pytest.mark.parametrize("kind", [PrereadHead, AcceptanceHead])
def test_recorded_logits_are_those_of_every_start_and_depth(pair, folder, trace, monkeypatch, kind):
    """Against a scorer asked directly, one step at a time; replays with either are the same."""
    monkeypatch.setattr(from_states, "CHUNK", 7)
    head, geometry = kind.load(folder)[0], Geometry.of(trace)
    direct = scorer_of(head, pair.draft)
    told = with_logits(trace, "x", direct)
    asked = 0
    for start in range(0, trace.num_positions, 5):
        for depth in range(1, MOST + 2):
            index, exists = step_at(trace, geometry, torch.tensor([start]), depth)
            expected = (
                direct(RecordedStep(trace, depth, index))
                if exists
                else torch.zeros_like(direct(RecordedStep(trace, 1, index)))
            )
            found = told.estimates["x"][start, depth - 1].view(expected.shape)
            torch.testing.assert_close(found, expected.float())
            asked += bool(exists)
    assert asked > 100 and trace.num_steps > trace.num_positions
    policy = threshold_policy(head, "x", corrected=True)
    policy = Rate(policy.estimator, 0.2, 2.0) if kind is PrereadHead else Survival(policy.estimator, 0.5)
    slow = replace(policy, estimator=replace(policy.estimator, scorer=direct))
    counted = [replay_starts(told, Bounded(one, 1, MOST)) for one in (policy, slow)]
    assert counted[0].total == counted[1].total == replay(told, Bounded(policy, 1, MOST)).total
    flat = replace(policy, estimator=replace(policy.estimator, scorer=lambda step: direct(replace(step, depth=2))))
    assert replay_starts(told, Bounded(flat, 1, MOST)).total != counted[0].total, "the depth matters"


def test_one_step_is_scored_for_every_round_that_visits_it(trace):
    geometry, starts = Geometry.of(trace), torch.arange(trace.num_positions)
    logits = torch.rand(trace.num_positions, MOST + 1, 2)
    for depth in range(1, MOST + 2):
        index, exists = step_at(trace, geometry, starts, depth)
        assert torch.equal(trace.step_positions[index][exists], starts[exists] + depth - 1)
        assert torch.equal(logits_at(trace, logits, index, depth)[exists], logits[exists, depth - 1])
    with pytest.raises(InputError, match="recorded up to depth 9, got 10: lower max_depth"):
        logits_at(trace, logits, starts, MOST + 2)


def test_traces_with_such_logits_are_joined_and_kept(pair, folder, trace, tmp_path):
    told = with_logits(trace, "x", scorer_of(PrereadHead.load(folder)[0], pair.draft))
    both = join([told, told])
    assert torch.equal(both.estimates["x"], told.estimates["x"].repeat(2, 1, 1))
    kept = type(told).load(told.save(tmp_path / "one.safetensors"))
    assert torch.equal(kept.estimates["x"], told.estimates["x"])


def test_depths_that_no_round_reaches_have_no_logits(pair, folder, trace):
    """Every draft rejected, and no roll-out: rounds end at depth 1."""
    none = torch.zeros_like(trace.accepted)
    alone = replace(trace, accepted=none, roll_length=torch.zeros_like(trace.roll_length))
    for kind in (PrereadHead, AcceptanceHead):
        found = with_logits(alone, "x", scorer_of(kind.load(folder)[0], pair.draft)).estimates["x"]
        assert found.shape[:2] == (trace.num_positions, MOST + 1) and found[:, 0].any() and not found[:, 1:].any()


# -- training ---------------------------------------------------------------------------------------------------------


def test_depths_follow_the_rounds_that_could_contain_a_position():
    """Against the definition, on two texts: one of draws, one of probabilities."""
    probs = torch.tensor([1.0, 1, 0, 1, 1, 1, 0.5, 0.25, 1, 0.5])
    first, most, draws = torch.tensor([0] * 6 + [6] * 4), 3, 20_000
    firsts = first + 10 * torch.arange(draws).unsqueeze(1)  # the same texts, again and again
    drawn = drawn_depths(probs.repeat(draws), firsts.flatten(), most, torch.Generator().manual_seed(0)).view(draws, 10)
    for place in range(10):
        begin = int(first[place])
        weights = [float(probs[place - d + 1 : place].prod()) if place - d + 1 >= begin else 0.0 for d in (1, 2, 3)]
        expected = torch.tensor(weights) / sum(weights)
        shares = torch.bincount(drawn[:, place], minlength=4)[1:] / draws
        assert torch.allclose(shares, expected, atol=0.015), place
    assert drawn[:, 5].max() == 3 and drawn[:, 3].unique().tolist() == [1]


def test_traced_positions_get_depths_of_their_own(pair, trace):
    inputs, table = Inputs(round_depth=4), embedding_table(pair.draft)
    size = Inputs().size(96, 96)
    one, other, plain = (
        TracedStates(trace, range(6), table, given, seed=s) for given, s in ((inputs, 0), (inputs, 1), (None, 0))
    )
    batch = one.batch([0, 3, 4])
    assert torch.equal(batch.hidden[:, :size], plain.batch([0, 3, 4]).hidden)
    depths = batch.hidden[:, size:]
    assert torch.equal(depths.sum(1), torch.ones(len(depths))) and len(depths.argmax(1).unique()) == 4
    assert torch.equal(one.batch([4]).hidden, TracedStates(trace, range(6), table, inputs).batch([4]).hidden)
    assert not torch.equal(other.batch([0, 3, 4]).hidden, batch.hidden)
    firsts = [int(at) for at in trace.text_first[:-1]]
    assert all(one.depths[at] == 1 for at in firsts)
    behind = (~trace.accepted).nonzero().squeeze(1) + 1
    assert (one.depths[behind[behind < trace.num_positions]] == 1).all(), "no round goes on behind a rejection"


# -- files ------------------------------------------------------------------------------------------------------------


def test_heads_without_it_are_as_before(tmp_path):
    plain = AcceptanceHead(4, depth=1)
    assert plain.config == {"hidden_size": 4, "depth": 1, "tied": False, "log_w_rej": 0.0} and not plain.num_more
    assert "round_depth" not in PrereadHead(4, 3).config
    deep = AcceptanceHead(4, depth=1, round_depth=2)
    loaded, _ = AcceptanceHead.load(deep.save(tmp_path))
    values = torch.rand(3, 6)
    assert loaded.inputs.round_depth == 2 and torch.equal(loaded(values), deep(values))
    assert not torch.equal(loaded(values), plain(values[:, :4]))
    assert PrereadHead.load(PrereadHead(4, 3, round_depth=2).save(tmp_path))[0].inputs == Inputs(round_depth=2)

"""The depth in the round as an input of heads: drawn for training, computed per start and depth for replays, known live."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from analysis.replay.head_folders import threshold_policy
from data_gen.held_out import load_frozen
from tests.toolkit.acceptance.live_rounds import lengths_alike
from toolkit import ModelPair
from toolkit.acceptance import AcceptanceHead, HeadEstimator, PrereadEstimator, PrereadHead
from toolkit.acceptance.calibration.by_depth import ByDepth, Calibration
from toolkit.acceptance.folder import head_hash, scorer_with
from toolkit.acceptance.inputs import Inputs, depth_features
from toolkit.acceptance.preread import embedding_table
from toolkit.config import method
from toolkit.decoding import decode
from toolkit.errors import InputError
from toolkit.sampling import Sampling
from toolkit.stopping import Bounded, Rate, Survival
from toolkit.trace import join, score
from toolkit.trace.record import Recorder
from toolkit.trace.replay import by_rounds, by_starts
from toolkit.trace.score import named_scorers, with_logits
from toolkit.trace.steps import Geometry, RecordedStep, logits_at, step_at
from toolkit.training import MixedData
from toolkit.training.recorded import TracedStates, drawn_depths

MOST = 8
GREEDY = Sampling(temperature=0.0, max_new_tokens=40)


@pytest.fixture(scope="module")
def pair():
    return ModelPair.toy()


@pytest.fixture(scope="module")
def folder(pair, tmp_path_factory):
    """Both heads of the toy draft, the depth weighing much, and a calibration by depth."""
    torch.manual_seed(5)
    place = tmp_path_factory.mktemp("depth") / "head"
    preread = PrereadHead(96, 96, width=16, earlier=1, round_depth=5)
    for parameter in preread.parameters():
        parameter.data *= 1.7
    preread.layers[0].weight.data[:, -5:] *= 20
    preread.layers[-1].bias.data += 1.5
    survival = AcceptanceHead(96, depth=1, round_depth=5)
    weights = survival.readout.weight.data[0]
    survival.more.weight.data = torch.outer(weights / weights.square().sum(), torch.tensor([4.0, 2.0, 0.0, -1.0, -3.0]))
    preread.save(place)
    drawn, read = ByDepth((0.9, 1.1, 0.8), (0.1, -0.2, 0.4)), ByDepth((1.1, 0.9), (-0.2, 0.2))
    Calibration({"drawn": drawn, "following": read, "read": read}).save(place)
    return str(survival.save(place))


@pytest.fixture(scope="module")
def sequences(pair):
    asked = [load_frozen(domain, "dev")[i].prompt for domain in ("instruct", "math", "code") for i in range(2)]
    return asked, decode(pair, asked, method("autoregressive"), GREEDY)


def policies(folder):
    for rate in (1.0, 2.5):
        yield Rate(PrereadEstimator(folder), 0.2, rate)
    for threshold, lag in ((0.3, 1), (0.6, 1), (0.6, 0)):
        yield Survival(HeadEstimator(folder, corrected=True), threshold, lag)


def test_live_rounds_are_replayed_rounds(pair, folder, sequences):
    """At temperature 0, where texts and drafts are certain: tokens and rounds are equal one by one, for both heads."""
    asked, plain = sequences
    heads = named_scorers(pair, {head_hash(folder): folder})
    trace = Recorder(pair, GREEDY, MOST, heads).record_all([(g.prompt_ids, g.token_ids) for g in plain], range(6))
    assert trace.head_logits(f"{head_hash(folder)}.preread").shape == (trace.num_positions, MOST + 1, 2)
    lengths = set()
    for policy in (Bounded(one, 1, MOST) for one in policies(folder)):
        lengths |= lengths_alike(pair, asked, plain, trace, policy, GREEDY, batch_size=4)
    assert len(lengths) > 4


@pytest.fixture(scope="module")
def trace(pair, sequences):
    sampling = Sampling(temperature=1.0, max_new_tokens=24, seed=2)
    plain = decode(pair, sequences[0], method("autoregressive"), sampling)
    return Recorder(pair, sampling, MOST, hidden=True, upper_bound=True).record_all(
        [(g.prompt_ids, g.token_ids) for g in plain], range(6)
    )


@dataclass(frozen=True)
class Direct:
    """An estimator whose head computes its logits on the recorded steps."""

    scorer: Any
    of: Any

    def bind(self, pair):
        return self

    def read_prob(self, step):
        return torch.sigmoid(self.scorer(step) + self.of.log_w_rej)

    def drawn_probs(self, step):
        return tuple(torch.sigmoid(self.scorer(step) + self.of.log_w_rej).unbind(-1))


@pytest.mark.parametrize("kind", [PrereadHead, AcceptanceHead])
def test_recorded_logits_are_those_of_every_start_and_depth(pair, folder, trace, monkeypatch, kind):
    """Against a scorer asked directly, one step at a time; replays with either are the same."""
    monkeypatch.setattr(score, "CHUNK", 7)
    head, geometry = kind.load(folder)[0], Geometry.of(trace)
    direct = scorer_with(head, pair.draft, "cpu")
    told = with_logits(trace, {head.key: direct})
    asked = 0
    for start in range(0, trace.num_positions, 5):
        for depth in range(1, MOST + 2):
            index, exists = step_at(trace, geometry, torch.tensor([start]), depth)
            expected = (
                direct(RecordedStep(trace, depth, index))
                if exists
                else torch.zeros_like(direct(RecordedStep(trace, 1, index)))
            )
            estimated = told.estimates[head.key][start, depth - 1].view(expected.shape)
            torch.testing.assert_close(estimated, expected.float())
            asked += bool(exists)
    assert asked > 100 and trace.num_steps > trace.num_positions
    policy = threshold_policy(head, corrected=True)
    policy = Rate(policy.estimator, 0.2, 2.0) if kind is PrereadHead else Survival(policy.estimator, 0.5)
    slow = replace(policy, estimator=Direct(direct, policy.estimator))
    counted = [by_starts(told, Bounded(one, 1, MOST)) for one in (policy, slow)]
    assert counted[0].total == counted[1].total == by_rounds(told, Bounded(policy, 1, MOST)).total
    flat = replace(policy, estimator=Direct(lambda step: direct(replace(step, depth=2)), policy.estimator))
    assert by_starts(told, Bounded(flat, 1, MOST)).total != counted[0].total, "the depth matters"


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
    told = with_logits(trace, {"x": scorer_with(PrereadHead.load(folder)[0], pair.draft, "cpu")})
    both = join([told, told])
    assert torch.equal(both.estimates["x"], told.estimates["x"].repeat(2, 1, 1))
    kept = type(told).load(told.save(tmp_path / "one.safetensors"))
    assert torch.equal(kept.estimates["x"], told.estimates["x"])


def test_depths_that_no_round_reaches_have_no_logits(pair, folder, trace):
    """Every draft rejected, and no roll-out: rounds end at depth 1."""
    none = torch.zeros_like(trace.accepted)
    alone = replace(trace, accepted=none, roll_length=torch.zeros_like(trace.roll_length))
    for kind in (PrereadHead, AcceptanceHead):
        estimated = with_logits(alone, {"x": scorer_with(kind.load(folder)[0], pair.draft, "cpu")}).estimates["x"]
        assert (
            estimated.shape[:2] == (trace.num_positions, MOST + 1)
            and estimated[:, 0].any()
            and not estimated[:, 1:].any()
        )


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


def test_cached_and_online_examples_of_mixed_texts_have_the_same_depths(tiny_mix, tiny_pair):
    from toolkit.models.pair import load_draft

    draft, head = load_draft(tiny_pair / "draft"), AcceptanceHead(16, round_depth=3)
    by_features = {}
    for features in ("online", "cached"):
        data = MixedData(tiny_mix, draft, features=features)
        plain = data.cache_folder
        data.read_by(head)
        assert data.cache_folder != plain
        data.prepare_data()
        data.setup()
        by_features[features] = data.states["train"].batch([0, 5, 2])
        assert head(by_features[features].hidden.float()).shape == by_features[features].labels.shape
    one = by_features["online"].hidden
    assert one.shape[1] == 19 and torch.equal(one[:, 16:].sum(1), torch.ones(len(one)))
    assert torch.equal(by_features["cached"].hidden[:, 16:].float(), one[:, 16:].float())
    torch.testing.assert_close(by_features["cached"].hidden.float(), one.float(), rtol=0, atol=1e-2)


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


def test_depths_are_one_hot_and_deeper_ones_count_as_the_last():
    like = torch.zeros(4, 2)
    assert depth_features(torch.tensor([1, 2, 3, 9]), 3, like).argmax(1).tolist() == [0, 1, 2, 2]
    assert depth_features(2, 3, like).tolist() == [[0, 1, 0]] * 4
    assert not depth_features(0, 3, like).any()

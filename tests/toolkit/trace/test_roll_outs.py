"""A cut recording begins a whole one: policies that it was made for count the same, others raise, and the rest is kept."""

from dataclasses import replace

import pytest
import torch

from toolkit import ModelPair, config
from toolkit.acceptance import AcceptanceHead
from toolkit.acceptance.folder import head_hash
from toolkit.decoding import decode
from toolkit.engine.tabular import TabularModel
from toolkit.errors import InputError
from toolkit.sampling import Sampling
from toolkit.trace import CutError, Trace, join
from toolkit.trace.bounds import true_probability
from toolkit.trace.record import Recorder, record_together
from toolkit.trace.replay import by_rounds, by_starts, carried, past_cuts, replay, sweep_levels
from toolkit.trace.steps import step_after
from toolkit.trace.store import Store
from toolkit.trace.view import token_rounds
from toolkit.training.recorded import ReadStates

MOST, END, COUNT = 9, 0, 20
SAMPLING = Sampling(max_new_tokens=24)
POSITIONS = ("accepted", "text_accept_prob", "target_entropy", "text_prob", "text_tokens")
STEPS = ("tokens", "draft_prob", "token_prob", "entropy", "top_probs", "accept_prob", "alpha", "hidden")


@pytest.fixture(scope="module")
def pair():
    generator = torch.Generator().manual_seed(3)
    target = TabularModel.random(8, 2, generator, sharpness=1.8)
    noise = torch.randn(target.probs.shape, generator=generator, dtype=torch.float64)
    return ModelPair(target=target, draft=TabularModel((target.probs.log() + noise).softmax(-1)), end_ids=(END,))


@pytest.fixture(scope="module")
def sequences(pair):
    prompts = [[1 + number % 7, 1 + number % 3] for number in range(COUNT)]
    return [(g.prompt_ids, g.token_ids) for g in decode(pair, prompts, config.method("autoregressive"), SAMPLING)]


@pytest.fixture(scope="module")
def patient(pair):
    return policy(pair, "confidence", threshold=0.25)


def policy(pair, name, **parameters):
    overrides = [f"policy.{key}={value}" for key, value in parameters.items()]
    return config.method(name, [f"max_drafted={MOST}", *overrides]).bind(pair).policy


def policies(pair):
    """With and without memory; none goes far."""
    options = {"confidence": {"threshold": 0.5}, "tail": {"threshold": 0.3}, "rate": {"cost_ratio": 0.4}}
    return [policy(pair, name, **options.get(name, {})) for name in ("svip", "dynamic_confidence", *options)]


@pytest.fixture(scope="module")
def whole(pair, sequences):
    return Recorder(pair, SAMPLING, MOST, hidden=True).record(sequences, range(COUNT))


@pytest.fixture(scope="module")
def cut(pair, sequences):
    recorder = Recorder(pair, SAMPLING, MOST, hidden=True, policies=policies(pair))
    return recorder.record(sequences, range(COUNT))


def same(one, other, names):
    for name in names:
        torch.testing.assert_close(getattr(one, name), getattr(other, name), equal_nan=True, msg=name)


def test_a_cut_recording_is_the_beginning_of_the_whole_one(pair, whole, cut):
    same(cut, whole, POSITIONS)
    assert whole.roll_cut is None and int(cut.roll_cut.sum()) > 20
    assert cut.num_positions < cut.num_steps < (cut.num_positions + whole.num_steps) / 2
    longer = whole.roll_length > cut.roll_length
    assert torch.equal(longer, cut.roll_cut), "what was not cut is whole"
    for position in (cut.roll_length > 0).nonzero().squeeze(1):
        ahead = torch.arange(int(cut.roll_length[position]))
        for name in STEPS:
            own, others = (getattr(trace, name)[trace.roll_first[position] + ahead] for trace in (cut, whole))
            torch.testing.assert_close(own, others, equal_nan=True)


def test_policies_that_it_was_made_for_count_what_they_count_on_the_whole_one(pair, whole, cut):
    for each in policies(pair):
        one, other = replay(cut, each), replay(whole, each)
        assert one.total == other.total and one.per_text.tolist() == other.per_text.tolist()
    other = replay(cut.only(torch.arange(COUNT) % 2 == 1), each).per_text
    assert other.tolist() == one.per_text[1::2].tolist(), "as does a part of it"


def test_roll_outs_are_no_longer_than_the_policies_need(pair, cut):
    """Without the last step, or the last half, of any roll-out some policy goes on past the cut."""
    needed = policies(pair)
    for position in (cut.roll_length > 0).nonzero().squeeze(1).tolist():
        shorter = cut.roll_length.clone()
        shorter[position] = min(int(shorter[position]) - 1, int(shorter[position]) * 2 // 3)
        marked = cut.roll_cut.clone()
        marked[position] = True
        trace = replace(cut, roll_length=shorter, roll_cut=marked)
        assert any(position in past_cuts(trace, each).tolist() for each in needed)


def test_fixed_lengths_need_no_roll_outs_and_miss_only_drafted_ends_of_text(pair, sequences, whole):
    lengths = [policy(pair, "speculative", num_drafted=length) for length in (1, 4, MOST)]
    bare = Recorder(pair, SAMPLING, MOST, policies=lengths).record(sequences, range(COUNT))
    assert bare.num_steps == bare.num_positions
    for each in [*lengths, policy(pair, "heuristic")]:
        one, other = replay(bare, each), replay(whole, each)
        assert one.accepted.tolist() == other.accepted.tolist()
        assert (one.counts["num_drafted"] >= other.counts["num_drafted"]).all()
    drafted = [replay(trace, lengths[-1]).total.num_drafted for trace in (bare, whole)]
    assert 1 < drafted[0] / drafted[1] < 1.6, "an eighth of the draft's tokens end a text here"


@pytest.mark.parametrize(
    "ask",
    [
        by_starts,
        by_rounds,
        carried,
        lambda trace, each: sweep_levels(trace, each.policy, [0.25], max_drafted=MOST),
        lambda trace, each: token_rounds(trace, each, [0, 1], None),
        lambda trace, each: true_probability(replace(trace, alpha=trace.draft_prob), 0.2),
        lambda trace, each: ReadStates(trace, range(COUNT)),
        lambda trace, each: step_after(trace, torch.arange(trace.num_positions)),
    ],
)
def test_whatever_goes_on_past_a_cut_raises(cut, whole, patient, ask):
    ask(whole, patient)
    with pytest.raises(
        CutError, match=r"^\d+ roll-outs of this recording were cut .*: expected a whole recording"
    ) as info:
        ask(cut, patient)
    assert bool(cut.roll_cut[info.value.positions].all()) and isinstance(info.value, InputError)


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_the_rest_that_is_recorded_later_is_that_of_a_whole_recording(pair, sequences, patient, penalty):
    sampling = replace(SAMPLING, repetition_penalty=penalty)
    recorder = Recorder(pair, sampling, MOST, {"mine": lambda step: step.entropy}, hidden=True)
    for_some = replace(recorder, policies=policies(pair))
    plain = decode(pair, [prompt for prompt, _ in sequences], config.method("autoregressive"), sampling)
    sequences = [(g.prompt_ids, g.token_ids) for g in plain]
    whole, cut = (each.record(sequences, range(COUNT)) for each in (recorder, for_some))
    wanted = past_cuts(cut, patient)
    assert 0 < len(wanted) < int(cut.roll_cut.sum())
    deeper = for_some.deepened(cut, sequences, wanted, 7)
    assert replay(deeper, patient).total == replay(whole, patient).total
    assert deeper.roll_cut.nonzero().squeeze(1).tolist() == sorted(
        set(cut.roll_cut.nonzero().squeeze(1).tolist()) - set(wanted.tolist())
    )
    rest = for_some.deepened(deeper, sequences, deeper.roll_cut.nonzero().squeeze(1), 7)
    assert rest.roll_cut is None and torch.equal(rest.roll_length, whole.roll_length)
    same(rest, whole, (*POSITIONS, *STEPS, "roll_first"))
    torch.testing.assert_close(rest.estimates["mine"], whole.estimates["mine"])


def test_heads_that_read_the_round_are_scored_as_far_as_roll_outs_go(pair, sequences, whole):
    def late(step):
        return step.history(2).entropy.sum(-1) + step.entropy

    late.num_history = 2
    heads = {"late": late}
    recorder = Recorder(pair, SAMPLING, MOST, heads, hidden=True, policies=policies(pair))
    expected = Recorder(pair, SAMPLING, MOST, heads, hidden=True).record(sequences, range(COUNT))
    cut = recorder.record(sequences, range(COUNT))
    rest = recorder.deepened(cut, sequences, cut.roll_cut.nonzero().squeeze(1))
    torch.testing.assert_close(rest.estimates["late"], expected.estimates["late"])
    bare = replace(recorder, hidden=False).record(sequences, range(COUNT))
    assert bare.roll_cut is None and bare.num_steps == whole.num_steps, "their states are not kept: all are whole"
    bound = replace(recorder, heads={}, upper_bound=True).record(sequences, range(COUNT))
    assert bound.roll_cut is None and not bool(bound.alpha.isnan().any())


def test_whole_and_cut_traces_are_joined_and_kept_in_files(whole, cut, patient, tmp_path):
    both = join([whole, cut])
    expected = torch.cat([torch.zeros_like(whole.accepted), cut.roll_cut])
    assert torch.equal(Trace.load(both.save(tmp_path / "both")).roll_cut, expected)
    assert (past_cuts(both, patient) - whole.num_positions).tolist() == past_cuts(cut, patient).tolist()


# -- files ----------------------------------------------------------------------------------------------------------------


def trace_of(folder, pair, sequences, **options):
    return Store(folder).trace(pair, SAMPLING, sequences, MOST, **options)


def test_a_later_question_records_the_rest_in_the_same_files(pair, sequences, whole, patient, tmp_path, monkeypatch):
    for_some = {"policies": {None: policies(pair), 0.0: [policy(pair, "speculative")]}, "states": True}
    cut = trace_of(tmp_path, pair, sequences, **for_some)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(files) == 4, "both temperatures"
    greedy = trace_of(tmp_path, pair, sequences, draft_temperature=0.0, **for_some)
    assert greedy.num_steps == greedy.num_positions and greedy.draft_prob.unique().tolist() == [1.0]
    wanted = past_cuts(cut, patient)
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "recorded", lambda *_: pytest.fail("the target reads nothing again"))
        with patch.context() as inner:
            inner.setattr("toolkit.trace.trace.save_tensors", lambda *_: exec("raise KeyboardInterrupt"))
            with pytest.raises(KeyboardInterrupt):
                trace_of(tmp_path, pair, sequences, deeper=wanted, **for_some)
        assert files == {path: path.read_bytes() for path in tmp_path.iterdir()}
        deeper = trace_of(tmp_path, pair, sequences, deeper=wanted, **for_some)
        assert replay(deeper, patient).total == replay(whole, patient).total and deeper.roll_cut.any()
        again = trace_of(tmp_path, pair, sequences, **for_some)
        assert again.num_steps == deeper.num_steps, "as deep as anybody has asked"
        rest = trace_of(tmp_path, pair, sequences, states=True)
    assert rest.roll_cut is None and files.keys() == set(tmp_path.iterdir())
    same(rest, whole, (*POSITIONS, *STEPS, "roll_first", "roll_length"))


def test_cut_files_and_further_heads(pair, sequences, whole, tmp_path):
    torch.manual_seed(0)
    heads = []
    for name in ("one", "two"):
        head = AcceptanceHead(pair.draft.probs.shape[0])
        head.readout.weight.data.normal_()
        heads.append(str(head.save(tmp_path / name)))
    for hidden in (True, False):
        folder, for_some = tmp_path / str(hidden), {"policies": {None: policies(pair)}}
        store = Store(folder, hidden)
        store.trace(pair, SAMPLING, sequences, MOST, heads[:1], **for_some)
        both = store.trace(pair, SAMPLING, sequences, MOST, heads, **for_some)
        assert both.roll_cut.any() and all(len(logits) == both.num_steps for logits in both.estimates.values())
        store.trace(pair, SAMPLING, sequences, MOST, heads[:1])
        rest = store.trace(pair, SAMPLING, sequences, MOST, heads)
        expected = Store(tmp_path / f"whole-{hidden}").trace(pair, SAMPLING, sequences, MOST, heads)
        for name in map(head_hash, heads):
            torch.testing.assert_close(rest.estimates[name], expected.estimates[name])
        assert rest.roll_cut is None and rest.num_steps == whole.num_steps


def test_together_and_alone_are_equal_where_roll_outs_are_cut(pair, sequences):
    recorders = [
        Recorder(pair, SAMPLING, MOST, hidden=True, draft_temperature=temperature, policies=policies(pair))
        for temperature in (None, 0.5)
    ]
    together = record_together(recorders, sequences, range(COUNT))
    for recorder, one in zip(recorders, together, strict=True):
        other = recorder.record(sequences, range(COUNT))
        for name, value in vars(other).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value.nan_to_num(-1), getattr(one, name).nan_to_num(-1)), name

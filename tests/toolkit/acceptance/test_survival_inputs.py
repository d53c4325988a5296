"""Acceptance heads that read earlier positions: the same live, replayed, and learned from mixed texts."""

from __future__ import annotations

import pytest
import torch

from data_gen.held_out import load_frozen
from tests.toolkit.acceptance.live_rounds import lengths_alike
from tests.toolkit.acceptance.test_inputs import H, check, slow
from toolkit import ModelPair, train
from toolkit.acceptance import AcceptanceHead, HeadEstimator, PrereadEstimator
from toolkit.acceptance.folder import head_hash, scorer_with
from toolkit.acceptance.inputs import Inputs
from toolkit.acceptance.preread import embedding_table
from toolkit.config import compose, method
from toolkit.decoding import decode
from toolkit.errors import InputError
from toolkit.integrations.transformers import StoppedDraft
from toolkit.models.pair import load_draft
from toolkit.models.teacher import states_and_logits_of
from toolkit.sampling import Sampling
from toolkit.stopping import Bounded, Rate, Survival
from toolkit.trace.record import Recorder
from toolkit.trace.score import named_scorers, recorded_logits
from toolkit.trace.steps import Geometry, step_at
from toolkit.training import MixedData
from toolkit.training.online import MixedSequences, history_at

pytestmark = pytest.mark.usefixtures("undrawn")

MOST = 8
GREEDY = Sampling(temperature=0.0, max_new_tokens=40)
READS = {"earlier": 2, "likelihood": True, "round_depth": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    head = AcceptanceHead(96, depth=1, embedding_size=96, **READS)
    head.more.weight.data *= 3
    head.readout.weight.data *= 2
    head.readout.bias.data += 2
    return str(head.save(tmp_path_factory.mktemp("survival") / "head"))


def policies(folder):
    for threshold, lag in ((0.5, 1), (0.8, 1), (0.6, 0)):
        yield Survival(HeadEstimator(folder, corrected=True), threshold, lag)
    yield Rate(PrereadEstimator(folder), 0.2, 2.5)  # without a pre-read head: SpecDec++'s rule


def test_live_rounds_are_replayed_rounds(folder):
    """Toy pair, temperature 0: tokens and rounds are equal one by one."""
    pair = ModelPair.toy()
    asked = [load_frozen(domain, "dev")[i].prompt for domain in ("instruct", "math", "code") for i in range(2)]
    plain = decode(pair, asked, method("autoregressive"), GREEDY)
    sequences = [(g.prompt_ids, g.token_ids) for g in plain]
    trace = Recorder(pair, GREEDY, MOST, named_scorers(pair, {head_hash(folder): folder})).record_all(
        sequences, range(6)
    )
    assert trace.estimates[head_hash(folder)].shape == (trace.num_positions, MOST + 1, 1) and trace.hidden is None
    lengths = set()
    for policy in (Bounded(one, 1, MOST) for one in policies(folder)):
        lengths |= lengths_alike(pair, asked, plain, trace, policy, GREEDY, batch_size=4)
    assert len(lengths) > 4


def test_the_first_earlier_position_is_that_of_the_token_itself(exact_pair, prompts):
    """Its q is what the head is told first; the depth is the token's, not the newest one's."""
    sampled = Sampling(max_new_tokens=20, seed=1)
    sequences = [(g.prompt_ids, g.token_ids) for g in decode(exact_pair, prompts, method("autoregressive"), sampled)]
    trace = Recorder(exact_pair, sampled, 3, hidden=True).record_all(sequences, range(len(sequences)))
    head = AcceptanceHead(16, earlier=1, earlier_states=False, earlier_tokens=False, round_depth=2).double()
    heard = []
    head.forward = lambda features: heard.append(features) or features[:, 0]
    recorded_logits(trace, scorer_with(head, exact_pair.draft, "cpu"))
    first, second = heard[0], heard[1]  # of all starts at depth 1, and at depth 2
    assert first.shape == (trace.num_positions, 16 + 5 + 2) and not first[:, -2:].any()
    assert torch.equal(second[:, -2:], torch.tensor([[1.0, 0.0]]).expand(len(second), 2).double())
    exists = step_at(trace, Geometry.of(trace), torch.arange(trace.num_positions), 2)[1]
    expected = (
        trace.token_prob[: trace.num_positions][exists].clamp(min=1e-6).log()
    )  # of the first drafted token, accepted or not
    torch.testing.assert_close(second[:, 17].float(), expected, rtol=0, atol=1e-4)
    assert trace.accepted[exists].any() and not trace.accepted[exists].all()


# -- training ---------------------------------------------------------------------------------------------------------


def test_places_of_mixed_texts_are_what_live_decoding_keeps(exact_pair, prompts):
    """Against the slow computation that live and recorded steps are compared with, too."""
    draft = exact_pair.draft
    generation = decode(exact_pair, prompts[:1], method("autoregressive"), GREEDY)[0]
    text = generation.prompt_ids + generation.token_ids
    states, logits = states_and_logits_of(draft, torch.tensor([text]))
    first = len(generation.prompt_ids)
    places = torch.arange(first, len(text))
    history = history_at(states[0], logits[0], torch.tensor(text), places, first, H)
    for row, place in enumerate(places.tolist()):
        check(history, row, slow(draft, generation.prompt_ids, text[first : place + 1]))


def test_mixed_examples_hold_the_features_online_and_from_files(tiny_mix, tiny_pair):
    draft, by_features = load_draft(tiny_pair / "draft"), {}
    head = AcceptanceHead(16, embedding_size=16, **READS)
    for features in ("online", "cached"):
        data = MixedData(tiny_mix, draft, features=features)
        data.read_by(head)
        data.prepare_data()
        data.setup()
        by_features[features] = data.states["train"].batch([4, 1])
    one = by_features["online"].hidden
    assert one.shape[1] == 16 + head.num_more == 16 + Inputs(**READS).size_of_more(16, 16)
    torch.testing.assert_close(by_features["cached"].hidden.float(), one.float(), rtol=0, atol=2e-2)
    sequences = data._computed()["train"].sequences
    at, _ = sequences.drafted(4)
    tokens = torch.tensor([sequences.tokens(4)])
    states, logits = states_and_logits_of(draft, tokens)
    before = history_at(states[0], logits[0], tokens[0], at, sequences.response_start(4), 2)
    depth = data._computed()["train"].depths[sequences.span(4)]
    expected = head.inputs.with_more(states[0][at], before, embedding_table(draft), depth)
    torch.testing.assert_close(one[: len(at)], expected, rtol=0, atol=1e-5)
    assert 0 < sequences.response_start(4) <= int(at[0])


def test_a_head_is_trained_and_decodes(tiny_mix, tiny_overrides, tmp_path):
    words = [
        "head.depth=1", "head.earlier=1", "head.likelihood=true", "head.round_depth=3", "optimizer.lr=1e-2",
        "trainer.max_epochs=2", "data.batch_size=8", "logger=none", f"data.path={tiny_mix}",
    ]  # fmt: skip
    folder = train.run(compose("train", [*tiny_overrides, *words, f"paths.output_dir={tmp_path}/run"]))
    head, _ = AcceptanceHead.load(folder / "head")
    assert head.inputs == Inputs(earlier=1, likelihood=True, round_depth=3) and head.embedding_size == 16
    names = {word.split(".")[1].split("=")[0]: word.split("=", 1)[1] for word in tiny_overrides}
    pair = ModelPair.from_pretrained(**names)
    generations = decode(
        pair, ["the cat"], method("specdec_pp", [f"policy.estimator.head={folder}"]), Sampling(max_new_tokens=8)
    )
    assert generations[0].token_ids
    with pytest.raises(InputError, match="head.earlier=0"):
        StoppedDraft(pair.draft, Survival(HeadEstimator(str(folder))))


def test_data_that_do_not_say_where_prompts_end_are_refused(tiny_mix):
    import datasets

    split = datasets.load_from_disk(str(tiny_mix / "dataset"))["train"].remove_columns("prompt_length")
    sequences = MixedSequences(split, "here", "mend")
    for asked in (lambda: sequences.depths(3, 0), lambda: sequences.response_start(0)):
        with pytest.raises(InputError, match="^here does not say where prompts end"):
            asked()


def test_heads_without_them_are_as_published():
    plain = AcceptanceHead(4, depth=1, embedding_size=7)
    assert plain.config == {"hidden_size": 4, "depth": 1, "tied": False, "log_w_rej": 0.0}
    assert set(plain.state_dict()) == {
        "blocks.0.linear.weight",
        "blocks.0.linear.bias",
        "readout.weight",
        "readout.bias",
    }


def test_a_draft_without_embeddings_trains_heads_that_read_none(tiny_mix, tiny_overrides, tmp_path, monkeypatch):
    """Only heads that read earlier positions ask for the draft's embeddings."""
    monkeypatch.setattr("toolkit.training.data.embedding_table", lambda draft: pytest.fail("asked for embeddings"))
    words = ["head.depth=0", "trainer.max_epochs=1", "data.batch_size=8", "logger=none", f"data.path={tiny_mix}"]
    folder = train.run(compose("train", [*tiny_overrides, *words, f"paths.output_dir={tmp_path}/run"]))
    assert AcceptanceHead.load(folder / "head")[0].embedding_size == 0

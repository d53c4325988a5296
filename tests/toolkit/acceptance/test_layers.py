"""Earlier layers of the draft as inputs of heads: the same states from every forward; training, replay and live decoding."""

from __future__ import annotations

import pytest
import torch

from analysis.replay.head_folders import find_contenders
from data_gen import traces
from data_gen.recording import Recorder
from tests.toolkit.acceptance.live_rounds import lengths_alike
from toolkit import ModelPair, testing, train
from toolkit.acceptance import AcceptanceHead, HeadEstimator, PrereadEstimator, PrereadHead
from toolkit.acceptance.folder import check_draft, scorer
from toolkit.acceptance.inputs import Inputs
from toolkit.config import compose, method
from toolkit.decoding import Method, decode
from toolkit.engine import open_session
from toolkit.engine.hidden_states import counted, give_layers, layers_of, state_size
from toolkit.errors import InputError
from toolkit.integrations.transformers import _watched
from toolkit.models.pair import load_draft
from toolkit.models.teacher import hidden_size, states_and_logits_of, states_of
from toolkit.sampling import Sampling
from toolkit.stopping import Bounded, Rate, Survival
from toolkit.training import MixedData
from toolkit.verification.rules.rejection import Rejection

pytestmark = pytest.mark.usefixtures("undrawn")

MOST = 6
GREEDY = Sampling(temperature=0.0, max_new_tokens=30)


@pytest.mark.parametrize("family", sorted(testing.FAMILIES))
def test_every_forward_gives_the_same_layers(family):
    """Sessions, in one block and token by token, and teacher-forced forwards, against transformers' own hidden states."""
    model = testing.tiny_model(family)
    give_layers(model, [1, 0, -1, -3])
    assert layers_of(model) == (0, 1) and state_size(model) == hidden_size(model) == 96
    tokens = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(1))
    plain = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    expected = torch.cat([plain[-1], plain[0], plain[1]], -1)
    session = open_session(model, 1, 16)
    found = [session.extend(tokens[:, :5], last=5).hidden, session.extend(tokens[:, 5:8], last=2).hidden]
    found.append(session.extend(tokens[:, 8:]).hidden)
    close = {"rtol": 0, "atol": 2e-4}
    torch.testing.assert_close(found[0], expected[:, :5], **close)
    torch.testing.assert_close(found[1], expected[:, 6:8], **close)
    torch.testing.assert_close(found[2], expected[:, 8:], **close)
    torch.testing.assert_close(states_of(model, tokens), expected, **close)
    torch.testing.assert_close(states_and_logits_of(model, tokens)[0], expected, **close)
    with _watched(model) as seen:
        model(tokens)
    torch.testing.assert_close(seen["hidden"], expected[:, -1], **close)
    assert not model._forward_hooks and not model.get_output_embeddings()._forward_pre_hooks


def pairs():
    random = testing.llama_pair()
    give_layers(random.draft, [1])
    return {"random": random, "toy": ModelPair.from_pretrained("toy/target", "toy/draft", draft_layers=[0])}


@pytest.mark.parametrize("kind", ["random", "toy"])
def test_live_rounds_are_replayed_rounds(kind, tmp_path):
    """With both heads; of the toy pair forwards are replayed from captures, too."""
    pair = pairs()[kind]
    width, layers = hidden_size(pair.draft), list(layers_of(pair.draft))
    torch.manual_seed(4)
    preread = PrereadHead(width, width // 2, width=16, earlier=1, layers=layers)
    survival = AcceptanceHead(width, depth=1, layers=layers)
    for parameter in [*preread.parameters(), *survival.parameters()]:
        parameter.data *= 2
    preread.layers[-1].bias.data += 1
    survival.readout.bias.data += 1
    folder = str(survival.save(preread.save(tmp_path / "head")))
    asked = testing.ragged_prompts(5) if kind == "random" else ["Q: Spell river.\nA:", "Once", "def add(a, b):"]
    plain = decode(pair, asked, method("autoregressive"), GREEDY)
    heads = {"mine": scorer(pair, folder, "survival"), "mine.preread": scorer(pair, folder, "preread")}
    texts = [(g.prompt_ids, g.token_ids) for g in plain]
    trace = Recorder(pair, GREEDY, MOST, heads, hidden=True).record_all(texts, range(len(texts)))
    assert trace.hidden.shape == (trace.num_steps, width) and pair.draft.config.hidden_size == width // 2
    lengths = set()
    for policy in (
        Rate(PrereadEstimator(folder), 0.2, 2.0),
        Rate(PrereadEstimator(folder), 0.2, 3.5),
        Survival(HeadEstimator(folder, corrected=True), 0.5),
    ):
        bounded = Bounded(policy, 1, MOST)
        lengths |= lengths_alike(pair, asked, plain, trace, bounded, {folder: "mine"}, GREEDY, batch_size=2)
    assert len(lengths) > 2


def test_layers_are_scaled_one_by_one():
    from toolkit.acceptance.inputs import _scaled

    values = torch.cat([torch.randn(3, 4) * 100, torch.randn(3, 4) * 0.1], 1)
    found = _scaled(values, 2)
    assert torch.allclose(found.unflatten(1, (2, 4)).square().mean(-1), torch.ones(3, 2), atol=1e-3)
    assert torch.allclose(_scaled(values), torch.nn.functional.rms_norm(values, (8,)))


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layered(tiny_overrides):
    return [*tiny_overrides, "+pair.draft_layers=[1]"]


@pytest.fixture(scope="module")
def recorded(layered, tiny_responses, tmp_path_factory):
    options = [
        f"responses={tiny_responses}", "hidden=true", "upper_bound=false", "max_drafted=3", "heads={}",
        f"paths.output_dir={tmp_path_factory.mktemp('layers')}/t",
    ]  # fmt: skip
    return traces.run(compose("traces", [*layered, *options]))


@pytest.fixture(scope="module")
def words(recorded):
    return [
        "model=preread_head",
        "data=traced",
        "head.width=8",
        "trainer.max_epochs=1",
        "logger=none",
        f"data.path={recorded}",
    ]


def test_a_pre_read_head_is_trained_on_recorded_layers(layered, recorded, words, tiny_overrides, tmp_path):
    folder = train.run(compose("train", [*layered, *words, f"paths.output_dir={tmp_path}/run"]))
    head, _ = PrereadHead.load(folder / "head")
    assert head.inputs == Inputs(layers=(1,)) and head.hidden_size == 32
    (one,) = find_contenders([folder], [recorded])
    assert one.head.config["layers"] == [1]
    backwards = train.run(compose("train", [*layered, *words, "head.layers=[-2]", f"paths.output_dir={tmp_path}/back"]))
    assert PrereadHead.load(backwards / "head")[0].inputs == Inputs(layers=(1,))  # of two layers, the last but one
    names = {word.split(".")[1].split("=")[0]: word.split("=", 1)[1] for word in tiny_overrides}
    plain, given = ModelPair.from_pretrained(**names), ModelPair.from_pretrained(**names, draft_layers=[1])
    rate = Method("rate", Rate(PrereadEstimator(str(folder / "head")), rate=1.0), Rejection())
    assert decode(given, ["the cat"], rate, Sampling(max_new_tokens=5))[0].token_ids
    mend = r"reads layers \[1\] beside the final state, this draft gives \[\]: set \+pair.draft_layers=\[1\]$"
    with pytest.raises(InputError, match=mend):
        decode(plain, ["the cat"], rate, Sampling(max_new_tokens=5))


def test_what_does_not_go_together_is_said_before_the_training(layered, recorded, words, tiny_overrides, tmp_path):
    with pytest.raises(
        InputError, match=r"the states in .* hold layers \[1\] .* gives \[\]: set \+pair.draft_layers=\[1\]"
    ):
        train.run(compose("train", [*tiny_overrides, *words, f"paths.output_dir={tmp_path}/a"]))
    with pytest.raises(
        InputError, match=r"head.layers reads layers \[0\] beside the final state, this draft gives \[1\]"
    ):
        train.run(compose("train", [*layered, *words, "head.layers=[0]", f"paths.output_dir={tmp_path}/b"]))
    plain = PrereadHead(16, 16, width=4).save(tmp_path / "plain")
    with pytest.raises(
        InputError, match=rf"{plain} reads layers \[\] beside the final state, the traces in .* hold \[1\]"
    ):
        find_contenders([plain], [recorded])


def test_mixed_texts_give_the_same_layers_online_and_from_files(tiny_mix, tiny_pair):
    draft, found = load_draft(tiny_pair / "draft", layers=[1]), {}
    head = AcceptanceHead(hidden_size(draft), layers=[1], round_depth=2)
    for features in ("online", "cached"):
        data = MixedData(tiny_mix, draft, features=features)
        assert data.head_sizes() == {"hidden_size": 32}
        data.read_by(head)
        data.prepare_data()
        data.setup()
        found[features] = data.states["train"].batch([1, 7]).hidden
    torch.testing.assert_close(found["cached"].float(), found["online"].float(), rtol=0, atol=1e-2)
    assert found["online"].shape[1] == 34
    texts = data._computed()["train"].texts
    first = states_of(draft, torch.tensor([texts.tokens(1)]))[0, texts.drafted(1)[0]]
    torch.testing.assert_close(found["online"][: len(first), :32], first, rtol=0, atol=1e-5)


def test_layers_that_a_draft_does_not_have_are_refused():
    draft = testing.llama_pair().draft
    for layers in ([3], [-4], [1, 9]):
        with pytest.raises(InputError, match="expected layers from -2 to 2 of this draft"):
            give_layers(draft, layers)
    with pytest.raises(InputError, match="expected layers from 0 to 0"):
        give_layers(testing.table_pair().draft, [1])
    give_layers(testing.table_pair().draft, [])
    give_layers(draft, [-1])
    assert layers_of(draft) == ()
    about = {"head": {"hidden_size": 32, "layers": [1]}}
    with pytest.raises(InputError, match=r"set \+pair.draft_layers=\[1\]"):
        check_draft(about, draft, "here")
    give_layers(draft, [1])
    check_draft(about, draft, "here")


def test_layers_are_counted_once_from_the_embedding():
    assert counted([-2, 2, 0, -1, 3], 3) == (0, 2)
    assert counted([3, -1], 3) == ()

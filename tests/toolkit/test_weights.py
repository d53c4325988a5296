"""Fingerprints cover all weights; compiled, adapted, quantised and cut models are decoded as they are."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertModel

from data_gen.toy_pair.stamp import stamp
from tests.toolkit.adapted import Adapted
from toolkit import ModelPair, generate
from toolkit.acceptance import AcceptanceHead
from toolkit.acceptance.folder import check_draft, target_of
from toolkit.engine.engine import EngineOptions
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.integrations.transformers import assistant
from toolkit.models.fingerprint import CHUNK, Weights, difference, sketch
from toolkit.models.pair import TOY, fingerprint, load_draft
from toolkit.testing import tiny_model
from toolkit.training import MixedData
from toolkit.training.checkpoints import check_resumable, warm_start

PROMPT = [5, 9, 11, 7]


@pytest.fixture(scope="module")
def toy():
    return ModelPair.toy()


# -- fingerprints -----------------------------------------------------------------------------------------------------------


def negate_every_second(weight):
    weight.view(-1)[1::2] *= -1


def change_the_last(weight):
    weight.view(-1)[-1] += weight.abs().max()


def swap_rows(weight):
    weight[:2] = weight[:2].flip(0).clone()


@pytest.mark.parametrize(
    ("change", "dtype"),
    [(negate_every_second, torch.bfloat16), (change_the_last, torch.bfloat16), (swap_rows, torch.float32)],
)
def test_other_weights_are_noticed(change, dtype):
    model = tiny_model("llama")
    other = copy.deepcopy(model).to(dtype)
    assert difference(sketch(model), sketch(other)) is None
    before = fingerprint(other)
    change(other.model.layers[1].mlp.up_proj.weight)
    assert difference(sketch(model), sketch(other)) == "model.layers.1.mlp.up_proj.weight differs"
    assert fingerprint(other) != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_same_weights_in_another_format_are_the_same(dtype):
    """Also as they were recorded in a summary."""
    model = tiny_model("qwen2")
    other = copy.deepcopy(model).to(dtype)
    assert difference(sketch(model), sketch(other)) is None
    assert (fingerprint(model) == fingerprint(other)) == (dtype is torch.float64)
    assert fingerprint(copy.deepcopy(other).float()) == fingerprint(other)  # formats that hold them exactly
    about = json.loads(json.dumps(Weights.of(model).facts("draft")))
    known, weights = Weights.recorded(about), Weights.of(other)
    assert known.other_than(weights) is None is weights.other_than(known)
    assert Weights.recorded(about, "target") is None
    negate_every_second(other.model.layers[0].mlp.up_proj.weight)
    assert known.other_than(Weights.of(other)).endswith("model.layers.0.mlp.up_proj.weight differs")
    assert Weights("a").other_than(Weights("b")) == "fingerprint a, this one b"


def test_every_entry_counts_beyond_one_chunk():
    model = tiny_model("llama")
    model.register_buffer("long", torch.randn(3 * CHUNK + 5))
    near, exact = sketch(model), fingerprint(model)
    for index in (0, CHUNK, 3 * CHUNK, 3 * CHUNK + 4):
        model.long[index] += 1
        assert difference(near, sketch(model)) == "long differs" and fingerprint(model) != exact
        model.long[index] -= 1


def test_shapes_names_and_quantised_weights():
    one, other = sketch(tiny_model("llama")), sketch(tiny_model("qwen2"))
    assert difference(one, other).startswith("only one of them has model.layers.0.self_attn.k_proj.bias")
    wider = {**one, "tensors": {**one["tensors"], "lm_head.weight": [[1, 2], 1.0, [0.0] * 4]}}
    assert difference(one, wider) == "lm_head.weight has shape [61, 32] and [1, 2]"
    model = tiny_model("llama")
    model.config.quantization_config = {"bits": 4}
    with pytest.warns(RuntimeWarning, match="weights in float32 and quantised cannot be compared"):
        assert difference(one, sketch(model)) is None


def through_data(weight):
    weight.data.mul_(-1)


def through_numpy(weight):
    weight.detach().numpy()[:] *= -1


def replaced(weight):
    weight.data = weight.data.flip(1).clone()


@pytest.mark.parametrize("write", [through_data, through_numpy, replaced])
@pytest.mark.parametrize("inference", [False, True])
def test_writes_that_leave_no_version_are_noticed(write, inference):
    model = tiny_model("llama")
    if inference:
        with torch.inference_mode():  # tensors without versions at all
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    first = fingerprint(model)
    assert fingerprint(model) == first
    with torch.inference_mode(inference):
        write(model.lm_head.weight)
    assert fingerprint(model) != first


def test_quantised_weights_and_adapters_at_work_count():
    model = tiny_model("llama")
    other = copy.deepcopy(model)
    negate_every_second(other.model.layers[0].mlp.up_proj.weight)
    one, same, another = (Weights.of(eight_bits(each)) for each in (model, copy.deepcopy(model), other))
    assert one.fingerprint == same.fingerprint != another.fingerprint
    model = Adapted(model)
    with model.disable_adapter():
        seen = [Weights.of(model)]
    seen.append(Weights.of(model))
    model.set_adapter("b")
    seen.append(Weights.of(model))
    for layer in model.layers():
        layer.scaling["b"] = 2.0
    seen.append(Weights.of(model))
    for i, weights in enumerate(seen):
        again = Weights.recorded(json.loads(json.dumps(weights.facts("draft"))))
        assert [again.other_than(other) is None for other in seen] == [i == j for j in range(4)]
        assert [weights.fingerprint == other.fingerprint for other in seen] == [i == j for j in range(4)]
    assert seen[-1].fingerprint == Weights.of(model).fingerprint


# -- heads and their models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "dtype"), [("specdec_pp", "bfloat16"), ("rate", "float32")])
def test_a_head_for_another_target_is_used_with_one_warning_and_for_another_draft_refused(kind, dtype):
    pair = ModelPair.toy(dtype=dtype)
    target = copy.deepcopy(pair.target)
    swap_rows(target.model.layers[1].mlp.up_proj.weight)
    other = ModelPair(target=target, draft=pair.draft)
    use = lambda pair, head=None: generate(pair, [PROMPT], kind, max_new_tokens=3, head=head)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(pair)
    with pytest.warns(RuntimeWarning, match="acceptance of another target than this pair's .*up_proj.weight differs"):
        use(other, pair.head)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(other, pair.head)
    negate_every_second(pair.draft.model.layers[0].mlp.up_proj.weight)
    with pytest.raises(InputError, match=r"trained for another draft .*: model.layers.0.mlp.up_proj.weight differs"):
        check_draft(AcceptanceHead.load(pair.head)[1], pair.draft, pair.head)


@pytest.mark.parametrize("earlier", [["target_weights"], ["target_weights", "target_fingerprint"]])
def test_heads_that_do_not_name_their_target_are_loaded_without_a_word(earlier, tmp_path):
    pair = ModelPair.toy(dtype="bfloat16")
    head, about = AcceptanceHead.load(pair.head)
    head.save(tmp_path, {name: fact for name, fact in about.items() if name not in ("head", *earlier)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(pair, [PROMPT], "specdec_pp", max_new_tokens=3, head=str(tmp_path))


def test_stamps_are_current(tmp_path):
    pair = ModelPair.toy()
    AcceptanceHead.load(TOY / "head")[0].save(tmp_path, {"draft_fingerprint": "old"})
    stamp(tmp_path, pair)
    about, shipped = read_json(tmp_path / "config.json"), read_json(TOY / "head" / "config.json")
    assert about["draft_fingerprint"] == shipped["draft_fingerprint"] == fingerprint(pair.draft)
    assert about["target_fingerprint"] == shipped["target_fingerprint"] == fingerprint(pair.target)
    for role in ("draft_weights", "target_weights"):
        assert difference(about[role], shipped[role]) is None


def test_trained_heads_record_their_models_whatever_the_format(tiny_mix, tiny_pair):
    """Data of a float32 draft serve a bfloat16 one."""
    data = MixedData(tiny_mix, load_draft(tiny_pair / "draft", dtype="bfloat16"))
    data.states = {"train": SimpleNamespace(num_positions=1)}
    assert target_of(data.about()).not_of(load_draft(tiny_pair / "target").bfloat16()) is None
    assert target_of(data.about()).not_of(load_draft(tiny_pair / "draft")) is not None
    trained, head = Weights.of(load_draft(tiny_pair / "draft")), AcceptanceHead(16)
    about = {"about": {**trained.facts(), "head": head.config}}
    check_resumable(about, head, data.weights, tiny_mix)
    warm_start(head, None, data.weights)
    with pytest.raises(InputError, match="another draft"):
        check_resumable(about, head, Weights.of(tiny_model("llama")), tiny_mix)


# -- models that users make of others ---------------------------------------------------------------------------------------


def compiled(model):
    return torch.compile(model, backend="eager")


def eight_bits(model):
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def greedy(model, length=8):
    """The model's own tokens, without a cache."""
    text = torch.tensor([PROMPT])
    for _ in range(length):
        text = torch.cat([text, model(input_ids=text, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return text[0, len(PROMPT) :].tolist()


def decoded(target, draft=None):
    """With packed weights, which are the same text."""
    method, sequences = "autoregressive" if draft is None else "speculative", []
    for packed in ("off", "on"):
        pair = ModelPair(target=target, draft=draft, end_ids=(), options=EngineOptions(packed=packed))
        sequences.append(generate(pair, [PROMPT], method, temperature=0, max_new_tokens=8)[0].token_ids)
    assert sequences[0] == sequences[1]
    return sequences[0]


@pytest.mark.parametrize("change", [eight_bits, lambda model: compiled(Adapted(model))])
def test_assistants_of_changed_drafts_leave_the_targets_text(toy, change):
    prompt = torch.tensor([toy.encode("Q: 1 + 2\nA:")])
    draft = assistant(change(copy.deepcopy(toy.draft)), "confidence")
    settings = {"do_sample": False, "max_new_tokens": 12}
    tokens, expected = (toy.target.generate(prompt, **more, **settings) for more in ({"assistant_model": draft}, {}))
    assert torch.equal(tokens, expected)


def test_a_compiled_draft_keeps_its_head(toy):
    draft = compiled(copy.deepcopy(toy.draft))
    assert Weights.of(draft) == Weights.of(toy.draft)
    assistant(draft, "specdec_pp", head=str(TOY / "head"))
    with pytest.raises(InputError, match="trained for another draft"):
        assistant(Adapted(copy.deepcopy(toy.draft)), "specdec_pp", head=str(TOY / "head"))


@pytest.mark.parametrize("change", [pytest.param(compiled, marks=pytest.mark.slow), Adapted])
def test_changed_models_are_decoded_as_they_are(toy, change):
    target, draft = change(copy.deepcopy(toy.target)), change(copy.deepcopy(toy.draft))
    assert decoded(target) == decoded(target, draft) == greedy(target)


class RowScaled(torch.nn.Linear):
    """Activations rounded to eight bits; `whole`: by one scale for the whole tensor, else by one per row."""

    whole = False

    def forward(self, x):
        scale = (x.abs().max() if self.whole else x.abs().amax(-1, keepdim=True)) / 127
        return super().forward((x / scale).round() * scale)


class TensorScaled(RowScaled):
    whole = True


class Outliers(torch.nn.Linear):
    """As bitsandbytes' layers: the threshold above which a column of the batch is computed apart."""

    state = SimpleNamespace(threshold=6.0)


def with_layers(kind):
    def changed(model):
        model.model.layers[0].mlp.up_proj.__class__ = kind
        return model

    return changed


def half_weights(model):
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.float16)


@pytest.mark.parametrize("change", [eight_bits, with_layers(TensorScaled), with_layers(Outliers)])
def test_a_target_whose_rows_depend_on_each_other_is_refused(toy, change):
    """Its logits after a text change with the tokens that are read beside it. A draft may do so."""
    target = change(copy.deepcopy(toy.target))
    with pytest.raises(
        InputError, match=r"^the target \(LlamaForCausalLM\) cannot be decoded: its layer model\.[^\n]*$"
    ):
        decoded(target)
    draft = change(copy.deepcopy(toy.draft))
    assert decoded(toy.target, draft) == greedy(toy.target)


@pytest.mark.parametrize("change", [half_weights, with_layers(RowScaled)])
def test_a_target_with_quantised_weights_or_scales_per_row_is_decoded(toy, change):
    target = change(copy.deepcopy(toy.target))
    assert decoded(target) == decoded(target, toy.draft) == greedy(target)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_lowered_number_of_layers(family):
    """Some families run the first layers then, some all they have."""
    model = tiny_model(family).double()
    model.config.num_hidden_layers = 1
    assert decoded(model) == decoded(model, tiny_model(family)) == greedy(model)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_checkpoint_without_its_output_layer_is_refused(name, tmp_path):
    folder = shutil.copytree(TOY / name, tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"^{folder} lacks lm_head.weight, a weight of LlamaForCausalLM: expected"):
        ModelPair.from_pretrained(**{"target": "toy/target", "draft": "toy/draft", name: folder})


@pytest.mark.parametrize("kind", [BertModel, BertForMaskedLM])
def test_models_that_are_not_causal_are_refused_in_one_line(kind, toy):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    bert = kind(BertConfig(vocab_size=toy.vocab_size, **sizes)).eval().requires_grad_(False)
    expected = (
        rf"^(expected a causal|the (target|draft) \({kind.__name__}\) cannot be decoded: its attention is bidir)[^\n]*$"
    )
    for attempt in (lambda: decoded(bert), lambda: decoded(toy.target, bert), lambda: assistant(bert, "confidence")):
        with pytest.raises(InputError, match=expected):
            attempt()

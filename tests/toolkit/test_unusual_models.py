"""Models that users make of others: compiled, with adapters, quantised, cut; and checkpoints that are not whole."""

from __future__ import annotations

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertModel

from tests.toolkit.adapted import Adapted
from toolkit import ModelPair, generate
from toolkit.engine.selfcheck import check_architecture
from toolkit.errors import InputError
from toolkit.integrations.transformers import assistant
from toolkit.models.fingerprint import Weights
from toolkit.models.pair import TOY
from toolkit.testing import tiny_model

PROMPT = [5, 9, 11, 7]


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
    method = "autoregressive" if draft is None else "speculative"
    pair = ModelPair(target=target, draft=draft, end_ids=())
    return generate(pair, [PROMPT], method, temperature=0, max_new_tokens=8)[0].token_ids


@pytest.fixture(scope="module")
def toy():
    return ModelPair.toy()


@pytest.mark.parametrize("change", [compiled, Adapted, eight_bits, lambda model: compiled(Adapted(model))])
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


@pytest.mark.parametrize("change", [pytest.param(compiled, marks=pytest.mark.slow), Adapted, eight_bits])
def test_changed_models_are_decoded_as_they_are(toy, change):
    target, draft = change(copy.deepcopy(toy.target)), change(copy.deepcopy(toy.draft))
    assert decoded(target) == decoded(target, draft) == greedy(target)


def test_quantised_weights_count():
    model = tiny_model("llama")
    other = copy.deepcopy(model)
    other.model.layers[0].mlp.up_proj.weight.view(-1)[1::2] *= -1
    one, same, another = (Weights.of(eight_bits(each)) for each in (model, copy.deepcopy(model), other))
    assert one.fingerprint == same.fingerprint != another.fingerprint


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox"])
def test_a_lowered_number_of_layers(family):
    """Some families run the first layers then, some all they have."""
    model = tiny_model(family).double()
    model.config.num_hidden_layers = 1
    assert decoded(model) == decoded(model, tiny_model(family)) == greedy(model)


def test_ends_of_text_as_a_tensor():
    model = tiny_model("llama")
    for ends, expected in ((torch.tensor([5, 7]), (5, 7)), (torch.tensor(5), (5,))):
        model.generation_config.eos_token_id = ends
        assert ModelPair(target=model).end_ids == expected


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


def test_adapters_that_put_tokens_in_front_are_refused():
    model = tiny_model("llama")
    model.active_peft_config = SimpleNamespace(is_prompt_learning=True)
    with pytest.raises(InputError, match="its adapter puts tokens of its own in front of every text"):
        check_architecture(model)

"""Architectures are decoded right or refused in one line; what was captured never outlives its model; modes are refused."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers as hf
from torch import nn

from toolkit import ModelPair, generate
from toolkit.engine import open_session, selfcheck
from toolkit.engine.capture import StaticForward
from toolkit.engine.engine import engine_of
from toolkit.engine.facts import max_positions
from toolkit.engine.selfcheck import check_architecture, check_trees, memory_file
from toolkit.engine.shrinking import UnknownSizes, build, tiny_config
from toolkit.errors import InputError
from toolkit.models.teacher import produced_logits
from toolkit.testing import COMMON, LLAMA, VOCAB, difference, tiny_model

SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
BERT = {**COMMON, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
BART = {**COMMON, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
REFUSED = {
    "mamba": (hf.MambaForCausalLM, hf.MambaConfig(**SMALL), "keeps a state"),
    "rwkv": (hf.RwkvForCausalLM, hf.RwkvConfig(**SMALL, attention_hidden_size=32), "keeps a state"),
    "bloom": (hf.BloomForCausalLM, hf.BloomConfig(**SMALL, n_head=4), "alibi"),
    "mpt": (hf.MptForCausalLM, hf.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=VOCAB), "alibi"),
    "falcon_alibi": (hf.FalconForCausalLM, hf.FalconConfig(**SMALL, num_attention_heads=4, alibi=True), "alibi"),
    "bart": (hf.BartForCausalLM, hf.BartConfig(**BART), "takes no positions"),
    "bert": (hf.BertLMHeadModel, hf.BertConfig(**BERT), "bidirectional"),
    "gpt_neo": (hf.GPTNeoForCausalLM, hf.GPTNeoConfig(**SMALL, num_layers=2, num_heads=4, window_size=7,
                attention_types=[[["global", "local"], 1]]), "counts slots"),
}  # fmt: skip
CHUNKED = {**LLAMA, "head_dim": 8, "attention_chunk_size": 7, "intermediate_size_mlp": 48, "num_local_experts": 2,
           "num_hidden_layers": 2, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
           "moe_layers": []}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 24}  # fmt: skip


def built(model_class, config):
    torch.manual_seed(0)
    return model_class(config).eval().requires_grad_(False)


def long_rope():
    return built(hf.Phi3ForCausalLM, hf.Phi3Config(**LLAMA, rope_parameters=LONG, original_max_position_embeddings=24))


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_cannot_be_decoded_are_refused_in_one_line(family):
    model_class, config, reason = REFUSED[family]
    pair = ModelPair(target=built(model_class, config))
    with pytest.raises(
        InputError, match=f"the target \\({model_class.__name__}\\) cannot be decoded: .*{reason}"
    ) as caught:
        generate(pair, [[4, 5, 6]], "autoregressive", max_new_tokens=3)
    assert "\n" not in str(caught.value)


def test_an_unknown_family_that_is_wrong_is_refused(monkeypatch):
    """A model that reads slots where it was given positions: right for chains, wrong in trees."""

    class BySlots(hf.GPT2LMHeadModel):
        def forward(self, input_ids=None, position_ids=None, **kwargs):
            return super().forward(input_ids, position_ids=position_ids * 0 + torch.arange(input_ids.shape[1])
                                   if position_ids is not None else None, **kwargs)  # fmt: skip

    model = BySlots(hf.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=VOCAB, n_positions=64)).eval()
    with pytest.raises(InputError, match="BySlots.*its cached forward differs from its uncached one .*self_check=off"):
        check_architecture(model)


def test_a_family_that_is_refused_can_be_decoded_on_trust():
    model = tiny_model("llama")
    pair = ModelPair(target=model)
    pair.options = type(pair.options)(self_check="off")
    with pytest.warns(RuntimeWarning, match="self_check=off: LlamaForCausalLM is decoded on trust"):
        generate(pair, [[4, 5]], "autoregressive", max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(pair, [[4, 5]], "autoregressive", max_new_tokens=2)
    with pytest.raises(InputError, match="self_check: expected one of auto, off or true or false, got 'maybe'"):
        ModelPair.from_pretrained("toy/target", "toy/draft", self_check="maybe")


def test_chunked_attention_sees_its_own_chunk():
    model = built(hf.Llama4ForCausalLM, hf.Llama4TextConfig(**CHUNKED))
    check_architecture(model)
    check_trees(model.double(), 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.engine.hf.takes_mask_per_layer_type", lambda model: False)
        with pytest.raises(Exception, match="differ"):
            check_trees(model, 12)


def test_long_rope_does_not_depend_on_padding_nor_pass_its_original_length():
    model = long_rope()
    check_architecture(model)
    assert max_positions(model) == 24
    session = open_session(model, 2, 40)  # padding's scratch slot lies behind the limit
    tokens = torch.tensor([[4, 9, 6, 7, 11, 12], [4, 9, 6, 7, 11, 12]])
    reading = session.extend(tokens, counts=[6, 2])
    assert difference(model, reading.logits[:, 0], [tokens[0].tolist(), tokens[1, 4:].tolist()]) < 1e-5
    with pytest.raises(InputError, match="context"):
        generate(ModelPair(target=model), [[4] * 20], "autoregressive", max_new_tokens=10)


def test_layers_that_share_keys_are_cached_once():
    config = hf.Gemma3nTextConfig()
    model = build(hf.Gemma3nForCausalLM, tiny_config(config), "sdpa")
    assert model.config.num_kv_shared_layers == 2
    check_trees(model)
    session = open_session(model, 1, 16)
    session.extend(torch.tensor([[4, 5]]))
    assert len(session.filled) == 2


def test_the_check_leaves_random_numbers_alone_and_is_remembered(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    tries = []
    monkeypatch.setattr(selfcheck, "_try", lambda model: tries.append(1))
    model = tiny_model("qwen2")
    before = torch.get_rng_state()
    check_architecture(model)
    assert torch.equal(torch.get_rng_state(), before)
    check_architecture(tiny_model("qwen2"))
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    check_architecture(model)  # from the file
    assert len(tries) == 1 and memory_file().is_relative_to(tmp_path)
    memory_file().write_text("{")
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    check_architecture(model)
    assert len(tries) == 2
    check_architecture(tiny_model("qwen2_window"))
    assert len(tries) == 3


def test_classes_that_cannot_be_built_tiny_are_tried_on_their_own_weights(monkeypatch, tmp_path):
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fails(*_):
        raise UnknownSizes("no such sizes")

    monkeypatch.setattr(selfcheck, "build", fails)
    check_architecture(tiny_model("mistral"))
    monkeypatch.setattr(selfcheck, "SMALL", 1)
    with pytest.raises(InputError, match=r"could not be built tiny, .* \(no such sizes\); self_check=off decodes"):
        check_architecture(tiny_model("mistral"))


# -- captured forwards ------------------------------------------------------------------------------------------------


class EagerStatic(StaticForward):
    after = 1


def other_weights(model):
    return {name: tensor * 0.5 for name, tensor in model.state_dict().items()}


def replace_weights(model):
    model.load_state_dict(other_weights(model), assign=True)


def replace_parameter(model):
    model.model.norm.weight = nn.Parameter(model.model.norm.weight * torch.randn(32), requires_grad=False)


def replace_module(model):
    model.model.layers[1].mlp.down_proj = nn.Linear(48, 32, bias=False, dtype=torch.float64).requires_grad_(False)


def replace_data(model):
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0).clone()


def add_hook(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)


def write_weights(model):
    model.lm_head.weight.mul_(-1)


CHANGES = [replace_weights, replace_parameter, replace_module, replace_data, add_hook, write_weights]


@pytest.mark.parametrize("change", CHANGES)
def test_captured_forwards_never_outlive_what_they_captured(change):
    pair = ModelPair(target=tiny_model("llama").double())
    engine_of(pair).capture_kind = EagerStatic
    for _ in range(2):
        generate(pair, [[4, 5, 6]], "autoregressive", max_new_tokens=12, temperature=0)
    assert engine_of(pair).idle[0].target.captures.known
    change(pair.target)
    (after,) = generate(pair, [[4, 5, 6]], "autoregressive", max_new_tokens=12, temperature=0)
    fresh = ModelPair(target=pair.target)
    (plain,) = generate(fresh, [[4, 5, 6]], "autoregressive", max_new_tokens=12, temperature=0)
    assert after.token_ids == plain.token_ids
    if change is add_hook:
        assert engine_of(pair).captures == [None]


def test_training_mode_with_dropout_and_autocast_are_refused():
    config = hf.LlamaConfig(**{**LLAMA, "attention_dropout": 0.1})
    pair = ModelPair(target=hf.LlamaForCausalLM(config).requires_grad_(False))
    pair.target.train()
    with pytest.raises(InputError, match=r"target in evaluation mode, got training mode with attention_dropout=0.1"):
        generate(pair, [[4, 5]], "autoregressive", max_new_tokens=2)
    pair.target.eval()
    generate(pair, [[4, 5]], "autoregressive", max_new_tokens=2)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="own dtype, got torch.autocast"):
        generate(pair, [[4, 5]], "autoregressive", max_new_tokens=2)
    plain = ModelPair(target=tiny_model("llama").train())  # nothing in it is random
    generate(plain, [[4, 5]], "autoregressive", max_new_tokens=2)


def test_whole_texts_are_not_read_in_training_mode():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**LLAMA, "attention_dropout": 0.1})).train()
    with pytest.raises(InputError, match="expected the model in evaluation mode"):
        produced_logits(model, [([4], [5])])
    assert produced_logits(model.eval(), [([4], [5])]).shape == (1, VOCAB)


@pytest.mark.parametrize("vocab_size", [2, 3, 4, 10])
def test_the_smallest_vocabularies_are_tried_on_their_own_tokens(vocab_size):
    config = {**LLAMA, "vocab_size": vocab_size, "eos_token_id": None, "bos_token_id": None}
    check_architecture(built(hf.LlamaForCausalLM, hf.LlamaConfig(**config)))
    config = {**BERT, "vocab_size": vocab_size, "eos_token_id": None, "bos_token_id": None}
    with pytest.raises(InputError, match="its attention is bidirectional"):
        check_architecture(built(hf.BertLMHeadModel, hf.BertConfig(**config)))

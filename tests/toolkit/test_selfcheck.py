"""Architectures are decoded right or refused in one line, by a tiny copy; modes that make forwards random are refused."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch import nn

from toolkit import ModelPair, generate
from toolkit.engine import open_session, selfcheck
from toolkit.engine.facts import check_evaluation, max_positions
from toolkit.engine.selfcheck import check_architecture, check_trees, memory_file
from toolkit.engine.shrinking import UnknownSizes, build, tiny_config
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.models.teacher import produced_logits
from toolkit.testing import COMMON, LLAMA, VOCAB, difference, tiny_model

SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
BERT = {**COMMON, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED = {
    "rwkv": (hf.RwkvForCausalLM, hf.RwkvConfig(**SMALL, attention_hidden_size=32), "keeps a state"),
    "falcon_alibi": (hf.FalconForCausalLM, hf.FalconConfig(**SMALL, num_attention_heads=4, alibi=True), "alibi"),
    "bert": (hf.BertLMHeadModel, hf.BertConfig(**BERT), "bidirectional"),
    "gpt_neo": (hf.GPTNeoForCausalLM, hf.GPTNeoConfig(**SMALL, num_layers=2, num_heads=4, window_size=7,
                attention_types=[[["global", "local"], 1]]), "counts slots"),
}  # fmt: skip
CHUNKED = {**LLAMA, "head_dim": 8, "attention_chunk_size": 7, "intermediate_size_mlp": 48, "num_local_experts": 2,
           "num_hidden_layers": 2, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
           "moe_layers": []}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 24}  # fmt: skip


@pytest.fixture
def nothing_remembered(monkeypatch, tmp_path):
    """As in a new process of a user without a cache; the returned function begins another process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    begin = lambda: monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    begin()
    return begin


def built(model_class, config):
    torch.manual_seed(0)
    return model_class(config).eval().requires_grad_(False)


def long_rope():
    return built(hf.Phi3ForCausalLM, hf.Phi3Config(**LLAMA, rope_parameters=LONG, original_max_position_embeddings=24))


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_cannot_be_decoded_are_refused_in_one_line(family):
    model_class, config, reason = REFUSED[family]
    pair = ModelPair(target=built(model_class, config))
    message = f"^the target .{model_class.__name__}. cannot be decoded: [^\n]*{reason}[^\n]*$"
    with pytest.raises(InputError, match=message):
        generate(pair, [[4, 5, 6]], "autoregressive", max_new_tokens=3)


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


@pytest.mark.parametrize("vocab_size", [2, 4])
def test_the_smallest_vocabularies_are_tried_on_their_own_tokens(vocab_size):
    config = {**LLAMA, "vocab_size": vocab_size, "eos_token_id": None, "bos_token_id": None}
    check_architecture(built(hf.LlamaForCausalLM, hf.LlamaConfig(**config)))
    config = {**BERT, "vocab_size": vocab_size, "eos_token_id": None, "bos_token_id": None}
    with pytest.raises(InputError, match="its attention is bidirectional"):
        check_architecture(built(hf.BertLMHeadModel, hf.BertConfig(**config)))


# -- the check's memory, formats, and models that are tried on their own weights ------------------------------------------


def test_the_check_leaves_random_numbers_alone_and_is_remembered(monkeypatch, tmp_path, nothing_remembered):
    tries = []
    monkeypatch.setattr(selfcheck, "check_trees", lambda model: tries.append(1))
    monkeypatch.setattr(selfcheck, "REMEMBERED", 1)
    model = tiny_model("qwen2")
    before = torch.get_rng_state()
    check_architecture(model)
    assert torch.equal(torch.get_rng_state(), before)
    check_architecture(tiny_model("qwen2"))
    nothing_remembered()
    check_architecture(model)  # from the file
    assert len(tries) == 1 and memory_file().is_relative_to(tmp_path)
    for number, content in enumerate(("{", "[]", '{"right": 3}')):
        memory_file().write_text(content)
        nothing_remembered()
        check_architecture(model)
        assert len(tries) == 2 + number
    check_architecture(tiny_model("qwen2_window"))
    assert len(tries) == 5 and len(read_json(memory_file())["right"]) == 1, "the newest alone"
    monkeypatch.setenv("XDG_CACHE_HOME", str(memory_file()))  # no folder: nothing can be written there
    check_architecture(tiny_model("llama"))


def unbuilt(*_):
    raise UnknownSizes("no such sizes")


def test_what_cannot_be_shrunk_and_is_elsewhere_is_refused(monkeypatch, nothing_remembered):
    monkeypatch.setattr(selfcheck, "build", unbuilt)
    check_architecture(tiny_model("mistral"))
    with pytest.raises(InputError, match="could not be built tiny"):
        check_architecture(tiny_model("mistral").to("meta"))


# -- why a model is refused -----------------------------------------------------------------------------------------------


class Model:
    def __init__(self, **own):
        vars(self).update(own)

    def modules(self):
        return []


def model_of(config=None, **own):
    """What messages look at; the decoder's config is the one that is asked for."""
    config = SimpleNamespace(**{"layer_types": ["full_attention"], "model_type": "x", **(config or {})})
    config.get_text_config = lambda decoder: config if decoder else None
    facts = {
        "config": config, "dtype": torch.float32, "device": torch.device("cpu"),
        "get_output_embeddings": lambda: SimpleNamespace(weight=torch.zeros(1)),
        "forward": lambda input_ids, position_ids, use_cache=False: None, **own,
    }  # fmt: skip
    return Model(**facts)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (model_of(), None),
        (model_of({"layer_types": None}), None),
        (model_of({"layer_types": ["full_attention", "linear_attention"]}), "keeps a state"),
        (model_of(_is_stateful=True), "keeps a state"),
        (model_of({"is_encoder_decoder": True}), "encoder-decoder"),
        (model_of(active_peft_config=SimpleNamespace(is_prompt_learning=True)), "in front of every text"),
        (model_of(get_output_embeddings=lambda: None), "no output embedding"),
        (model_of({"_attn_implementation": "flash_attention_2"}), "takes no masks"),
        (model_of({"_attn_implementation": "flex_attention"}), "takes no masks"),
        (model_of({"_attn_implementation": "sdpa"}), None),
        (model_of({"_experts_implementation": "grouped_mm"}, dtype=torch.float64), "know no float64"),
        (model_of({"_experts_implementation": "grouped_mm"}), None),
        (model_of({"_experts_implementation": "eager"}, dtype=torch.float64), None),
    ],
)
def test_what_rules_a_model_out_from_the_start(model, words):
    reason = selfcheck.hopeless(model)
    assert reason is None if words is None else words in reason


class Training(nn.Module):
    """A model in training mode, with a config, and one layer of a kind."""

    def __init__(self, layer=None, training=True, **config):
        super().__init__()
        inner = SimpleNamespace(**config)
        self.config = SimpleNamespace(get_text_config=lambda decoder=False: inner if decoder else None)
        self.layer = nn.Identity() if layer is None else layer
        self.train(training)
        self.device = torch.device("cpu")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Training(nn.Dropout1d(1.0)), "dropout of 1.0"),
        (Training(nn.Dropout(0.0)), None),
        (Training(nn.Dropout(0.5), training=False), None),
        (Training(attention_dropout=0.1, hidden_dropout=0.2), "attention_dropout=0.1"),
        (Training(router_jitter_noise=0.1), "router_jitter_noise=0.1"),
        (Training(attention_dropout=0.0, drop_path=1, scale=0.5), None),
        (Training(classifier_dropout=0.1, summary_first_dropout=0.1, cls_dropout=0.1), None),
        (Training(attention_dropout=0.1, training=False), None),
    ],
)
def test_training_mode_is_refused_where_it_is_random(model, reason):
    if reason is None:
        check_evaluation(model)
        return
    with pytest.raises(InputError, match=f"^expected the draft in evaluation mode, got training mode with {reason}: "):
        check_evaluation(model, "draft")


def test_checkpointed_gradients_keep_no_cache():
    model = Training()
    model.layer.gradient_checkpointing = True
    with pytest.raises(InputError, match="^expected the model in .* with gradient checkpointing"):
        check_evaluation(model)
    model.layer.training = False
    check_evaluation(model)


def test_training_mode_with_dropout_and_autocast_are_refused():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**LLAMA, "attention_dropout": 0.1})).requires_grad_(False).train()
    read = lambda: produced_logits(model, [([4], [5])])
    decode = lambda: generate(ModelPair(target=model), [[4, 5]], "autoregressive", max_new_tokens=2)
    for use in (read, decode):
        with pytest.raises(InputError, match="in evaluation mode, got training mode with attention_dropout=0.1"):
            use()
    model.eval()
    assert read().shape == (1, VOCAB)
    decode()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="own dtype, got torch.autocast"):
        decode()
    plain = ModelPair(target=tiny_model("llama").train())  # nothing in it is random
    generate(plain, [[4, 5]], "autoregressive", max_new_tokens=2)


# -- tiny copies of configs -----------------------------------------------------------------------------------------------


def test_a_copy_is_built_the_same_every_time_and_leaves_random_numbers_alone():
    state = torch.random.get_rng_state()
    one, other = (build(hf.LlamaForCausalLM, tiny_config(hf.LlamaConfig()), "sdpa") for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert a.dtype == torch.float64 and a.device.type == "cpu" and torch.equal(a, b) and not a.requires_grad, name
        assert bool((a != 0).all()) and (a.dim() > 1 or float(a.std()) > 0.01), name
    assert not one.training and one.config._attn_implementation == "sdpa"

"""Padded models compute what their sources compute; what is added is at work and reaches no output."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from toolkit.engine import open_session
from toolkit.engine.engine import EngineOptions
from toolkit.errors import InputError
from toolkit.models.pair import ModelPair
from toolkit.testing import padding
from toolkit.testing.padding import pad_model, padded_pair

VOCAB = 61
BASE = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-3, "max_position_embeddings": 64}  # fmt: skip
CHOICES = ("cuda_graphs", "self_check")  # of a pair, which its padded form keeps
LARGER = {"hidden_size": 80, "intermediate_size": 96, "num_layers": 4}
SAME = {"hidden_size": 24, "intermediate_size": 40, "num_layers": 2, "num_heads": 4}
GROUPED, TIED = {"num_key_value_heads": 2}, {"tie_word_embeddings": True}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
SOURCES = {  # name -> (what differs from BASE, what differs from LARGER)
    "plain": ({}, {}),
    "tied": (TIED, {}),
    "grouped": (GROUPED, {}),
    "grouped, larger groups": (GROUPED, {"num_heads": 10, "num_kv_heads": 2}),
    "grouped, smaller groups": ({"num_key_value_heads": 1}, {"num_heads": 10, "num_kv_heads": 5}),
    "biases": ({"attention_bias": True, "mlp_bias": True}, {"head_dim": 16}),
    "longer heads": (GROUPED, {"num_heads": 5, "num_kv_heads": 5, "head_dim": 16}),
    "longer heads, scaled rotary": ({"rope_parameters": LLAMA3}, {"num_heads": 4, "head_dim": 32}),
    "vocabulary": ({}, {"vocab_size": 100}),
    "vocabulary, tied": (TIED, {"vocab_size": 100}),
    "same size": ({}, SAME),
}  # fmt: skip


def tiny(dtype=torch.float32, seed=0, **changes):
    """A random Llama whose norm weights and biases are not trivial, and whose logits are of size 1."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**BASE, "initializer_range": 0.2, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype).eval()


def logits_of(model, tokens):
    with torch.inference_mode():
        return model(tokens).logits


@pytest.fixture
def exact_norms(monkeypatch):
    """RMSNorm in the model's own precision; the stock one computes in float32 always."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


@pytest.fixture
def tokens():
    return torch.randint(VOCAB, (3, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("changes", "shape"), SOURCES.values(), ids=SOURCES)
def test_logits_are_equal_in_float64(changes, shape, tokens, exact_norms):
    model = tiny(torch.float64, **changes)
    padded = pad_model(model, **{**LARGER, **shape})
    expected, got = logits_of(model, tokens), logits_of(padded, tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(got[..., :VOCAB], expected, rtol=0, atol=1e-10)
    assert got.softmax(-1)[..., VOCAB:].sum() == 0


def test_logits_are_equal_through_the_cache(tokens):
    changes, shape = SOURCES["longer heads"]
    model = tiny(**changes)
    padded = pad_model(model, **{**LARGER, **shape})
    parents = torch.tensor([[-1, 0, 0, 1]]).expand(3, -1)
    readings = []
    for each in (model, padded):
        session = open_session(each, num_rows=3, capacity=24)
        session.extend(tokens[:, :9])
        session.extend(tokens[:, 9:12])
        readings.append(session.extend(tokens[:, 12:16], parents=parents, last=4))
    torch.testing.assert_close(readings[1].logits, readings[0].logits, rtol=0, atol=1e-5)
    hidden = readings[1].hidden
    torch.testing.assert_close(hidden[..., :24], readings[0].hidden, rtol=0, atol=1e-5)
    assert hidden[..., 24:].abs().max() == 0


@pytest.mark.parametrize("name", ["biases", "longer heads", "vocabulary"])
def test_added_weights_reach_no_output(name, tokens):
    changes, shape = SOURCES[name]
    one, other = (pad_model(tiny(**changes), **{**LARGER, **shape}, seed=seed) for seed in (0, 1))
    assert torch.equal(logits_of(one, tokens)[..., :VOCAB], logits_of(other, tokens)[..., :VOCAB])
    assert not torch.equal(one.model.layers[0].mlp.up_proj.weight, other.model.layers[0].mlp.up_proj.weight)
    for layer in one.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            assert (linear.weight != 0).all()
        assert (layer.self_attn.k_proj.weight != 0).float().mean() > 0.5


def test_the_shape_is_the_one_asked_for_and_the_source_is_untouched(tokens):
    model = tiny(tie_word_embeddings=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    padded = pad_model(model, **LARGER, num_heads=8, num_kv_heads=4, dtype=torch.bfloat16)
    config = padded.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (80, 96, 4)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 8)
    assert padded.lm_head.weight is padded.model.embed_tokens.weight
    assert (padded.dtype, padded.model.rotary_emb.inv_freq.dtype) == (torch.bfloat16, torch.float32)
    assert padded.generation_config is not model.generation_config
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(logits_of(padded, tokens).float(), logits_of(model, tokens), rtol=0, atol=0.1)


def test_a_padded_model_can_be_saved(tmp_path, tokens):
    padded = pad_model(tiny(), **LARGER)
    padded.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(logits_of(again, tokens), logits_of(padded, tokens))


def test_a_pair_is_padded(monkeypatch, tokens):
    pair = ModelPair(target=tiny(), draft=tiny(seed=1), name="toy", head="head")
    asked = []

    def load(*args, **options):
        asked.append((args, options))
        chosen = {name: value for name, value in options.items() if name in CHOICES}
        return replace(pair, draft=None, options=EngineOptions(**chosen))

    monkeypatch.setattr(ModelPair, "from_pretrained", load)
    monkeypatch.setitem(padding.PRESETS, "tiny", LARGER)
    padded = padded_pair(target_preset="tiny", dtype="float64", revision="main")
    assert asked == [(("toy/target", "toy/draft"), {"device": "cpu", "dtype": "float64", "revision": "main"})]
    assert padded.target.config.hidden_size == 80
    assert padded.draft is pair.draft
    assert (padded.name, padded.head, padded.end_ids) == ("toy-tiny", "head", pair.end_ids)
    assert [getattr(padded.options, name) for name in CHOICES] == ["auto"] * 2
    both = padded_pair(target_preset="tiny", draft_preset="tiny", **dict.fromkeys(CHOICES, "off"))
    assert [getattr(both.options, name) for name in CHOICES] == ["off"] * 2
    assert both.draft.config.hidden_size == 80
    assert both.head is None
    torch.testing.assert_close(logits_of(both.draft, tokens), logits_of(pair.draft, tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("source", "shape", "words"),
    [
        (GROUPED, {"intermediate_size": 39}, "intermediate_size of at least 40, got 39"),
        (GROUPED, {"head_dim": 12}, "head_dim as a multiple of 8, got 12"),
        (GROUPED, {"num_heads": 10, "num_kv_heads": 3}, "split into num_key_value_heads=3 groups"),
        (
            {"num_attention_heads": 6, **GROUPED},
            {"hidden_size": 96, "num_heads": 6, "num_kv_heads": 3},
            "for groups of 2",
        ),
    ],
)
def test_sources_that_do_not_fit_are_refused(source, shape, words):
    with pytest.raises(InputError, match=words):
        pad_model(tiny(**source), **{**LARGER, **shape})

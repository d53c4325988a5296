"""Tiny copies of configs: which sizes they get, which layers are chosen, and what is kept as it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch import nn

from toolkit.engine import shrinking
from toolkit.engine.facts import check_mode
from toolkit.engine.shrinking import LONGEST, POSITIONS, WINDOW, UnknownSizes, build, tiny_config
from toolkit.errors import InputError


def config_of(**values):
    return SimpleNamespace(**values)


@pytest.mark.parametrize(
    ("name", "value", "small"),
    [
        ("vocab_size", 32000, 64), ("vocab_size", 50, 50), ("text_vocab_size", 900, 64), ("n_positions", 2048, POSITIONS),
        ("max_position_embeddings", 2048, POSITIONS), ("original_max_position_embeddings", 4096, WINDOW),
        ("sliding_window", 4096, WINDOW), ("attention_chunk_size", 8192, WINDOW), ("q_lora_rank", 512, 16),
        ("qk_head_dim", 192, 16), ("rotary_dim", 64, 8), ("head_dim", 128, 8), ("v_head_dim", 128, 8),
        ("num_key_value_heads", 8, 2), ("num_experts_per_tok", 8, 2), ("n_group", 8, 1), ("num_local_experts", 8, 4),
        ("first_k_dense_replace", 3, 1), ("intermediate_size", 11008, 32), ("moe_intermediate_size", 1408, 32),
        ("hidden_size_per_layer_input", 256, 8), ("hidden_size", 4096, 32), ("n_embd", 768, 32), ("d_model", 512, 32),
        ("num_attention_heads", 32, 4), ("n_head", 2, 4), ("bos_token_id", 50256, 63), ("eos_token_id", 63, 63),
        ("pad_token_id", 64, 63), ("image_token_index", 5, 5), ("anything", 12345, 12345), ("image_size", 224, 32),
    ],
)  # fmt: skip
def test_sizes_are_known_by_their_names(name, value, small):
    assert shrinking._small(name, value) == small


@pytest.mark.parametrize(
    ("values", "chosen", "types"),
    [
        ({"num_hidden_layers": 12}, [0, 1], None),
        ({"num_hidden_layers": 1}, [0], None),
        ({"num_hidden_layers": 4, "layer_types": ["a", "a", "b", "a"]}, [0, 2], ["a", "b"]),
        ({"num_hidden_layers": 3, "layer_types": ["a", "a", "a"]}, [0, 1], ["a", "a"]),
        ({"num_hidden_layers": 6, "layer_types": [*"abcdea"]}, [0, 1, 2, 3], [*"abcd"]),
        ({"num_hidden_layers": 4, "layer_types": ("b", "b", "a", "a")}, [0, 2], ("b", "a")),
        ({"num_hidden_layers": 6, "layer_types": [*"abaabb"], "num_kv_shared_layers": 3}, [0, 1, 0, 1], [*"abab"]),
        ({"num_hidden_layers": 4, "layer_types": ["a", "b"]}, [0, 1], ["a", "b"]),  # of something else
        ({}, [], None),
    ],
)
def test_the_first_layer_of_each_kind_is_chosen(values, chosen, types):
    config = config_of(**values, n_layer=7, per_layer=[*range(values.get("num_hidden_layers", 3))])
    if "num_hidden_layers" not in values:
        del config.n_layer
    assert shrinking._choose_layers(config) == chosen
    assert getattr(config, "layer_types", None) == types
    if values:
        assert config.num_hidden_layers == config.n_layer == len(chosen)
        kept = chosen if values["num_hidden_layers"] > 2 else [*range(values["num_hidden_layers"])]
        assert config.per_layer == kept
    if "num_kv_shared_layers" in values:
        assert config.num_kv_shared_layers == 2


@pytest.mark.parametrize(
    ("sizes", "frequencies"),
    [
        ({"head_dim": 8}, 4),
        ({"qk_rope_head_dim": 16, "head_dim": 8}, 8),
        ({"hidden_size": 48, "num_attention_heads": 4}, 6),
        ({"n_embd": 48, "n_head": 4}, 6),
        ({"head_dim": 16, "partial_rotary_factor": 0.5}, 4),
    ],
)
def test_factors_of_rope_are_cut_to_the_frequencies_there_are(sizes, frequencies):
    config = config_of(**sizes, original_max_position_embeddings=4096)
    given = {
        "rope_type": "longrope",
        "short_factor": [*range(48)],
        "long_factor": [*range(100, 148)],
        "mrope_section": [9, 9, 9],
    }
    found = shrinking._small_rope(given, config)
    step = 48 // frequencies
    assert found["short_factor"] == [i * step for i in range(frequencies)]
    assert found["long_factor"] == [100 + i * step for i in range(frequencies)]
    third = frequencies // 3
    assert found["mrope_section"] == [frequencies - 2 * third, third, third]
    assert found["original_max_position_embeddings"] == config.original_max_position_embeddings == LONGEST == 2 * WINDOW
    assert given["short_factor"] == [*range(48)]  # the original stays


def test_a_part_of_the_rope_counts_before_the_configs():
    rope = {"rope_type": "default", "partial_rotary_factor": 0.25, "short_factor": [1, 2, 3, 4]}
    found = shrinking._small_rope(rope, config_of(head_dim=16, partial_rotary_factor=0.5))
    assert found == {**rope, "short_factor": [1, 3]}
    both = {"full": rope, "sliding": {"rope_type": "default"}, "theta": 3.0}
    assert shrinking._small_rope(both, config_of(head_dim=16)) == {
        "full": found,
        "sliding": both["sliding"],
        "theta": 3.0,
    }


def test_a_tiny_config_keeps_what_decides_how_a_model_attends():
    config = hf.Gemma3TextConfig(num_hidden_layers=12, sliding_window=512, vocab_size=1000, num_key_value_heads=1)
    config.name_or_path = "somewhere"
    small = tiny_config(config)
    assert (config.num_hidden_layers, config.vocab_size) == (12, 1000)
    assert small.layer_types == ["sliding_attention", "full_attention"] and small.num_hidden_layers == 2
    assert (small.sliding_window, small.vocab_size, small.hidden_size, small.head_dim) == (WINDOW, 64, 32, 8)
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, 1) and type(small) is type(config)
    llama = tiny_config(hf.LlamaConfig(num_attention_heads=32, num_key_value_heads=32))
    assert (llama.num_attention_heads, llama.num_key_value_heads) == (4, 4)
    grouped = tiny_config(hf.LlamaConfig(num_attention_heads=32, num_key_value_heads=8))
    assert (grouped.num_attention_heads, grouped.num_key_value_heads) == (4, 2)
    odd = config_of(
        quantization_config={"bits": 4}, hidden_size=5, bos_token_id=[64, 3], sizes={"head_dim": 99, "x": "y"}
    )
    assert vars(tiny_config(odd)) == {"hidden_size": 5, "bos_token_id": [63, 3], "sizes": {"head_dim": 8, "x": "y"}}


def test_a_copy_is_built_the_same_every_time_and_leaves_random_numbers_alone():
    state = torch.random.get_rng_state()
    one, other = (build(hf.LlamaForCausalLM, tiny_config(hf.LlamaConfig()), "sdpa") for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert a.dtype == torch.float64 and a.device.type == "cpu" and torch.equal(a, b) and not a.requires_grad, name
        assert bool((a != 0).all()) and (a.dim() > 1 or float(a.std()) > 0.01), name
    assert not one.training and one.config._attn_implementation == "sdpa"


def test_what_cannot_be_built_small_is_said(monkeypatch):
    class Broken(nn.Module):
        def __init__(self, config):
            raise ValueError("  needs more\nthan that")

    with pytest.raises(UnknownSizes, match="^needs more$"):
        build(Broken, config_of())
    monkeypatch.setattr(shrinking, "MOST_PARAMETERS", 1_999_999)
    with pytest.raises(UnknownSizes, match="^its smallest copy would have 2 million parameters$"):
        build(lambda config: nn.Linear(1000, 2000, bias=False), config_of())
    monkeypatch.setattr(shrinking, "MOST_PARAMETERS", 2_000_000)
    assert build(lambda config: nn.Linear(1000, 2000, bias=False), config_of()).weight.shape == (2000, 1000)


def test_sessions_of_other_models_are_left_to_them():
    """Tables and the like say themselves what they can do; the mode of a transformers model is looked at."""
    check_mode(SimpleNamespace(open_session=None, device=None))
    model = nn.Linear(2, 2)
    model.device = torch.device("cpu")
    model.eval()
    check_mode(model, "draft")
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(InputError, match="^decoding runs in the draft's own dtype"),
    ):
        check_mode(model, "draft")

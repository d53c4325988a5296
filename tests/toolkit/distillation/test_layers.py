"""A draft made of the target's layers."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from toolkit.drafts.separate import costs as layer_costs
from toolkit.drafts.separate.costs import absence_costs, draft_of, layers_in, most_costly
from toolkit.engine.shrinking import build
from toolkit.errors import InputError
from toolkit.models import reduced
from toolkit.models.teacher import produced_logits
from toolkit.testing import LLAMA, VOCAB, tiny_llama

TEXTS = [([4, 9, 11], [7, 8, 3]), ([6], [10, 12, 4, 5])]


def test_the_cost_of_an_absence_is_the_divergence_without_the_layer(tmp_path, monkeypatch):
    target = tiny_llama(16, 3, 0, torch.float64)
    costs = list(absence_costs(target, TEXTS))
    for layer, cost in enumerate(costs):
        others = [i for i in range(3) if i != layer]
        with torch.no_grad():
            p, q = (produced_logits(model, TEXTS).log_softmax(-1) for model in (target, draft_of(target, others)))
        assert cost == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    assert most_costly(target, TEXTS, 1, tmp_path) == [costs.index(max(costs))]
    monkeypatch.setattr(layer_costs, "absence_costs", None)  # they are kept
    assert most_costly(target, TEXTS, 3, tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("layers", [[], [3], [-1], [1, 1]])
def test_layers_that_do_not_exist_are_one_line(layers):
    with pytest.raises(InputError, match="layers: expected layers from 0 to 2 of the target, each once"):
        draft_of(tiny_llama(16, 3, 0, torch.float32), layers)


# -- families -----------------------------------------------------------------------------------------------------------

SIX = {**LLAMA, "num_hidden_layers": 6, "head_dim": 8}
KINDS = ["sliding_attention", "full_attention", "full_attention"] * 2
EXPERTS = {**SIX, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    **SIX,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    **ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
GPT = {
    "vocab_size": VOCAB,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 6,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA4 = {
    **SIX,
    "intermediate_size_mlp": 48,
    "num_local_experts": 2,
    "attention_chunk_size": 7,
    "interleave_moe_layer_step": 2,
}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "image_size": 28,
         "patch_size": 14}  # fmt: skip
# By name: the model's type, its settings, and what a refusal says; None: every choice of layers is right.
FAMILIES = {
    "llama": ("llama", SIX, None),
    "qwen2": ("qwen2", SIX, None),
    "qwen2 (windows)": ("qwen2", {**SIX, "use_sliding_window": True, "sliding_window": 7, "layer_types": KINDS}, None),
    "qwen3": ("qwen3", SIX, None),
    "mistral": ("mistral", {**SIX, "sliding_window": 7}, None),
    "ministral": ("ministral", {**SIX, "sliding_window": 7, "layer_types": KINDS}, None),
    "gemma": ("gemma", SIX, None),
    "gemma2": ("gemma2", {**SIX, "sliding_window": 7, "layer_types": KINDS}, None),
    "gemma3_text": ("gemma3_text", {**SIX, "sliding_window": 7, "layer_types": KINDS}, None),
    "phi": ("phi", SIX, None),
    "phi3": ("phi3", {**SIX, "sliding_window": 7}, None),
    "olmo2": ("olmo2", SIX, None),
    "cohere": ("cohere", SIX, None),
    "cohere2": ("cohere2", {**SIX, "sliding_window": 7, "layer_types": KINDS}, None),
    "granite": ("granite", {**SIX, "logits_scaling": 8.0}, None),
    "starcoder2": ("starcoder2", SIX, None),
    "stablelm": ("stablelm", SIX, None),
    "nemotron": ("nemotron", SIX, None),
    "exaone4": ("exaone4", {**SIX, "sliding_window": 7, "layer_types": KINDS}, None),
    "smollm3": ("smollm3", {**SIX, "use_sliding_window": True, "sliding_window": 7}, None),
    "gpt2": ("gpt2", GPT, None),
    "gpt2 (scaled by layer)": ("gpt2", {**GPT, "scale_attn_by_inverse_layer_idx": True}, "its logits differ"),
    "gpt_neo": ("gpt_neo", {**SIX, "num_layers": 6, "num_heads": 4, "window_size": 7,
                "attention_types": [[["global", "local"], 3]]}, None),
    "gpt_neox": ("gpt_neox", SIX, None),
    "gptj": ("gptj", {**GPT, "rotary_dim": 8}, None),
    "opt": ("opt", {**SIX, "ffn_dim": 48, "word_embed_proj_dim": 16}, None),
    "bloom": ("bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 6, "n_head": 4}, None),
    "mpt": ("mpt", {"vocab_size": VOCAB, "d_model": 32, "n_layers": 6, "n_heads": 4, "max_seq_len": 64}, None),
    "falcon": ("falcon", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4}, None),
    "mixtral": ("mixtral", {**SIX, "num_local_experts": 4, "num_experts_per_tok": 2}, None),
    "gpt_oss": ("gpt_oss", {**SIX, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}, None),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "mlp_only_layers": [0, 3], "shared_expert_intermediate_size": 16}, None),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, None),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "first_k_dense_replace": 2}, None),
    "glm4_moe": ("glm4_moe", {**ROUTED, "first_k_dense_replace": 2}, None),
    "llama4_text": ("llama4_text", LLAMA4, None),
    "gemma3 (vision)": ("gemma3", {"text_config": {**SIX, "sliding_window": 7, "layer_types": KINDS}, "vision_config": TOWER,
                        "mm_tokens_per_image": 4}, None),
    "diffllama": ("diffllama", SIX, "its logits differ"),
    "gemma4_text": ("gemma4_text", {**SIX, "layer_types": KINDS, "sliding_window": 7, "hidden_size_per_layer_input": 8,
                    "vocab_size_per_layer_input": VOCAB}, "(would have shape|is not homogeneous)"),
}  # fmt: skip
CHOICES = [[5], [1, 3], [0, 1, 4]]


def of_family(name):
    model_type, settings, _ = FAMILIES[name]
    config = CONFIG_MAPPING[model_type](**settings)
    return build(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, "eager").float()


def without_others(target, layers, ids):
    """The target's logits where the other layers' forward returns what it is given."""
    cut = copy.deepcopy(target)
    for number, layer in enumerate(layers_in(cut)):
        if number not in layers:

            def forward(*args, own=layer.forward, **kwargs):
                output, states = own(*args, **kwargs), args[0] if args else kwargs["hidden_states"]
                return (states, *output[1:]) if isinstance(output, tuple) else states

            layer.forward = forward
    return cut(input_ids=ids, use_cache=False).logits


@torch.no_grad()
def check_family(name, choices, folder):
    """Every choice of layers is the target without the others, also when transformers reads it, or one line."""
    target, reason = of_family(name), FAMILIES[name][2]
    ids = torch.randint(6, 60, (1, 40), generator=torch.Generator().manual_seed(1))  # longer than the windows
    for layers in choices:
        if reason is not None:
            with pytest.raises(InputError, match=f"^layers: no [^\n]*{reason}[^\n]*: give a draft, pair.draft=NAME$"):
                draft_of(target, layers)
            continue
        draft, expected = draft_of(target, layers), without_others(target, layers, ids)
        torch.testing.assert_close(draft(input_ids=ids, use_cache=False).logits, expected, atol=1e-5, rtol=1e-5)
        draft.save_pretrained(folder)
        read, report = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
        )
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        torch.testing.assert_close(read(input_ids=ids, use_cache=False).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["llama", "smollm3", "gpt_neo", "qwen3_moe", "deepseek_v3", "mpt", "gemma3 (vision)", "diffllama"]
)
def test_layers_that_differ_by_number_stay_what_they_are(name, tmp_path):
    check_family(name, [[1, 3]] if FAMILIES[name][2] else [[1, 3], [*range(6)]], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_any_layers_of_any_family_are_right_or_one_line(name, tmp_path):
    check_family(name, [[5], [1, 3]] if FAMILIES[name][2] else CHOICES, tmp_path)


# -- reduced vocabularies of families -------------------------------------------------------------------------------------

CAPPED = {**SIX, "sliding_window": 7, "layer_types": KINDS, "final_logit_softcapping": 2.0}
FAMILIES |= {
    "gemma2 (caps)": ("gemma2", CAPPED, None),
    "cohere (scale)": ("cohere", {**SIX, "logit_scale": 0.0625}, None),
}
KEPT = [2, 9, 10, 33, 60]


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["gpt2", "opt", "phi", "gpt_neox", "gptj", "gemma2 (caps)", "cohere (scale)", "granite"]
)
def test_a_reduced_vocabulary_of_any_family_is_read_and_exported(name, tmp_path):
    """The kept tokens' logits are the model's, with caps, scales and biases; the others cannot be drawn."""
    model = of_family(name)
    ids = torch.randint(6, 60, (1, 12), generator=torch.Generator().manual_seed(1))
    whole, output = model(input_ids=ids).logits, copy.deepcopy(model.get_output_embeddings())
    others = [token for token in range(VOCAB) if token not in KEPT]
    draft = reduced.reduce_vocabulary(model, KEPT, (2,))
    produced_logits(draft, TEXTS)  # no part of it is in training mode
    reduced.save(tmp_path / "reduced", draft)
    for one in (draft, reduced.load(tmp_path / "reduced", "auto").eval()):
        logits = one(input_ids=ids).logits
        torch.testing.assert_close(logits[..., KEPT], whole[..., KEPT])
        assert bool(logits[..., others].isneginf().all())
    with reduced.rows_alone(draft):
        torch.testing.assert_close(draft(input_ids=ids).logits, whole[..., KEPT])
    plain = reduced.whole_vocabulary(draft, output.weight, getattr(output, "bias", None))
    plain.save_pretrained(tmp_path / "plain")
    for one in (plain, AutoModelForCausalLM.from_pretrained(tmp_path / "plain")):
        torch.testing.assert_close(one(input_ids=ids).logits, whole)

"""Every causal architecture of the installed transformers is decoded right or refused in one line, and nothing is written.

Each is built tiny with random weights, and a noisy copy of it drafts. Greedy tokens of chains and of trees are compared
with the model's own uncached forwards, in float64 where it can. The batch of prompts is ragged and outgrows windows,
chunks and the original length of a rope. So this does not rest on what the check itself compares.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit import ModelPair, generate
from toolkit.engine.selfcheck import check_architecture
from toolkit.engine.shrinking import UnknownSizes, build, tiny_config
from toolkit.errors import DecodingError, InputError

PROMPTS = [[5, 9, 11, 7, 8, 30, 21, 14, 6, 17, 40], [12, 33, 4], [8, 8, 25, 19, 50, 44]]
NEW = 12  # tokens of each
INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 64,
           "indexer_compress_ratio": 4}  # fmt: skip
# What a config needs to be built at all where its defaults do not do.
NEEDED: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2, "num_experts": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0,
                         "vocab_size_per_layer_input": 0}},
    "qwen4_exp": {"text_config": {"model_type": "qwen4_exp_text", **INDEXER}},
    "qwen4_exp_text": INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
# What decides how a model attends, and is not the default.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon (alibi)": ("falcon", {"alibi": True}),
    "falcon (new decoder)": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8}),
    "bert (decoder)": ("bert", {"is_decoder": True}),
    "roberta (decoder)": ("roberta", {"is_decoder": True}),
    "electra (decoder)": ("electra", {"is_decoder": True}),
    "qwen2 (window)": ("qwen2", {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2}),
    "mistral (no window)": ("mistral", {"sliding_window": None}),
    "phi3 (long rope)": ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48,
                         "long_factor": [4.0] * 48, "original_max_position_embeddings": 4096}}),
    "llama (dynamic rope)": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "llama (yarn)": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                     "original_max_position_embeddings": 2048}}),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
}  # fmt: skip


HANDFUL = {
    "llama": "right", "gemma2": "right", "gpt_oss": "right", "llama4_text": "right", "gemma3n_text": "right",
    "phi3 (long rope)": "right", "llama (dynamic rope)": "right", "whisper": "right", "mamba2": "refused", "bloom": "refused",
    "bert": "refused", "pegasus": "refused", "mpt": "refused", "xlnet": "refused", "openai-gpt": "refused", "cpmant": "refused",
}  # fmt: skip


def verdicts(only: list[str] | None = None) -> dict[str, tuple[str, str]]:
    """By family: right, refused, wrong or crash, and why; unbuilt: transformers itself cannot build it tiny."""
    families = {name: (name, NEEDED.get(name, {})) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} | VARIANTS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        return {name: verdict(*families[name]) for name in only or families}


def verdict(model_type: str, settings: dict[str, Any]) -> tuple[str, str]:
    """Build one family tiny and decode it."""
    config_class = CONFIG_MAPPING[model_type]
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    try:
        config = text_config(model_class, config_class(**settings))
        try:
            attention = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
            model = build(model_class, tiny_config(config), attention)
        except UnknownSizes:  # in its real size, but without weights: enough to be refused
            with torch.device("meta"):
                model = model_class(config)
    except Exception as error:  # dependencies that are missing, defaults that do not fit together
        return "unbuilt", repr(error)
    try:
        return "right" if decoded(model) else "wrong", ""
    except Exception as error:
        refused = (
            isinstance(error, InputError) and not isinstance(error, DecodingError) and "\n" not in str(error).strip()
        )
        return "refused" if refused else "crash", repr(error)


def text_config(model_class: Any, config: Any) -> Any:
    """The part of a config that the class takes: AutoModelForCausalLM hands text models theirs."""
    if model_class.config_class is type(config):
        return config
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:
        return config
    return text if isinstance(text, model_class.config_class or type(config)) else config


def decoded(model: Any) -> bool:
    """Whether greedy tokens of chains and trees are the model's own. Raises whatever decoding raises."""
    if model.device.type == "meta":
        check_architecture(model, "target")
        return False
    expected = None
    for dtype in (torch.float64, torch.float32):
        try:
            expected = [own_tokens(model.to(dtype), prompt) for prompt in PROMPTS]
            break
        except Exception:  # the model itself cannot be run: decoding will say so
            continue
    draft = copy.deepcopy(model)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(noise * parameter.std() / 20 if parameter.numel() > 1 else 0)
    pair = ModelPair(target=model, draft=draft, end_ids=())
    cut = max(min(NEW, pair.max_length - max(map(len, PROMPTS))), 1)  # as many as the longest prompt leaves room for
    for method in ("speculative", "mcsd"):
        generations = generate(pair, PROMPTS, method, max_new_tokens=cut, temperature=0.0, batch_size=2)
        if expected is None or [g.token_ids for g in generations] != [tokens[:cut] for tokens in expected]:
            return False
    return True


@torch.no_grad()
def own_tokens(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens by uncached forwards, one text at a time."""
    text = list(prompt)
    for _ in range(NEW):
        text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


def test_a_handful_of_families():
    assert {family: verdict for family, (verdict, _) in verdicts(list(HANDFUL)).items()} == HANDFUL


@pytest.mark.slow
def test_every_causal_architecture_is_decoded_right_or_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table = verdicts()
    words = [verdict for verdict, _ in table.values()]
    assert len(table) == len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) + len(VARIANTS)
    assert {family: row for family, row in table.items() if row[0] in ("wrong", "crash")} == {}
    assert words.count("right") > 100 and words.count("unbuilt") < 10
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["architectures.json"]

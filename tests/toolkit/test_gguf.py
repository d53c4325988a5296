"""GGUF files, as llama.cpp's converter writes them and as a draft is exported: the source's logits and tokens, or one line."""

from __future__ import annotations

import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer

from toolkit import ModelPair, generate
from toolkit.config.identity import contents_of
from toolkit.errors import InputError
from toolkit.models import gguf
from toolkit.models.gguf_file import GGUFFile
from toolkit.testing import tiny_llama, tiny_model

pytest.importorskip("gguf")
import gguf as package

TEXTS = [
    "Tom has 12 red balls; it's naïve — 日本 😀",
    "  two\n\nlines\tof x_1 = [3.5]",
    "<|begin|>Tom<|end|> <|pad|> x",
    "a",
]
CONTEXT = 128
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 2, "max_position_embeddings": CONTEXT, "vocab_size": 1024, "bos_token_id": 1,
         "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
ODD = LLAMA3 | {"low_freq_factor": 1.5, "high_freq_factor": 7.0, "rope_theta": 1000.0}  # no file names these two
LINEAR = ROPE | {"rope_type": "linear", "factor": 4.0}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = ROPE | {"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.4, 1.6], "long_factor": [2.0, 3.0, 4.0, 5.0],
               "original_max_position_embeddings": 64, "attention_factor": 1.2}  # fmt: skip
NAMES = {"hidden_size": "embedding_length", "num_hidden_layers": "block_count", "max_position_embeddings": "context_length",
         "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
         "intermediate_size": "feed_forward_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
         "layer_norm_eps": "attention.layer_norm_epsilon", "norm_epsilon": "attention.layer_norm_epsilon",
         "layer_norm_epsilon": "attention.layer_norm_epsilon", "num_kv_heads": "attention.head_count_kv",
         "norm_eps": "attention.layer_norm_epsilon", "sliding_window": "attention.sliding_window",
         "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
         "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def toy():
    return ModelPair.toy()


def source(kind: str, **settings: Any) -> Any:
    """A tiny model of a family: random weights, biases and norms."""
    config: Any = hf.AutoConfig.for_model(kind, **(SHAPE | {"rope_parameters": dict(ROPE)} | settings))
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        scale = 0.2 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
        starts_at_one = name.endswith("weight") and parameter.dim() == 1 and kind[:5] not in ("gemma", "nemot")
        parameter.copy_(float(starts_at_one) + torch.randn(parameter.shape) * scale)
    return model


def tensors_of(model: Any, architecture: str) -> dict[str, torch.Tensor]:
    """A model's weights under llama.cpp's names and in its layouts."""
    config, kind = model.config, model.config.model_type
    names = package.get_tensor_name_map(
        {name: key for key, name in package.MODEL_ARCH_NAMES.items()}[architecture], config.num_hidden_layers
    )
    tensors = {}
    for name, weights in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if kind in ("llama", "mistral") and (".q_proj." in name or ".k_proj." in name):  # pairs stand side by side
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            weights = weights.view(heads, 2, -1, *weights.shape[1:]).transpose(1, 2).reshape(weights.shape)
        if kind in ("gemma2", "gemma3_text", "nemotron") and name.endswith("norm.weight"):
            weights = weights + 1
        if kind == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            weights = weights.T
        if kind == "bloom" and "query_key_value" in name:
            weights = weights.view(config.n_head, 3, -1, *weights.shape[1:]).transpose(0, 1).reshape(weights.shape)
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), weights.chunk(2, dim=1), strict=True):
                tensors[names.get_name(name.replace("gate_up", part)) + ".weight"] = half
            continue
        name = name.removeprefix("transformer.") if kind == "bloom" else name
        renamed = names.get_name(name, (".weight", ".bias")) or names.get_name(name) + ".weight"
        tensors[renamed] = weights
    return tensors


def rope_of(config: Any, architecture: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Keys and tensors of a model's positions."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "full_attention" in rope:
        rope = rope["full_attention"]
    if not rope or architecture in ("gpt2", "bloom"):
        return {}, {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    keys, kind = {"rope.freq_base": float(rope["rope_theta"]), "rope.dimension_count": rotated}, rope["rope_type"]
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": rope["factor"]}
    if kind in ("yarn", "longrope"):
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if kind == "longrope":
        keys["rope.scaling.attn_factor"] = rope["attention_factor"]
        return keys, {f"rope_factors_{end}.weight": torch.tensor(rope[f"{end}_factor"]) for end in ("long", "short")}
    if kind != "llama3":
        return keys, {}
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
    divisors = []
    for wavelength in (2 * torch.pi / frequencies).tolist():  # as the converter of llama.cpp goes about it
        context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = (context / wavelength - low) / (high - low)
        is_short, is_long = wavelength < context / high, wavelength > context / low
        divisors.append(
            1.0 if is_short else rope["factor"] if is_long else 1 / ((1 - smooth) / rope["factor"] + smooth)
        )
    return keys, {"rope_freqs.weight": torch.tensor(divisors)}


def tokens_of(tokenizer: Any) -> dict[str, Any]:
    """The keys of the toy's tokenizer."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    keys: dict[str, Any] = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "add_bos_token": True}
    keys["token_type"] = [3 if index in tokenizer.added_tokens_decoder else 1 for index in range(len(tokens))]
    keys["merges"] = [" ".join(merge) for merge in model["merges"]]
    keys |= {"bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 0}
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def file_of(
    path: Path,
    model: Any,
    tokenizer: Any,
    architecture: str,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor | None] | None = None,
    shards: int = 0,
    quantised: bool = False,
) -> Path:
    """A file of a model, with other keys and tensors on top; None drops one."""
    writer = package.GGUFWriter(path, architecture, split_max_tensors=shards)
    rope_keys, rope_tensors = rope_of(model.config, architecture)
    values = [(name, getattr(model.config, field, None)) for field, name in NAMES.items()]
    fields = {f"{architecture}.{name}": value for name, value in (*values, *rope_keys.items()) if value is not None}
    if architecture in ("gpt2", "bloom"):
        del fields[f"{architecture}.attention.head_count_kv"]
    if architecture == "bloom":
        fields["bloom.feed_forward_length"] = 4 * model.config.hidden_size
    head_dim = model.config.to_dict().get("head_dim")
    if head_dim is not None:
        fields[f"{architecture}.attention.key_length"] = head_dim
    for name, value in (fields | tokens_of(tokenizer) | (keys or {})).items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        if value is not None:
            add[type(value)](name, value)
    for name, weights in (tensors_of(model, architecture) | rope_tensors | (tensors or {})).items():
        if weights is not None and quantised and weights.dim() == 2:
            kind = package.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, package.quants.quantize(weights.numpy(), kind), raw_dtype=kind)
        elif weights is not None:
            writer.add_tensor(name, weights.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same(path: Path, model: Any, tokenizer: Any, tolerance: float = 1e-4) -> ModelPair:
    pair = ModelPair.from_pretrained(path)
    ids = torch.randint(1024, (2, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(pair.target(ids).logits, model(ids).logits, atol=tolerance, rtol=tolerance)
    for text in TEXTS:
        assert pair.tokenizer(text).input_ids == tokenizer(text).input_ids, text
    return pair


FILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "tied": ("llama", "llama", {"tie_word_embeddings": True}),
    "heads of another width": ("llama", "llama", {"head_dim": 16}),
    "llama3": ("llama", "llama", {"rope_parameters": LLAMA3}),
    "divisors of other ends": ("llama", "llama", {"rope_parameters": ODD}),
    "linear": ("llama", "llama", {"rope_parameters": LINEAR}),
    "yarn": ("llama", "llama", {"rope_parameters": YARN}),
    "biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", "llama", {"sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", {"rope_parameters": YARN, "sliding_window": None}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 16, "sliding_window": None, "attention_bias": True}),
    "qwen3moe": ("qwen3_moe", "qwen3moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
                                           "moe_intermediate_size": 24, "norm_topk_prob": True}),
    "phi3": ("phi3", "phi3", {"sliding_window": 20}),
    "phi3 long": ("phi3", "phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64, "sliding_window": None}),
    "gemma2": ("gemma2", "gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20,
                                    "attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0}),
    "gemma3": ("gemma3_text", "gemma3", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20,
                                         "num_hidden_layers": 7,
                                         "rope_parameters": {"full_attention": LINEAR, "sliding_attention": ROPE}}),
    "stablelm": ("stablelm", "stablelm", {"use_qkv_bias": True, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    "starcoder2": ("starcoder2", "starcoder2", {"rope_parameters": ROPE | {"rope_theta": 99999.0}}),
    "nemotron": ("nemotron", "nemotron", {"norm_eps": 1e-3, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}),
    "falcon": ("falcon", "falcon", {"num_kv_heads": 1}),
    "bloom": ("bloom", "bloom", {}),
    "gpt2": ("gpt2", "gpt2", {"n_inner": 64}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_each_family_and_scaling_gives_the_source_back(name, toy, tmp_path):
    kind, architecture, settings = FILES[name]
    model = source(kind, **settings)
    extra = {"qwen3moe": {"qwen3moe.expert_feed_forward_length": 24}}.get(name)
    assert_same(file_of(tmp_path / "x.gguf", model, toy.tokenizer, architecture, extra), model, toy.tokenizer)


def test_llama3_scaling_is_called_so_and_other_divisors_are_taken_as_they_are(toy, tmp_path):
    model = source("llama", rope_parameters=LLAMA3, head_dim=32)
    pair = ModelPair.from_pretrained(file_of(tmp_path / "l.gguf", model, toy.tokenizer, "llama"))
    assert pair.target.config.rope_parameters == pytest.approx(LLAMA3)
    divisors = torch.tensor([1.0, 1.7, 9.0, 2.5])
    path = file_of(
        tmp_path / "d.gguf", source("llama"), toy.tokenizer, "llama", tensors={"rope_freqs.weight": divisors}
    )
    frequencies = ModelPair.from_pretrained(path).target.model.rotary_emb.inv_freq
    torch.testing.assert_close(frequencies, 10000.0 ** -(torch.arange(0, 8, 2) / 8) / divisors)


def test_any_shard_stands_for_all_of_them(toy, tmp_path):
    model = source("llama", rope_parameters=LLAMA3)
    file_of(tmp_path / "x.gguf", model, toy.tokenizer, "llama", shards=8)
    first, second, third = sorted(tmp_path.glob("*.gguf"))
    for path in (first, third):
        assert_same(path, model, toy.tokenizer)
    identities = [contents_of({"pair": {"target": str(path)}}, "decode").identity for path in (first, third)]
    assert identities[0] == identities[1]
    shutil.copy(second, tmp_path / "renamed.gguf")
    with pytest.raises(InputError, match="shard 2 of 3"):
        ModelPair.from_pretrained(tmp_path / "renamed.gguf")
    second.unlink()
    with pytest.raises(InputError, match=second.name):
        ModelPair.from_pretrained(third)


def test_a_copy_in_float16_is_the_same_model_rounded(toy, tmp_path):
    path = file_of(tmp_path / "x.gguf", source("llama"), toy.tokenizer, "llama")
    GGUFFile.read(path).copy(tmp_path / "half.gguf", float16=True)
    assert (tmp_path / "half.gguf").stat().st_size < 0.7 * path.stat().st_size
    whole, half = (ModelPair.from_pretrained(tmp_path / name) for name in ("x.gguf", "half.gguf"))
    assert whole.encode("Tom has 12 red balls") == half.encode("Tom has 12 red balls")
    for name, weights in whole.target.state_dict().items():
        rounded = weights.half().float() if weights.dim() > 1 else weights
        assert torch.equal(half.target.state_dict()[name], rounded)


def test_upper_case_names_quantised_weights_end_tokens_and_beginnings(toy, tmp_path):
    model = source("llama")
    keys = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9, "tokenizer.ggml.add_bos_token": False}
    path = file_of(tmp_path / "x.gguf", model, toy.tokenizer, "llama", keys).rename(tmp_path / "X.GGUF")
    pair = ModelPair.from_pretrained(path)
    assert (pair.end_ids, pair.name) == ((2, 7, 9), "X")
    assert pair.tokenizer("a").input_ids == toy.tokenizer("a").input_ids[1:]
    path = file_of(tmp_path / "q.gguf", model, toy.tokenizer, "llama", quantised=True)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            kind = package.GGMLQuantizationType.Q8_0
            parameter.copy_(
                torch.from_numpy(package.quants.dequantize(package.quants.quantize(parameter.numpy(), kind), kind))
            )
    assert_same(path, model, toy.tokenizer)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor | None], str]] = {
    "a weight is missing": ({}, {"blk.1.ffn_up.weight": None}, "lacks model.layers.1.mlp.up_proj.weight"),
    "a weight is left": ({}, {"blk.0.attn_q_norm.weight": torch.ones(8)}, "blk.0.attn_q_norm.weight .*no place"),
    "a layer is left": ({"llama.block_count": 1}, {}, "blk.1.attn_q.weight"),
    "experts": ({"llama.expert_count": 4}, {}, "llama.expert_count=4"),
    "a window": ({"llama.attention.sliding_window": 20}, {}, "sliding_window=20"),
    "another scaling": ({"llama.rope.scaling.type": "dynamic"}, {}, "'dynamic'"),
    "too few divisors": ({}, {"rope_freqs.weight": torch.ones(3)}, "3 divisors"),
    "a part of each head": ({"llama.rope.dimension_count": 4}, {}, "rotates 4 of 8"),
    "an unread way of splitting": ({"tokenizer.ggml.pre": "viking"}, {}, "'viking'"),
    "another kind of tokenizer": ({"tokenizer.ggml.model": "bert"}, {}, "'bert'"),
    "an end that is no token": ({"tokenizer.ggml.eos_token_id": 9999}, {}, "9999"),
    "no size of what is added to a norm": (
        {"llama.attention.layer_norm_rms_epsilon": None},
        {},
        "lacks llama.attention",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_place_in_the_model_is_one_line(name, toy, tmp_path):
    keys, tensors, message = REFUSED[name]
    path = file_of(tmp_path / "x.gguf", source("llama"), toy.tokenizer, "llama", keys, tensors)
    with pytest.raises(InputError, match=message) as error:
        ModelPair.from_pretrained(path)
    assert "\n" not in str(error.value) and not list(tmp_path.rglob("config.json"))


def test_files_that_are_cut_off_or_of_other_kinds_are_one_line(toy, tmp_path):
    path = file_of(tmp_path / "x.gguf", source("llama"), toy.tokenizer, "llama")
    content = path.read_bytes()
    for length in (0, 3, 40, 2000, len(content) // 2, len(content) - 9):
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match="damaged or cut off"):
            ModelPair.from_pretrained(path)
    path = file_of(tmp_path / "olmo2.gguf", source("olmo2"), toy.tokenizer, "olmo2")
    with pytest.raises(InputError, match="olmo2"):
        ModelPair.from_pretrained(path)
    with pytest.raises(InputError, match="found none"):
        ModelPair.from_pretrained(tmp_path / "absent.gguf")


def test_it_is_converted_once_and_again_by_another_converter(toy, tmp_path, capsys, monkeypatch):
    path = file_of(tmp_path / "x.gguf", source("llama"), toy.tokenizer, "llama")
    first = gguf.folder_of(path)
    moved = path.rename(tmp_path / "moved.gguf")
    assert gguf.folder_of(moved) == first
    assert capsys.readouterr().err.count("float32 weights in") == 1
    identity = [contents_of({"pair": {"target": str(moved)}}, "decode").identity["pair"]["target"]]
    assert hf.__version__ in (first / "converter.json").read_text()
    monkeypatch.setattr(gguf, "CONVERTER", gguf.CONVERTER + 1)
    assert gguf.folder_of(moved) != first
    moved.write_bytes(moved.read_bytes() + b"\0")
    identity.append(contents_of({"pair": {"target": str(moved)}}, "decode").identity["pair"]["target"])
    assert all(content.startswith("sha256:") for content in identity) and identity[0] != identity[1]


# -- tokenizers ---------------------------------------------------------------------------------------------------------


WORDS = ["▁", "▁t", "he", "▁the", "in", "▁in", "g", "ing", "▁c", "at", "▁cat", "ab", "abab", "▁▁", "▁▁▁▁"]


def sentencepiece() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and kinds as SentencePiece has them: the earlier a token was made of two, the higher its score."""
    special, byte = ["<unk>", "<s>", "</s>", "[INST]"], [f"<0x{i:02X}>" for i in range(256)]
    letters = [letter for letter in "abceghint.,!" if letter not in WORDS]
    tokens = special + byte + [w for w in WORDS if len(w) > 1] + [w for w in WORDS if len(w) == 1] + letters
    words = len(tokens) - len(special) - len(byte)
    return tokens, [0.0] * 260 + [-float(i) for i in range(words)], [2, 3, 3, 3] + [6] * 256 + [1] * words


def merged(text: str) -> list[str]:
    """The tokens of a text by SentencePiece's rule: always the pair whose token has the highest score, the first of them."""
    tokens, scores, kinds = sentencepiece()
    score = {token: s for token, s, kind in zip(tokens, scores, kinds, strict=True) if kind == 1}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]
        if not pairs:
            return [x for part in parts for x in ([part] if part in score else [f"<0x{b:02X}>" for b in part.encode()])]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_a_tokenizer_with_byte_fallback_is_read_by_its_scores_and_written_again(toy, tmp_path):
    tokens, scores, kinds = sentencepiece()
    model = source("llama", vocab_size=len(tokens), pad_token_id=None)
    keys = {"model": "llama", "pre": "default", "tokens": tokens, "scores": scores, "token_type": kinds, "merges": None}
    keys |= {"padding_token_id": None, "add_bos_token": None}
    named = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    pair = ModelPair.from_pretrained(file_of(tmp_path / "x.gguf", model, toy.tokenizer, "llama", named))
    for text in ("the cat in the hat", "abababab inging  ", "naïve 日本!", "a    b"):
        assert pair.tokenizer.convert_ids_to_tokens(pair.tokenizer(text).input_ids) == ["<s>", *merged(text)], text
    assert pair.tokenizer("[INST]the").input_ids[:2] == [1, 3]
    path = gguf.write(tmp_path / "again.gguf", pair.target, pair.tokenizer)
    fields = package.GGUFReader(path).fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert fields["tokenizer.ggml.token_type"].contents() == kinds
    content = json.loads(pair.tokenizer.backend_tokenizer.to_str())
    content["model"]["merges"].remove(["ab", "ab"])  # scores would give it back
    other = hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), unk_token="<unk>")
    with pytest.raises(InputError, match="merges"):
        gguf.write(tmp_path / "other.gguf", model, other)
    assert not (tmp_path / "other.gguf").exists()


# -- writing ------------------------------------------------------------------------------------------------------------


def test_what_was_written_is_read_with_the_same_logits_and_tokens(toy, tmp_path):
    path = gguf.write(tmp_path / "toy.gguf", toy.target, toy.tokenizer)
    pair = assert_same(path, toy.target, toy.tokenizer)
    assert (pair.name, pair.end_ids, pair.max_length) == ("toy", toy.end_ids, toy.max_length)
    assert pair.tokenizer.get_vocab() == toy.tokenizer.get_vocab()
    (ours,), (theirs,) = (
        generate(p, ["Tom has a red ball."], "autoregressive", max_new_tokens=12, temperature=0) for p in (pair, toy)
    )
    assert ours.token_ids == theirs.token_ids
    small = gguf.write(tmp_path / "small.gguf", tiny_llama(32, 1, 0, torch.float32, vocab_size=1024), None, like=path)
    described = [
        {name: field.contents() for name, field in package.GGUFReader(file).fields.items() if name[:9] == "tokenizer"}
        for file in (path, small)
    ]
    assert described[0] == described[1]


@pytest.mark.parametrize("rope", [LLAMA3, ODD, LINEAR, YARN, YARN | {"attention_factor": 1.3}], ids=str)
def test_scaled_positions_are_written(rope, toy, tmp_path):
    model = source("llama", rope_parameters=rope, attention_bias=True)
    assert_same(gguf.write(tmp_path / "x.gguf", model, toy.tokenizer), model, toy.tokenizer)


def test_added_tokens_stay_whole_in_other_readers(toy, tmp_path):
    """A chat of special tokens and of plain added ones is as long by transformers' own reader."""
    content = json.loads(toy.tokenizer.backend_tokenizer.to_str())
    names = {"<|start_header_id|>": True, "<|end_header_id|>": True, "<|eot_id|>": True, "<think>": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [
        {"id": 1024 + i, "content": name, "special": special, **flags}
        for i, (name, special) in enumerate(names.items())
    ]
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
    )
    model = source("llama", vocab_size=1040)
    model.generation_config.eos_token_id = [2, 1026]
    path = gguf.write(tmp_path / "chat.gguf", model, tokenizer)
    read = hf.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    text = "<|start_header_id|>a<|end_header_id|><think><|eot_id|>"
    assert len(tokenizer(text).input_ids) == 6 and read(text).input_ids == tokenizer(text).input_ids
    pair = ModelPair.from_pretrained(path)
    assert pair.end_ids == (2, 1026) and pair.tokenizer.get_vocab() == tokenizer.get_vocab()


def test_what_gguf_cannot_say_is_one_line_and_leaves_no_file(toy, tmp_path, monkeypatch):
    path = tmp_path / "x.gguf"
    content = json.loads(toy.tokenizer.backend_tokenizer.to_str())

    def with_content(**parts: Any) -> Any:
        return hf.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(content | parts)), bos_token="<|begin|>"
        )

    strips = [token | {"rstrip": True} for token in content["added_tokens"]]
    llama = source("llama")
    for model, tokenizer, message in (
        (tiny_model("gpt2"), None, "of a LlamaForCausalLM, got GPT2LMHeadModel"),
        (source("llama", hidden_act="gelu"), toy.tokenizer, "logits differ"),
        (source("llama", rope_parameters=YARN | {"beta_fast": 8.0}), toy.tokenizer, "yarn"),
        (source("llama", vocab_size=1000), toy.tokenizer, "1024 tokens, the model 1000"),
        (llama, with_content(pre_tokenizer={"type": "Whitespace"}), "Whitespace"),
        (llama, with_content(added_tokens=strips), "cannot hold this tokenizer"),
    ):
        with pytest.raises(InputError, match=message) as error:
            gguf.write(path, model, tokenizer)
        assert "\n" not in str(error.value) and not path.exists() and not list(tmp_path.glob(".x*"))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(60))
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs gguf and accelerate: pip install 'acceptance-toolkit\[gguf\]'"):
        ModelPair.from_pretrained(damaged)

"""Drafts of other programs: EAGLE-3 of SpecForge and of EAGLE's authors against a forward pass of its own; what is refused."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from toolkit import ModelPair, generate
from toolkit.drafts.eagle3 import format as eagle3
from toolkit.engine import open_session
from toolkit.errors import InputError
from toolkit.models.pair import load_draft, load_tokenizer, resolve
from toolkit.models.reduced import ReducedOutput
from toolkit.testing import tiny_llama

V, KEPT, D, HEADS, KV, SIZE, INNER, EPS = 97, 40, 16, 4, 2, 4, 24, 1e-5
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return tiny_llama(32, 8, 1, torch.float64)


def random_weights(kept=KEPT, width=D, biased=False, normed=False) -> dict[str, Tensor]:
    """The weights of a draft as EAGLE's authors name them, for a target of 32 numbers; d2t is not ascending."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)

    state = {
        "embed_tokens.weight": drawn(V, width),
        "fc.weight": drawn(width, 3 * 32),
        "norm.weight": drawn(width),
        "lm_head.weight": drawn(kept, width),
        "midlayer.self_attn.q_proj.weight": drawn(HEADS * SIZE, 2 * width),
        "midlayer.self_attn.k_proj.weight": drawn(KV * SIZE, 2 * width),
        "midlayer.self_attn.v_proj.weight": drawn(KV * SIZE, 2 * width),
        "midlayer.self_attn.o_proj.weight": drawn(width, HEADS * SIZE),
        "midlayer.mlp.gate_proj.weight": drawn(INNER, width),
        "midlayer.mlp.up_proj.weight": drawn(INNER, width),
        "midlayer.mlp.down_proj.weight": drawn(width, INNER),
        **{f"midlayer.{name}.weight": drawn(width) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
    }  # fmt: skip
    if biased:
        state |= {f"midlayer.self_attn.{name}_proj.bias": drawn(len(state[f"midlayer.self_attn.{name}_proj.weight"]))
                  for name in "qkvo"}  # fmt: skip
    if normed:
        state |= {f"midlayer.self_attn.{name}_norm.weight": drawn(SIZE) for name in "qk"}
    tokens = torch.randperm(V, generator=generator)[:kept] if kept < V else torch.arange(V)
    state["d2t"] = tokens - torch.arange(kept)
    state["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, tokens, True)
    return state


def config_of(**values):
    """The flat config of SpecForge."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": [2, 5],
        "draft_vocab_size": KEPT, "head_dim": SIZE, "hidden_act": "silu", "hidden_size": D, "initializer_range": 0.02,
        "intermediate_size": INNER, "max_position_embeddings": 128, "max_window_layers": 36, "model_type": "llama",
        "num_attention_heads": HEADS, "num_hidden_layers": 1, "num_key_value_heads": KV, "pad_token_id": 0, "pretraining_tp": 1,
        "rms_norm_eps": EPS, "rope_scaling": None, "rope_theta": 5000.0, "sliding_window": None, "target_hidden_size": 32,
        "tie_word_embeddings": False, "torch_dtype": "float64", "transformers_version": "4.53.2", "use_cache": True,
        "use_sliding_window": False, "vocab_size": V,
    }  # fmt: skip
    return {name: value for name, value in {**config, **values}.items() if value is not ...}


def write(folder, config, state, file="model.safetensors", **options):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".bin"):
        torch.save(state, folder / file, **options)
    else:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / file)
    return folder


class Published:
    """One EAGLE-3 draft as it was published: functions of its weights and of nothing else of this package."""

    def __init__(self, state, theta=5000.0, scaling=None):
        self.state = {name.removeprefix("midlayer."): tensor.double() for name, tensor in state.items()}
        self.tokens = state["d2t"].long() + torch.arange(len(state["d2t"]))
        self.frequencies = [self.frequency(theta ** (-2 * i / SIZE), scaling or {}) for i in range(SIZE // 2)]

    @staticmethod
    def frequency(plain, scaling):
        if scaling.get("type") == "linear":
            return plain / scaling["factor"]
        if scaling.get("rope_type") != "llama3":
            return plain
        turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        return (1 - share) * plain / scaling["factor"] + share * plain

    def norm(self, states, name):
        return states / (states.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.state[f"{name}.weight"]

    def heads(self, states, name, count):
        """Projected states as heads [count, n, size]; rotated if they are queries or keys."""
        projected = states @ self.state[f"self_attn.{name}_proj.weight"].T
        projected = projected + self.state.get(f"self_attn.{name}_proj.bias", 0.0)
        parts = projected.view(-1, count, SIZE).transpose(0, 1)
        if name == "v":
            return parts
        if f"self_attn.{name}_norm.weight" in self.state:
            parts = self.norm(parts, f"self_attn.{name}_norm")
        angles = torch.arange(parts.shape[1], dtype=torch.float64)[:, None] * torch.tensor(self.frequencies)
        left, right = parts.chunk(2, -1)
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)

    def step(self, tokens, states):
        """The draft's own states [n, D] after tokens [n] beside states [n, D]."""
        embedded = self.norm(self.state["embed_tokens.weight"][tokens], "input_layernorm")
        inputs = torch.cat([embedded, self.norm(states, "hidden_norm")], -1)
        query, key, value = (self.heads(inputs, name, count) for name, count in (("q", HEADS), ("k", KV), ("v", KV)))
        key, value = key.repeat_interleave(HEADS // KV, 0), value.repeat_interleave(HEADS // KV, 0)
        scores = (query @ key.transpose(1, 2) / SIZE**0.5).masked_fill(
            torch.ones(len(tokens), len(tokens)).triu(1) > 0, -1e30
        )
        attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(tokens), -1)
        hidden = (
            states + attended @ self.state["self_attn.o_proj.weight"].T + self.state.get("self_attn.o_proj.bias", 0.0)
        )
        inner = self.norm(hidden, "post_attention_layernorm")
        gate, up, down = (self.state[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return hidden + (torch.nn.functional.silu(inner @ gate.T) * (inner @ up.T)) @ down.T

    def logits(self, target_states, text, drafted):
        """Logits [V] after the text and after every drafted token; target_states [n - 1, 3 x 32] of a text of n tokens."""
        states, results = target_states @ self.state["fc.weight"].T, []
        for depth in range(len(drafted) + 1):
            own = self.step(torch.tensor(text[1:] + drafted[:depth]), states)[-1:]
            rows = self.norm(own, "norm")[0] @ self.state["lm_head.weight"].T
            results.append(torch.full((V,), -torch.inf, dtype=torch.float64).index_copy(0, self.tokens, rows))
            states = torch.cat([states, own])
        return results


def check(target, folder, published, layers):
    """Compare cached logits along a text and three drafted tokens with the published forward pass."""
    draft = eagle3.load(folder, torch.float64, target)
    assert draft.target_layers == tuple(layers)
    text, drafted = [5, 9, 33, 21, 8, 4], [60, 12, 7]
    theirs = open_session(target, 1, 32, kept_layers=layers)
    session = open_session(draft, 1, 32, target=theirs)
    theirs.extend(torch.tensor([text[:-1]]))
    got = [session.extend(torch.tensor([text])).logits[0, -1]]
    got += [session.extend(torch.tensor([[token]])).logits[0, -1] for token in drafted]
    with torch.no_grad():
        states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    expected = published.logits(torch.cat([states[layer] for layer in layers], -1)[0], text, drafted)
    for ours, published_ in zip(got, expected, strict=True):  # norms and ropes of transformers are in float32
        torch.testing.assert_close(ours, published_, rtol=0, atol=2e-5)
    return draft


AUTHORS = {"architectures": ["LlamaForCausalLM"], "head_dim": ..., "target_hidden_size": ..., "rope_theta": ...,
           "rope_scaling": ..., "sliding_window": ..., "use_sliding_window": ..., "max_window_layers": ...}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "file", "rope", "layers"),
    [
        pytest.param({}, "model.safetensors", {}, [2, 4, 5], id="specforge"),
        pytest.param(AUTHORS, "pytorch_model.bin", {"theta": 10000.0}, [2, 4, 5], id="authors"),
        pytest.param({"rope_scaling": LLAMA3}, "model.safetensors", {"scaling": LLAMA3}, [2, 4, 5], id="llama3 rope"),
        pytest.param({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 10000.0}, "pytorch_model.bin",
                     {"theta": 10000.0, "scaling": {"type": "linear", "factor": 2.0}}, [2, 4, 5], id="linear rope"),
        pytest.param({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}}, "model.safetensors", {}, [2, 4, 5],
                     id="positions of images"),
        pytest.param({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}},
                     "model.safetensors", {}, [2, 4, 5], id="outputs of layers"),
        pytest.param({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, "model.safetensors", {}, [2, 4, 5],
                     id="inputs of the usual layers"),
        pytest.param({"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "architectures": ["Eagle3LlamaForCausalLM"]},
                     "model.safetensors", {}, [1, 3, 6], id="inputs of layers"),
    ],
)  # fmt: skip
def test_logits_are_those_of_the_published_architecture(values, file, rope, layers, target, tmp_path):
    state = random_weights()
    folder = write(tmp_path / "draft", config_of(**values), state, file)
    draft = check(target, folder, Published(state, **rope), layers)
    eagle3.save(tmp_path / "saved", draft, "")
    check(target, tmp_path / "saved", Published(state, **rope), layers)


def test_other_outputs_of_layers_are_named(target, tmp_path):
    state = random_weights()
    values = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True}}
    folder = write(tmp_path / "draft", config_of(**values), state)
    with pytest.warns(RuntimeWarning, match=r"the draft reads the inputs of \[1, 4, 7\]"):
        check(target, folder, Published(state), [1, 4, 7])
    assert load_draft(folder, dtype="auto").dtype == torch.float64  # its weights alone, what heads need of it


@pytest.mark.parametrize("kind", ["biased", "normed"])
def test_weights_say_what_the_layer_has(kind, target, tmp_path):
    """Biases and norms of queries and keys; what the config says of biases is another's (SpecForge has none either way)."""
    state = random_weights(**{kind: True})
    values = {"attention_bias": kind != "biased", "model_type": "qwen2"}
    check(target, write(tmp_path / "draft", config_of(**values), state), Published(state), [2, 4, 5])


@pytest.mark.parametrize("buffers", ["ones", "zeros", "none", "whole numbers"])
def test_a_whole_vocabulary_with_any_buffers(buffers, target, tmp_path):
    state = random_weights(kept=V)
    published = Published(state)
    state["t2d"] = torch.zeros(V, dtype=torch.bool) if buffers == "zeros" else state["t2d"]
    state["t2d"] = state["t2d"].long() if buffers == "whole numbers" else state["t2d"]
    if buffers == "none":
        del state["t2d"], state["d2t"]
    check(target, write(tmp_path / "draft", config_of(draft_vocab_size=V), state), published, [2, 4, 5])


@pytest.mark.parametrize("way", ["old pickles", "shards", "half precision", "prefix and old buffers"])
def test_files_of_weights(way, target, tmp_path):
    state, folder = random_weights(), tmp_path / "draft"
    if way == "old pickles":
        write(folder, config_of(), state, "pytorch_model.bin", _use_new_zipfile_serialization=False)
    elif way == "shards":
        first, second = (f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2))
        names = {name: first if "mlp" in name else second for name in state}
        for file in (first, second):
            write(folder, config_of(), {name: state[name] for name in state if names[name] == file}, file)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    elif way == "half precision":
        state = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
        write(folder, config_of(torch_dtype="float16"), state)
    else:
        renamed = {f"model.{name}" if "lm_head" not in name else name: tensor for name, tensor in state.items()}
        renamed["model.midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
        write(folder, config_of(), renamed)
    check(target, folder, Published(state), [2, 4, 5])
    if way == "half precision":
        assert eagle3.load(folder, "auto", target).dtype == torch.float16


def test_embeddings_that_the_folder_lacks_are_the_targets(target, tmp_path):
    state = random_weights(width=32)
    state["embed_tokens.weight"] = target.get_input_embeddings().weight.detach()
    published = Published(state)
    del state["embed_tokens.weight"]
    values = {"hidden_size": 32, "target_hidden_size": ...}
    draft = check(target, write(tmp_path / "draft", config_of(**values), state), published, [2, 4, 5])
    assert torch.equal(draft.embed_tokens.weight, target.get_input_embeddings().weight)
    with pytest.raises(InputError, match="or the draft's target beside it"):
        load_draft(tmp_path / "draft")
    narrow = random_weights()
    del narrow["embed_tokens.weight"]
    with pytest.raises(InputError, match=r"lacks embed_tokens.weight, and the target's are of 32 numbers, not 16"):
        eagle3.load(write(tmp_path / "narrow", config_of(), narrow), "auto", target)


def test_a_pair_of_folders_decodes(tiny_pair, tmp_path):
    """From the command's folders: no tokenizer beside the draft, greedy texts are the target's."""
    model = ModelPair.from_pretrained(tiny_pair / "target").target
    size, width, layers = model.config.vocab_size, model.config.hidden_size, model.config.num_hidden_layers
    state = random_weights(width=width)
    state |= {
        "fc.weight": torch.randn(width, 2 * width),
        "lm_head.weight": torch.randn(8, width),
        "d2t": torch.arange(8) * 2,
    }
    for name in ("t2d", "embed_tokens.weight"):
        del state[name]
    values = {"hidden_size": width, "vocab_size": size, "draft_vocab_size": 8, "target_hidden_size": width}
    values["eagle_aux_hidden_state_layer_ids"] = [0, layers - 1]
    state = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
    folder = write(tmp_path / "draft", config_of(**values), state, "pytorch_model.bin")
    pair = ModelPair.from_pretrained(tiny_pair / "target", folder)
    plain, drafted = (
        [text.token_ids for text in generate(pair, ["the cat", "a"], method, max_new_tokens=8, temperature=0.0)]
        for method in ("autoregressive", "speculative")
    )
    assert plain == drafted
    with pytest.raises(InputError, match="is an EAGLE-3 draft, no target: give pair.target=TARGET"):
        ModelPair.from_pretrained(folder)


def test_a_target_of_another_name_is_one_warning(target, tmp_path):
    eagle3.save(
        tmp_path, eagle3.load(write(tmp_path / "d", config_of(), random_weights()), "auto", target), "org/Right-8B"
    )
    named = tiny_llama(32, 8, 1, torch.float64)
    named.config._name_or_path = named.name_or_path = "/models/Wrong-8B"
    with pytest.warns(RuntimeWarning, match="is the draft of org/Right-8B, the target is /models/Wrong-8B") as warned:
        eagle3.load(tmp_path, "auto", named)
    assert len(warned) == 1
    for same in ("/models/right-8b", "/cache/models--org--Right-8B/snapshots/0a1b", ""):
        named.name_or_path = same
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            eagle3.load(tmp_path, "auto", named)


def cut(file):
    def change(folder):
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: len(content) // 2])

    return change


def change_weights(**values):
    def change(folder):
        state = {**random_weights(), **{name.replace("__", "."): value for name, value in values.items()}}
        write(
            folder, json.loads((folder / "config.json").read_text()), {n: t for n, t in state.items() if t is not None}
        )

    return change


@pytest.mark.parametrize(
    ("values", "change", "line"),
    [
        ({"vocab_size": str(V)}, None, "vocab_size: expected a whole number, got '97'"),
        ({"num_key_value_heads": 0}, None, "no layer can be made of it"),
        ({"eagle_aux_hidden_state_layer_ids": ["1", "3", "4"]}, None, "expected a whole number, got '1'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, None, "default, linear, llama3, yarn), got dynamic"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, None, "reads the target's last state alone"),
        ({"eagle_config": {"parallel_draft_step": 4}}, None, "parallel_draft_step=4"),
        ({"quantization_config": {"quant_method": "fp8"}}, None, "quantization_config"),
        ({"num_hidden_layers": 2}, None, "of 1 layer, got 2"),
        ({"draft_vocab_size": 41}, None, "draft_vocab_size=41, but lm_head.weight has 40 rows"),
        ({"vocab_size": 96}, None, "made for 96 tokens, the target has 97"),
        ({"intermediate_size": 32}, None, "expected shape [32, 16], got [24, 16]"),
        ({}, cut("model.safetensors"), "is not a whole file of weights"),
        ({}, change_weights(fc__weight=torch.full((D, 96), torch.inf)), "fc.weight holds values that are not numbers"),
        ({}, change_weights(fc__weight=torch.zeros(D, 96, dtype=torch.int8)), "got torch.int8: it is quantised"),
        ({}, change_weights(fc__weight=torch.zeros(D, 64)), "reads 3 states of 21.3333 numbers, the target's have 32"),
        ({}, change_weights(d2t=torch.zeros(KEPT, dtype=torch.long)), "d2t and t2d name different tokens"),
        ({}, change_weights(d2t=None), "need d2t"),
        ({}, change_weights(d2t=torch.full((KEPT,), 90)), "expected 40 different tokens below 97"),
        ({}, change_weights(midlayer__self_attn__kv_a__weight=torch.zeros(4)), "unknown weight layers.0.self_attn.kv_a"),
        ({}, change_weights(midlayer__mlp__up_proj__weight=None), "lacks weight layers.0.mlp.up_proj.weight"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(values, change, line, target, tmp_path):
    folder = write(tmp_path / "draft", config_of(**values), random_weights())
    if change is not None:
        change(folder)
    with pytest.raises(InputError) as error:
        eagle3.load(folder, "auto", target)
    assert line in str(error.value).replace("midlayer", "layers.0") and "\n" not in str(error.value)


@pytest.mark.parametrize("code", [True, False])
def test_a_pickle_that_is_cut_off_or_runs_code_is_one_line(code, target, tmp_path):
    folder = write(tmp_path / "draft", config_of(**AUTHORS), random_weights(), "pytorch_model.bin")
    if code:
        torch.save({"fc.weight": print}, folder / "pytorch_model.bin")
    else:
        cut("pytorch_model.bin")(folder)
    for call in (lambda: eagle3.load(folder, "auto", target), lambda: load_draft(folder)):
        with pytest.raises(InputError, match="is not a whole file of weights") as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("tokens", [[1, 1, 2], [0, 1, 5], [-1, 1, 2], [0, 1]])
def test_rows_are_of_different_tokens(tokens):
    with pytest.raises(InputError, match="expected 3 different tokens below 5"):
        ReducedOutput(torch.nn.Linear(4, 3), torch.tensor(tokens), 5)


LAYER = {
    "layers.0.self_attn.q_proj.weight": torch.zeros(4, 4),
    "layers.0.post_attention_layernorm.weight": torch.zeros(4),
}


@pytest.mark.parametrize(
    ("config", "state", "kind"),
    [
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "model_type": "llama"},
         {**LAYER, "fc.weight": torch.zeros(4, 8), "fc.bias": torch.zeros(4)}, "EAGLE-1"),
        ({"architectures": ["DeepseekV3ForCausalLMNextN"], "model_type": "deepseek_v3"}, LAYER, "MTP"),
        ({"model_type": "llama", "num_hidden_layers": 1}, {"mtp.fc.weight": torch.zeros(4, 8)}, "MTP"),
        ({"model_type": "llama"}, {"mtp.fc.weight": torch.zeros(4, 8)}, "MTP"),
        ({"medusa_num_heads": 5, "medusa_num_layers": 1}, LAYER, "Medusa"),
        ({"hydra_num_heads": 4}, LAYER, "Hydra"),
        ({"speculators_model_type": "peagle"}, LAYER, "P-EAGLE"),
        ({"speculators_model_type": "new"}, LAYER, "new"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}, LAYER, "MLP speculator"),
    ],
)  # fmt: skip
def test_drafts_of_other_kinds_are_named(config, state, kind, tiny_pair, tmp_path):
    folder = write(tmp_path / "draft", config, state)
    for call in (
        lambda: ModelPair.from_pretrained(tiny_pair / "target", folder),
        lambda: ModelPair.from_pretrained(folder),
        lambda: load_draft(folder),
    ):
        with pytest.raises(InputError) as error:
            call()
        assert f"holds a draft of the kind {kind}, which is not supported" in str(error.value)
        assert "\n" not in str(error.value)


def test_ordinary_models_are_none_of_these(tiny_pair, tmp_path):
    tiny_llama(16, 1, 0, torch.float32).save_pretrained(tmp_path / "one_layer")
    assert resolve(tmp_path / "one_layer") and resolve(tiny_pair / "target")
    for classes in (["Qwen3NextForCausalLM"], ["Eagle2_5_VLForConditionalGeneration"], None):
        write(tmp_path / "other", {"architectures": classes, "num_hidden_layers": 4}, {"mtp.fc.weight": torch.zeros(2)})
        assert resolve(tmp_path / "other")
    with pytest.raises(
        InputError, match="the folder has none; expected a whole checkpoint, or an EAGLE-3, DFlash or DSpark draft"
    ):
        load_tokenizer(tmp_path / "one_layer")

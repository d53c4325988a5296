"""EAGLE-3 drafts (arXiv:2503.01840), in the checkpoint format of `speculators` 0.9, which vLLM and SGLang load.

The draft reads token j + 1 beside a state of position j. While the target has read position j, this is the target's: the states
before the layers i of `target_layers`, side by side, projected to the draft's width (section 3.1; paper's g). From there on it
is the draft's own output at position j (paper's a), before its last norm. One decoder layer, whose attention reads [embedding,
state], each after a norm of its own. The output layer has rows for V' of the V tokens.

    theirs (speculators.models.eagle3)        ours
    fc, layers.0, norm, lm_head, embed_tokens the same names
    d2t [V'], an offset: token = row + d2t    lm_head.kept [V'], the tokens; t2d [V] follows from it
    eagle_aux_hidden_state_layer_ids          target_layers; `hidden_states[i]` of transformers
    norm_before_residual, norm_output         the same; norm_output: the state after the norm is handed on
    norm_before_fc (input_norm), fc_norm      the same

Deviations: none in the arithmetic. Refused by name: more than one layer, other families than Llama and Qwen3, ropes that
follow a text's length, and keys of the config that are not known here. A text's first token, which theirs drops, is read
without a state and never seen.

Shapes: b rows, T tokens, D hidden size, W = n D_target width of the target's states, V vocabulary, V' output rows.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from toolkit.errors import InputError
from toolkit.models.reduced import ReducedOutput

CONFIG, WEIGHTS, KIND = "config.json", "model.safetensors", "eagle3"
FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "llama": (modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaRotaryEmbedding),
    "qwen3": (modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3RotaryEmbedding),
}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
KNOWN = {*FLAGS, LAYER_IDS, "speculators_model_type", "architectures", "transformer_layer_config", "draft_vocab_size",
         "target_hidden_size", "embed_requires_grad", "speculators_config", "speculators_version", "auto_map", "dtype",
         "torch_dtype", "transformers_version", "tie_word_embeddings", "model_type"}  # fmt: skip


class Eagle3(modeling_llama.LlamaPreTrainedModel):
    """One EAGLE-3 draft.

    config         of its decoder layer; `vocab_size` is the target's V
    target_layers  layers of the target whose states [..., W] it reads, as `hidden_states[i]` of transformers
    kept           tokens [V'] of its output rows, in their order
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        target_layers: Sequence[int],
        target_width: int,
        kept: Tensor,
        flags: Sequence[str] = (),
    ):
        super().__init__(config)
        layer_class, norm_class, rotary_class = FAMILIES[config.model_type]
        self.target_layers, self.target_width, self.flags = tuple(target_layers), target_width, frozenset(flags)
        self.output_size = int(config.vocab_size)
        width = config.hidden_size

        def norm(size: int) -> nn.Module:
            layer: nn.Module = norm_class(size, eps=config.rms_norm_eps)
            return layer

        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.input_norm = norm(target_width) if "norm_before_fc" in self.flags else None
        count = len(self.target_layers)
        parts = [norm(target_width // count) for _ in self.target_layers] if "fc_norm" in self.flags else []
        self.fc_norm = nn.ModuleList(parts) if parts else None
        self.fc = nn.Linear(target_width, width, bias=False)
        layer = layer_class(config, layer_idx=0)
        layer.hidden_norm = norm(width)
        for name in ("q_proj", "k_proj", "v_proj"):
            whole = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, nn.Linear(2 * width, whole.out_features, bias=whole.bias is not None))
        self.layers = nn.ModuleList([layer])
        self.rotary_emb = rotary_class(config)
        self.norm = norm(width)
        self.lm_head = ReducedOutput(nn.Linear(width, len(kept), bias=False), kept, self.output_size)
        self.generation_config = GenerationConfig()
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, output: nn.Module) -> None:
        self.lm_head = output

    def blank(self) -> Eagle3:
        """A draft of the same shape, its weights not these."""
        rows, flags = self.lm_head.kept.cpu(), sorted(self.flags)
        draft: Any = Eagle3(copy.deepcopy(self.config), self.target_layers, self.target_width, rows, flags)
        blank: Eagle3 = draft.to(self.dtype)
        return blank

    def projected(self, target_states: Tensor) -> Tensor:
        """The target's states [..., W] at the draft's width [..., D]."""
        if self.input_norm is not None:
            target_states = self.input_norm(target_states)
        if self.fc_norm is not None:
            parts = target_states.chunk(len(self.fc_norm), -1)
            target_states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        projected: Tensor = self.fc(target_states)
        return projected

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        past_key_values: Any,
        own_states: Tensor,
        target_states: Tensor | None = None,
        from_target: Tensor | None = None,
        logits_to_keep: int = 0,
        use_cache: bool = True,
    ) -> CausalLMOutput:
        """Read tokens [b, T] beside the states before them.

        own_states [b, T, D], target_states [b, T, W]; from_target [b, T]: where the target's count
        Returns logits [b, T', V] of the last `logits_to_keep` tokens (0: all), and the states [b, T, D] to hand on.
        """
        states = own_states
        if target_states is not None and from_target is not None:
            states = torch.where(from_target.unsqueeze(-1), self.projected(target_states), own_states)
        handed_on, final = self.read(input_ids, position_ids, attention_mask, past_key_values, states)
        logits = self.lm_head.whole(self.lm_head(final[:, -logits_to_keep:]))
        return CausalLMOutput(logits=logits, hidden_states=(handed_on,))

    def read(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any, states: Tensor) -> tuple[Tensor, ...]:
        """One pass over tokens [b, T] beside states [b, T, D]: the states to hand on, and those that the output layer reads."""
        layer: Any = self.layers[0]
        normed = layer.hidden_norm(states)
        attended, _ = layer.self_attn(
            hidden_states=torch.cat([layer.input_layernorm(self.embed_tokens(tokens)), normed], -1),
            position_embeddings=self.rotary_emb(states, positions),
            attention_mask=mask,
            past_key_values=cache,
        )
        hidden = (normed if "norm_before_residual" in self.flags else states) + attended
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        final = self.norm(hidden)
        return (final if "norm_output" in self.flags else hidden), final


def is_eagle3(source: str | Path) -> bool:
    """Whether a folder holds an EAGLE-3 draft of `speculators`."""
    path = Path(source) / CONFIG
    try:
        return path.is_file() and json.loads(path.read_text("utf-8")).get("speculators_model_type") == KIND
    except (OSError, ValueError):
        return False


def load(folder: Path, dtype: torch.dtype | str, target: Any, device: Any = "cpu") -> Eagle3:
    """Read a draft for a target; token embeddings that the folder lacks are the target's.

    target  None: the weights alone are wanted, and the folder must hold all of them
    dtype   of torch, or its name; "auto": as stored
    Raises InputError for what is not known here, and for another target's draft.
    """
    from safetensors.torch import load_file

    config = json.loads((folder / CONFIG).read_text("utf-8"))
    _check_config(folder, config)
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        state |= load_file(path)
    if "lm_head.weight" not in state:
        raise InputError(f"{folder}: expected an EAGLE-3 draft's weights in {WEIGHTS}, found no lm_head.weight")
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.isnan().any():
            raise InputError(f"{folder}: weight {name} holds values that are not numbers: it was not saved whole")
    layer = AutoConfig.for_model(**{"model_type": "qwen3", **config["transformer_layer_config"]})
    if "sliding_attention" not in (getattr(layer, "layer_types", None) or []):
        layer.sliding_window = None
    base: Any = target.config.get_text_config() if hasattr(target, "config") else None
    if target is None and not (config.get(LAYER_IDS) and {"embed_tokens.weight", "fc.weight"} <= state.keys()):
        raise InputError(
            f"{folder}: expected {LAYER_IDS}, fc.weight and embed_tokens.weight, or the draft's target beside it"
        )
    if target is not None and (base is None or not hasattr(target, "get_decoder")):
        kind = type(target).__name__
        raise InputError(f"{folder}: an EAGLE-3 draft reads the states of a transformers model, got {kind}")
    layers = config.get(LAYER_IDS) or [2, base.num_hidden_layers // 2, base.num_hidden_layers - 3]
    if target is not None:
        _check_target(folder, layer, layers, state, base)
    width = state["fc.weight"].shape[1] if target is None else len(layers) * base.hidden_size
    tokens = _tokens_of_rows(folder, state, layer.vocab_size)
    if state.get("embed_tokens.weight") is None:
        state["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().cpu()
    stored = state["lm_head.weight"].dtype
    flags = [flag for flag in FLAGS if config.get(flag)]
    model: Any = Eagle3(layer, layers, width, tokens, flags)
    model.to(stored if dtype == "auto" else getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    unread = [name for name in state if name in ("d2t", "t2d") or name.startswith("verifier_")]
    for name in unread:
        del state[name]
    state |= {"lm_head.rows.weight": state.pop("lm_head.weight"), "lm_head.kept": tokens}
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() ^ state.keys()):
        verb = "lacks" if name in expected else "has an unknown"
        raise InputError(f"{folder}: an EAGLE-3 draft {verb} weight {name}")
    for name, shape in expected.items():
        if state[name].shape != shape:
            raise InputError(f"{folder}: weight {name}: expected shape {list(shape)}, got {list(state[name].shape)}")
    model.load_state_dict(state)
    loaded: Eagle3 = model.to(device).requires_grad_(False).eval()
    return loaded


def save(folder: Path, model: Eagle3, target: str, architectures: Sequence[str] = ()) -> None:
    """Write a draft in the format of `speculators`, with its target's name and the names of its classes."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("lm_head.")}
    state = {name: tensor.contiguous() for name, tensor in own.items()}
    tokens = model.lm_head.kept.cpu()
    state["lm_head.weight"] = model.lm_head.weight.contiguous()
    if len(tokens) < model.output_size:
        has_row = torch.zeros(model.output_size, dtype=torch.bool).index_fill(0, tokens, True)
        state |= {"d2t": tokens - torch.arange(len(tokens)), "t2d": has_row}
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    verifier = {"name_or_path": target, "architectures": list(architectures)}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": KIND,
        "transformer_layer_config": model.config.to_diff_dict(),
        "draft_vocab_size": len(tokens),
        LAYER_IDS: list(model.target_layers),
        "target_hidden_size": model.target_width // len(model.target_layers),
        **{flag: flag in model.flags for flag in FLAGS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": str(model.dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": KIND,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check_config(folder: Path, config: dict[str, Any]) -> None:
    unknown = sorted(key for key, value in config.items() if key not in KNOWN and value not in (None, False, [], {}))
    if unknown:
        raise InputError(f"{folder}: {unknown[0]}={config[unknown[0]]!r} of an EAGLE-3 config is not known here")
    if "norm_before_residual" not in config:
        raise InputError(
            f"{folder}: expected norm_before_residual in an EAGLE-3 config: its default differs between programs"
        )
    layer = config.get("transformer_layer_config") or {}
    family = layer.get("model_type", "qwen3")
    if family not in FAMILIES:
        raise InputError(f"{folder}: expected an EAGLE-3 draft with a layer of {' or '.join(FAMILIES)}, got {family!r}")
    if layer.get("num_hidden_layers", 0) != 1:
        raise InputError(f"{folder}: expected an EAGLE-3 draft of 1 layer, got {layer.get('num_hidden_layers')}")
    rope = (layer.get("rope_parameters") or layer.get("rope_scaling") or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise InputError(f"{folder}: expected a rope that is the same for all texts, got {rope}")


def _check_target(folder: Path, layer: Any, layers: Sequence[int], state: dict[str, Tensor], base: Any) -> None:
    """Raises InputError unless the draft was made for a target of this config."""
    if layer.vocab_size != base.vocab_size:
        count = layer.vocab_size
        raise InputError(f"{folder}: the draft was made for {count} tokens, the target has {base.vocab_size}")
    if not all(0 <= number < base.num_hidden_layers for number in layers) or list(layers) != sorted(set(layers)):
        raise InputError(
            f"{folder}: {LAYER_IDS}: expected ascending layers below the target's {base.num_hidden_layers}, got {layers}"
        )
    width = state["fc.weight"].shape[1] if "fc.weight" in state else len(layers) * base.hidden_size
    if width != len(layers) * base.hidden_size:
        raise InputError(
            f"{folder}: the draft reads {len(layers)} states of {width / len(layers):g} numbers, the target's have "
            f"{base.hidden_size}"
        )


def _tokens_of_rows(folder: Path, state: dict[str, Tensor], size: int) -> Tensor:
    """The tokens of the output rows. Raises InputError unless they are different tokens of the vocabulary."""
    rows = state["lm_head.weight"].shape[0]
    if "d2t" not in state:
        if rows != size:
            raise InputError(f"{folder}: {rows} output rows for {size} tokens need d2t, the weights have none")
        return torch.arange(size)
    tokens = state["d2t"].long() + torch.arange(len(state["d2t"]))
    low, high = int(tokens.min()), int(tokens.max())
    if len(tokens) != rows or low < 0 or high >= size or len(tokens.unique()) < rows:
        raise InputError(
            f"{folder}: d2t: expected {rows} different tokens below {size}, got {len(tokens)} from {low} to {high}"
        )
    if "t2d" in state and not torch.equal(state["t2d"].nonzero().squeeze(1), tokens.sort().values):
        raise InputError(f"{folder}: d2t and t2d name different tokens")
    return tokens

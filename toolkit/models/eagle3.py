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
without a state and never seen. Drafts of SpecForge and of EAGLE's authors are read under these names (`draft_formats`).

Shapes: b rows, T tokens, D hidden size, W = n D_target width of the target's states, V vocabulary, V' output rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from toolkit.engine.hf import attention_reaches
from toolkit.errors import InputError, warn
from toolkit.models.draft_formats import CONFIG, EAGLE3, FLAGS, LAYER_IDS, eagle3_config, read_layers, read_weights
from toolkit.models.draft_formats import is_eagle3 as is_eagle3
from toolkit.models.reduced import ReducedOutput, WithReducedOutput

WEIGHTS = "model.safetensors"
FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "llama": (modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaRotaryEmbedding),
    "qwen3": (modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3RotaryEmbedding),
}
KNOWN = {*FLAGS, LAYER_IDS, "speculators_model_type", "architectures", "transformer_layer_config", "draft_vocab_size",
         "target_hidden_size", "embed_requires_grad", "speculators_config", "speculators_version", "auto_map", "dtype",
         "torch_dtype", "transformers_version", "tie_word_embeddings", "model_type", "eagle_config",
         "draft_attn_kernel"}  # fmt: skip


ROPES = ("default", "linear", "llama3", "yarn")


class Eagle3(WithReducedOutput, modeling_llama.LlamaPreTrainedModel):
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
        logits = self.logits(final[:, -logits_to_keep:])
        return CausalLMOutput(logits=logits, hidden_states=(handed_on,))

    def logits(self, final: Tensor) -> Tensor:
        """Logits [..., V] from the states [..., D] that the output layer reads; -inf for the tokens without a row."""
        return self.lm_head.whole(self.lm_head(final))

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


class AllSteps:
    """The keys and values of every depth of a draft, one after another: what attention takes for a cache."""

    def __init__(self, draft: Eagle3) -> None:
        (reach,) = attention_reaches(draft).values()
        self.window, self.dtype = reach.window, draft.dtype
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.positions: Tensor | None = None

    def mask(self, visible: Tensor, positions: Tensor) -> Tensor:
        """The additive mask [1, 1, n, S] of one more depth, whose tokens [n] see `visible` [n, S] within the window."""
        self.positions = positions if self.positions is None else torch.cat([self.positions, positions])
        if self.window is not None:
            visible = visible & (positions.unsqueeze(1) - self.positions < self.window)
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
        return mask.masked_fill(~visible, torch.finfo(self.dtype).min)[None, None]

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep [B, heads, m, head size] of one more depth; returns those of all."""
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 2)
        self.values = values if self.values is None else torch.cat([self.values, values], 2)
        return self.keys, self.values


def load(folder: Path, dtype: torch.dtype | str, target: Any, device: Any = "cpu") -> Eagle3:
    """Read a draft for a target, of any of the programs in `draft_formats`; embeddings that the folder lacks are the target's.

    target  None: the weights alone are wanted, and the folder must hold all of them
    dtype   of torch, or its name; "auto": as stored
    Raises InputError for what is not known here, and for another target's draft. Warns of a target of another name.
    """
    state = read_weights(folder)
    config = eagle3_config(folder, state)
    _check_weights(folder, config, state)
    _check_config(folder, config)
    base: Any = target.config.get_text_config() if hasattr(target, "config") else None
    named = config.get(LAYER_IDS) or (config.get("eagle_config") or {}).get(LAYER_IDS)
    if target is None and not (named and {"embed_tokens.weight", "fc.weight"} <= state.keys()):
        raise InputError(
            f"{folder}: expected {LAYER_IDS}, fc.weight and embed_tokens.weight, or the draft's target beside it"
        )
    if target is not None and (base is None or not hasattr(target, "get_decoder")):
        kind = type(target).__name__
        raise InputError(f"{folder}: an EAGLE-3 draft reads the states of a transformers model, got {kind}")
    layers = list(named or ()) if base is None else read_layers(folder, config, base.num_hidden_layers)
    try:
        layer = AutoConfig.for_model(**{"model_type": "qwen3", **config["transformer_layer_config"]})
        if "sliding_attention" not in (getattr(layer, "layer_types", None) or []):
            layer.sliding_window = None
        if target is not None:
            _check_target(folder, config, layer, layers, state, target)
        width = state["fc.weight"].shape[1] if target is None else len(layers) * base.hidden_size
        tokens = tokens_of_rows(folder, state, layer.vocab_size)
        model: Any = Eagle3(layer, layers, width, tokens, [flag for flag in FLAGS if config.get(flag)])
    except InputError:
        raise
    except Exception as error:  # whatever values of a config make transformers raise
        reason = " ".join(str(error).split())
        raise InputError(f"{folder / CONFIG}: no layer can be made of it: {reason}") from error
    if state.get("embed_tokens.weight") is None:
        theirs, width = target.get_input_embeddings().weight.detach().cpu(), model.config.hidden_size
        if theirs.shape[1] != width:
            raise InputError(
                f"{folder} lacks embed_tokens.weight, and the target's are of {theirs.shape[1]} numbers, not {width}"
            )
        state["embed_tokens.weight"] = theirs
    stored = state["lm_head.weight"].dtype
    model.to(stored if dtype == "auto" else getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    _fill(folder, model, state, tokens)
    loaded: Eagle3 = model.to(device).requires_grad_(False).eval()
    return loaded


def _check_weights(folder: Path, config: dict[str, Any], state: dict[str, Tensor]) -> None:
    """Raises InputError unless there are weights, all of them numbers, and as many output rows as the config says."""
    if "lm_head.weight" not in state:
        raise InputError(f"{folder}: expected an EAGLE-3 draft's weights in {WEIGHTS}, found no lm_head.weight")
    for name, tensor in state.items():
        if name not in ("d2t", "t2d") and (not tensor.is_floating_point() or tensor.dtype.itemsize == 1):
            raise InputError(f"{folder}: weight {name}: expected floating point, got {tensor.dtype}: it is quantised")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise InputError(f"{folder}: weight {name} holds values that are not numbers: it was not saved whole")
    rows, stated = state["lm_head.weight"].shape[0], config.get("draft_vocab_size")
    if stated not in (None, rows):
        raise InputError(f"{folder}: draft_vocab_size={stated}, but lm_head.weight has {rows} rows")


def _fill(folder: Path, model: Eagle3, state: dict[str, Tensor], tokens: Tensor) -> None:
    """Put the weights into a model. Raises InputError unless they are the model's, by name and shape."""
    state = {n: t for n, t in state.items() if n not in ("d2t", "t2d") and not n.startswith("verifier_")}
    state |= {"lm_head.rows.weight": state.pop("lm_head.weight"), "lm_head.kept": tokens}
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() ^ state.keys()):
        verb = "lacks" if name in expected else "has an unknown"
        family = f"one layer of {' or '.join(FAMILIES)} is supported"
        raise InputError(f"{folder}: an EAGLE-3 draft {verb} weight {name}; {family}")
    for name, shape in expected.items():
        if state[name].shape != shape:
            raise InputError(f"{folder}: weight {name}: expected shape {list(shape)}, got {list(state[name].shape)}")
    model.load_state_dict(state)


def save(folder: Path, model: Eagle3, target: str, architectures: Sequence[str] = ()) -> None:
    """Write a draft in the format of `speculators`, with its target's name and the names of its classes."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("lm_head.")}
    state = {name: tensor.contiguous() for name, tensor in own.items()}
    tokens = model.lm_head.kept.cpu()
    state["lm_head.weight"] = model.lm_head.weight.contiguous()
    if not model.lm_head.is_whole:
        has_row = torch.zeros(model.output_size, dtype=torch.bool).index_fill(0, tokens, True)
        state |= {"d2t": tokens - torch.arange(len(tokens)), "t2d": has_row}
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    verifier = {"name_or_path": target, "architectures": list(architectures)}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": EAGLE3,
        "transformer_layer_config": model.config.to_diff_dict(),
        "draft_vocab_size": len(tokens),
        LAYER_IDS: list(model.target_layers),
        "target_hidden_size": model.target_width // len(model.target_layers),
        **{flag: flag in model.flags for flag in FLAGS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": str(model.dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": EAGLE3,
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
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPES:
        raise InputError(f"{folder}: expected a rope that is the same for all texts ({', '.join(ROPES)}), got {kind}")


def _check_target(
    folder: Path, config: dict[str, Any], layer: Any, layers: Sequence[int], state: dict[str, Tensor], target: Any
) -> None:
    """Raises InputError unless the draft was made for a target of this shape; warns if its target has another name."""
    base = target.config.get_text_config()
    if layer.vocab_size != base.vocab_size:
        count = layer.vocab_size
        raise InputError(f"{folder}: the draft was made for {count} tokens, the target has {base.vocab_size}")
    check_name(folder, config, target)
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


def check_name(folder: Path, config: Mapping[str, Any], target: Any) -> None:
    """Warns if a draft's target has another name."""
    name = str(getattr(target, "name_or_path", "") or "")
    stated = str(((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path") or "")
    own_name = Path(stated).name
    if own_name and name and own_name.lower() not in name.lower() and not own_name.endswith(".gguf"):
        warn(f"{folder} is the draft of {stated}, the target is {name}: expect that fewer tokens are accepted")


def tokens_of_rows(folder: Path, state: dict[str, Tensor], size: int) -> Tensor:
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
    whole = rows == size and not state["d2t"].any()  # then EAGLE's authors leave t2d empty
    if (
        "t2d" in state
        and not (whole and not state["t2d"].any())
        and not torch.equal(state["t2d"].nonzero().squeeze(1), tokens.sort().values)
    ):
        raise InputError(f"{folder}: d2t and t2d name different tokens")
    return tokens

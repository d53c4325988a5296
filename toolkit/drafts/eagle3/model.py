"""EAGLE-3 drafts (arXiv:2503.01840), with the weights' names of `speculators` 0.9.

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

Deviations: none in the arithmetic. A text's first token, which theirs drops, is read without a state and never seen. Drafts of
SpecForge and of EAGLE's authors are read under these names (`format`).

Shapes: b rows, T tokens, D hidden size, W = n D_target width of the target's states, V vocabulary, V' output rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from toolkit.drafts.eagle3 import EAGLE3
from toolkit.engine.hf import attention_reaches
from toolkit.models.reduced import ReducedOutput, WithReducedOutput

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "llama": (modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaRotaryEmbedding),
    "qwen3": (modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3RotaryEmbedding),
}


class Eagle3(WithReducedOutput, modeling_llama.LlamaPreTrainedModel):
    """One EAGLE-3 draft.

    config         of its decoder layer; `vocab_size` is the target's V
    target_layers  layers of the target whose states [..., W] it reads, as `hidden_states[i]` of transformers
    kept           tokens [V'] of its output rows, in their order
    """

    draft_kind = EAGLE3

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

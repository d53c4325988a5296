"""Drafts that give a block of tokens in one forward pass: DFlash and DSpark, with the weights' names of `speculators` 0.9.

A block is the text's newest token (the anchor) and masks after it. Its tokens attend to the target's states of the text before
the anchor, and to each other. So one forward pass gives a state at every position. DFlash's q of a position follows from its
state alone; a block's q is then a product. DSpark adds a low-rank term of the token before the position, and a confidence head.

    theirs (speculators.models.dflash, dspark)     ours
    fc, hidden_norm, layers, norm, lm_head         the same names; layers are Qwen-3's, with norms of queries and keys
    d2t, t2d                                       lm_head.kept [V'], the tokens
    markov_head.markov_w1, markov_w2               the same: logits of x_k += w2 w1[x_{k-1}]
    confidence_head.proj                           the same: sigmoid of a linear layer on [state, w1[x_{k-1}]]
    sample_from_anchor                             whether the anchor's own position predicts the first token, or the next one's

Keys and values of the text are projections of the target's states, without the layer's norm; they are the same in every round.
Layers with a sliding window are causal inside a block unless `sliding_window_non_causal`.
Deviation: none in the arithmetic. What heads and policies read of a position is [state, w1[x_{k-1}]], of which q_k is made.

Shapes, texts: b rows, S tokens of a text, A blocks of a row, L block_size, K tokens that a block predicts.
Shapes, weights: D hidden size, W width of the target's states, V vocabulary, V' output rows, r rank of the Markov term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import GenerationConfig
from transformers.models.qwen3 import modeling_qwen3

from toolkit.drafts.block import DFLASH, DSPARK
from toolkit.drafts.kinds import DraftKind
from toolkit.models.reduced import ReducedOutput, WithReducedOutput

Context = Sequence[tuple[Tensor, Tensor]]  # keys and values [b, heads, S, head size] of every layer


@dataclass(frozen=True)
class BlockSettings:
    """What makes a block draft, beside the config of its layers.

    kind                "dflash" or "dspark"
    block_size          L, the anchor's position included
    mask_token_id       token whose embedding stands at the positions after the anchor
    target_layers       layers of the target whose states it reads, as `hidden_states[i]` of transformers
    sample_from_anchor  True: the anchor's position predicts, and K = L; False: K = L - 1
    sliding_window_non_causal  layers with a window see all of their block
    markov_rank         r; 0: no Markov term
    enable_confidence_head, confidence_head_with_markov  whether there is such a head, and whether it reads w1[x_{k-1}]
    """

    kind: str
    block_size: int
    mask_token_id: int
    target_layers: tuple[int, ...]
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = False
    markov_rank: int = 0
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False

    @property
    def first(self) -> int:
        """The first position of a block that predicts."""
        return 0 if self.sample_from_anchor else 1


class MarkovHead(nn.Module):
    """The Markov term: tokens before positions [...] -> embeddings [..., r] -> what they add to logits [..., V']."""

    def __init__(self, size: int, rows: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(size, rank)
        self.markov_w2 = nn.Linear(rank, rows, bias=False)


class ConfidenceHead(nn.Module):
    """The logit of P(x_k accepted) from [state, w1[x_{k-1}]], before x_k is drawn."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """states [..., D + r] -> [...]; what it does not read comes last."""
        logits: Tensor = self.proj(states[..., : self.proj.in_features]).squeeze(-1)
        return logits


class BlockDraft(WithReducedOutput, modeling_qwen3.Qwen3PreTrainedModel):
    """One DFlash or DSpark draft.

    config    of its layers, Qwen-3's; `vocab_size` is the target's V
    settings  what else makes it
    kept      tokens [V'] of its output rows, in their order
    """

    def __init__(self, config: Any, settings: BlockSettings, kept: Tensor):
        super().__init__(config)
        self.settings = settings
        self.target_layers = settings.target_layers
        width, rank = config.hidden_size, settings.markov_rank
        self.target_width = len(self.target_layers) * width
        self.output_size = int(config.vocab_size)
        self.block_length = settings.block_size - settings.first
        self.state_width = width + rank
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.fc = nn.Linear(self.target_width, width, bias=False)
        self.hidden_norm = modeling_qwen3.Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        layers = [modeling_qwen3.Qwen3DecoderLayer(config, number) for number in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.rotary_emb = modeling_qwen3.Qwen3RotaryEmbedding(config)
        self.norm = modeling_qwen3.Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = ReducedOutput(nn.Linear(width, len(kept), bias=False), kept, self.output_size)
        self.markov_head = MarkovHead(self.output_size, len(kept), rank) if rank else None
        reads = width + (rank if settings.confidence_head_with_markov else 0)
        self.confidence_head = ConfidenceHead(reads) if settings.enable_confidence_head else None
        self.generation_config = GenerationConfig()
        self.post_init()

    @property
    def draft_kind(self) -> DraftKind:
        """DFlash or DSpark."""
        return DSPARK if self.settings.kind == DSPARK.name else DFLASH

    def context(self, target_states: Tensor, positions: Tensor) -> Context:
        """Keys and values of a text from the target's states [b, S, W] at positions [b, S]."""
        states = self.hidden_norm(self.fc(target_states))
        rope = self.rotary_emb(states, positions)
        return [self._keys_and_values(layer, states, rope) for layer in self.layers]

    def forward(self, tokens: Tensor, anchors: Tensor, context: Context) -> Tensor:
        """States [b, A, K, D] that predict the tokens of blocks, after the last norm.

        tokens [b, A]   the anchors' tokens;  anchors [b, A]  their positions: a block sees the text's keys before its own
        context         of `context`, at slots 0, 1, ... of the text
        """
        size = self.settings.block_size
        masks = torch.full((*tokens.shape, size - 1), self.settings.mask_token_id, device=tokens.device)
        positions = anchors.unsqueeze(-1) + torch.arange(size, device=anchors.device)
        hidden = self.embed_tokens(torch.cat([tokens.unsqueeze(-1), masks], -1).flatten(1))
        rope = self.rotary_emb(hidden, positions.flatten(1))
        seen = self._seen(anchors, context[0][0].shape[2])
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"] * len(self.layers)
        layer: Any
        for kind, layer, keys_and_values in zip(kinds, self.layers, context, strict=True):
            mask = seen[kind == "sliding_attention"]
            hidden = hidden + self._attended(layer, layer.input_layernorm(hidden), rope, keys_and_values, mask)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        states: Tensor = self.norm(hidden).unflatten(1, (-1, size))[:, :, self.settings.first :]
        return states

    def outputs(self, states: Tensor, base: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [..., V'] of the output rows, and what heads read [..., D + r], of positions with states [..., D].

        base [..., V']  `lm_head` of the states;  before [...]  the tokens before the positions
        """
        if self.markov_head is None:
            return base, states
        embedded = self.markov_head.markov_w1(before)
        return base + self.markov_head.markov_w2(embedded), torch.cat([states, embedded], -1)

    def _seen(self, anchors: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """What every position of blocks at anchors [b, A] sees of a text's slots and of all blocks [b, 1, A L, S + A L].

        In layers without a window, and in those with one.
        """
        size, count = self.settings.block_size, anchors.shape[1]
        slots = torch.arange(length, device=anchors.device)
        own = anchors.repeat_interleave(size, 1).unsqueeze(-1)
        before = slots < own
        block = torch.arange(count * size, device=anchors.device)
        together = (block.unsqueeze(1) // size == block // size).expand(len(anchors), -1, -1)
        full = torch.cat([before, together], -1).unsqueeze(1)
        window = getattr(self.config, "sliding_window", None)
        if window is None:
            return full, full
        if not self.settings.sliding_window_non_causal:
            together = together & (block <= block.unsqueeze(1))
        return full, torch.cat([before & (slots >= own - window), together], -1).unsqueeze(1)

    def _attended(
        self, layer: Any, states: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        """What blocks' states [b, A L, D] attend to: keys and values of the text, and their own."""
        attention = layer.self_attn
        queries = attention.q_norm(attention.q_proj(states).unflatten(-1, (-1, attention.head_dim)))
        own = self._keys_and_values(layer, states, rope)
        keys, values = (
            torch.cat(parts, 2).repeat_interleave(attention.num_key_value_groups, 1)
            for parts in zip(context, own, strict=True)
        )
        attended = scaled_dot_product_attention(_turned(queries.transpose(1, 2), rope), keys, values, attn_mask=seen)
        projected: Tensor = attention.o_proj(attended.transpose(1, 2).flatten(2))
        return projected

    @staticmethod
    def _keys_and_values(layer: Any, states: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        attention = layer.self_attn
        keys, values = (
            projection(states).unflatten(-1, (-1, attention.head_dim))
            for projection in (attention.k_proj, attention.v_proj)
        )
        return _turned(attention.k_norm(keys).transpose(1, 2), rope), values.transpose(1, 2)


def _turned(states: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys [b, heads, n, head size] after the rotary embedding of their positions."""
    cos, sin = (part.unsqueeze(1) for part in rope)
    return states * cos + modeling_qwen3.rotate_half(states) * sin

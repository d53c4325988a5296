"""Block drafts that learn from their target: DFlash and DSpark (arXiv:2607.05147), as in `speculators.models.dflash`, `dspark`.

Blocks begin at random tokens of a text (anchors). Position k of a block is what decoding computes in a round that begins there,
after k - 1 accepted tokens. All blocks of a text are read in one forward pass. DSpark's position k reads the text's own token
before it.

    theirs                                            ours
    dflash_decay_gamma                                gamma: position k weighs exp(-(k - 1) / gamma)
    loss_fn (default KL; DSpark's L1 and CE)          the training's `loss`: cross_entropy for DFlash, dspark for DSpark
    confidence_head_alpha, BCE against 1 - TV         confidence, the same
    max_anchors of a packed sequence                  anchors of each text
    embed_tokens and lm_head frozen                   the same; fresh layers, the target's last norm

Shapes, texts: B texts, T longest text, m = T - 1 tokens with states of the target, A anchors of a text, K tokens of a block.
Shapes, weights: D width of the draft, r rank of its Markov term.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoConfig

from toolkit.config.notes import Above, AtLeast
from toolkit.config.values import check_ranges
from toolkit.distillation.data import DraftBatch
from toolkit.distillation.losses import TotalVariation
from toolkit.distillation.states import StatesRecipe, StatesTraining, layers_read
from toolkit.distillation.teachers import Prediction
from toolkit.drafts.block import DFLASH, DSPARK
from toolkit.drafts.block.model import BlockDraft, BlockSettings
from toolkit.errors import InputError
from toolkit.models.teacher import pad_right
from toolkit.sampling import seed_of

SAME = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "rope_parameters", "rms_norm_eps", "bos_token_id", "eos_token_id")  # fmt: skip


@dataclass(frozen=True)
class Blocks:
    """What makes a DFlash draft, and how it is trained (conf/kind/dflash.yaml).

    target_layers  whose inputs it reads, from 0; None: as of EAGLE-3 drafts
    block_size     positions of a block, the anchor's included: DFlash drafts one token less
    num_layers     of the draft
    mask_token_id  token at the positions after the anchor; None: the one that pads, else the last
    anchors        blocks of a text that a training step reads
    gamma          position k of a block weighs exp(-(k - 1) / gamma)
    """

    target_layers: Sequence[Annotated[int, AtLeast(0)]] | None = None
    block_size: Annotated[int, AtLeast(2)] = 8
    num_layers: Annotated[int, AtLeast(1)] = 2
    mask_token_id: Annotated[int, AtLeast(0)] | None = None
    anchors: Annotated[int, AtLeast(1)] = 32
    gamma: Annotated[float, Above(0)] = 4.0

    def __post_init__(self) -> None:
        check_ranges(self, "kind.")

    def begin(self, target: Any, kept: Sequence[int] | None, seed: int) -> BlockDraft:
        """A draft with a target's embeddings, output rows and last norm; the rest is fresh.

        kept  tokens with an output row, ascending; None: all
        Raises InputError for layers or a mask token that the target has not.
        """
        base = target.config.get_text_config()
        pad = getattr(base, "pad_token_id", None)
        mask = self.mask_token_id if self.mask_token_id is not None else base.vocab_size - 1 if pad is None else pad
        if mask >= base.vocab_size:
            raise InputError(f"kind.mask_token_id: expected a token below {base.vocab_size}, got {mask}")
        layers = tuple(layers_read(base.num_hidden_layers, self.target_layers))
        sizes = {name: getattr(base, name) for name in SAME if getattr(base, name, None) is not None}
        sizes.setdefault("head_dim", base.hidden_size // base.num_attention_heads)
        config = AutoConfig.for_model("qwen3", **sizes, num_hidden_layers=self.num_layers, tie_word_embeddings=False)
        tokens = torch.arange(base.vocab_size) if kept is None else torch.tensor(list(kept))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draft: Any = BlockDraft(config, self._settings(mask, layers), tokens).to(target.dtype)
        draft.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
        draft.lm_head.rows.weight.data.copy_(target.get_output_embeddings().weight[tokens.to(target.device)])
        norm = getattr(target.get_decoder(), "norm", None)
        if norm is not None and norm.weight.shape == draft.norm.weight.shape:
            draft.norm.weight.data.copy_(norm.weight)
        if draft.markov_head is not None:  # a term of nothing, which learns
            draft.markov_head.markov_w2.weight.data.zero_()
        begun: BlockDraft = draft.to(target.device).eval()
        return begun

    def _settings(self, mask: int, layers: tuple[int, ...]) -> BlockSettings:
        return BlockSettings(DFLASH.name, self.block_size, mask, layers)


@dataclass(frozen=True)
class MarkovBlocks(Blocks):
    """What makes a DSpark draft, and how it is trained (conf/kind/dspark.yaml): every position predicts.

    markov_rank    of the term of the token before
    confidence     weight of the confidence head's loss
    """

    block_size: Annotated[int, AtLeast(2)] = 7
    markov_rank: Annotated[int, AtLeast(1)] = 32
    confidence: Annotated[float, AtLeast(0)] = 1.0

    def _settings(self, mask: int, layers: tuple[int, ...]) -> BlockSettings:
        return BlockSettings(
            DSPARK.name,
            self.block_size,
            mask,
            layers,
            sample_from_anchor=True,
            markov_rank=self.markov_rank,
            enable_confidence_head=True,
            confidence_head_with_markov=True,
        )


class BlockTraining(StatesTraining):
    """A block draft in training. Depths are the positions of blocks: val/alpha is of the first, val/alpha_2, ... of the others.

    Final states of DSpark drafts are [state, Markov embedding of the token before], D + r.
    """

    kind: Any  # Blocks, or MarkovBlocks where the draft has a confidence head

    def weight_of(self, depth: int) -> float:
        return math.exp(-depth / self.kind.gamma)

    def final_states(self, batch: DraftBatch) -> list[tuple[Tensor, Tensor]]:
        states = self.states.of(batch.sequences).to(self.draft.dtype)
        return states_by_position(self.draft, states, batch, self._anchors(batch))

    def logits(self, states: Tensor) -> Tensor:
        width = self.draft.config.hidden_size
        logits = self.draft.lm_head.rows(states[:, :width])
        if self.draft.markov_head is not None:
            logits = logits + self.draft.markov_head.markov_w2(states[:, width:])
        return logits.float()  # type: ignore[no-any-return]

    def losses(self, states: Tensor, expected: Prediction, labels: Tensor, index: Tensor, progress: float) -> Tensor:
        seen = self.distill_batch(states, expected, labels, index)
        losses = self.loss(seen, progress)
        head = self.draft.confidence_head
        if head is None:
            return losses
        overlap = 1 - TotalVariation()(seen).detach()  # where only some tokens of p are known, theirs
        return losses + self.kind.confidence * binary_cross_entropy_with_logits(
            head(states).float(), overlap, reduction="none"
        )

    def _anchors(self, batch: DraftBatch) -> list[list[int]]:
        """Where blocks begin in every text: some at random in training, else all that predict a token which is looked at."""
        anchors, drawn = [], self.trainer.training
        step = int(self.trainer.fit_loop.total_batch_idx)
        seed = seed_of(self.trainer.global_rank, self.on_policy.seed, step)
        generator = torch.Generator().manual_seed(seed)
        for (prompt, produced), where in zip(batch.sequences, batch.positions, strict=True):
            first, last = len(prompt) - 1, len(prompt) + len(produced) - 2
            if drawn:
                order = torch.randperm(last - first + 1, generator=generator)[: self.kind.anchors]
                anchors.append(sorted((first + order).tolist()))
            else:
                before = (len(prompt) + i - 1 - k for i in where for k in range(self.draft.block_length))
                anchors.append(sorted({anchor for anchor in before if anchor >= first}))
        return anchors


def layer_positions(batch: DraftBatch, anchors: Sequence[Sequence[int]], depth: int) -> list[tuple[int, int, int, int]]:
    """Text, number of the anchor, column of the token before, and number among a batch's positions, at a depth from 0."""
    entries, first = [], 0
    for row, ((prompt, _), where) in enumerate(zip(batch.sequences, batch.positions, strict=True)):
        numbers = {len(prompt) + i: first + number for number, i in enumerate(where)}
        first += len(where)
        for number, anchor in enumerate(anchors[row]):
            if (at := numbers.get(anchor + 1 + depth)) is not None:
                entries.append((row, number, anchor + depth, at))
    return entries


def states_by_position(
    draft: BlockDraft, target_states: Tensor, batch: DraftBatch, anchors: Sequence[Sequence[int]]
) -> list[tuple[Tensor, Tensor]]:
    """Per position of a block: the states [n', D + r] that predict produced tokens, and which of the n tokens these are [n'].

    target_states [B, m, W];  anchors  per text, in order: blocks see the states of the tokens before them
    """
    device = draft.device
    tokens = pad_right([[*prompt, *produced] for prompt, produced in batch.sequences], device)
    most = max(map(len, anchors))
    begins = torch.tensor([[*row, *[0] * (most - len(row))] for row in anchors], device=device)
    positions = torch.arange(target_states.shape[1], device=device).expand(len(tokens), -1)
    finals = draft(tokens.gather(1, begins), begins, draft.context(target_states, positions))
    results = []
    for depth in range(draft.block_length):
        entries = layer_positions(batch, anchors, depth)
        columns = [list(column) for column in zip(*entries, strict=True)] or [[], [], [], []]
        rows, numbers, before, index = (torch.tensor(column, dtype=torch.long, device=device) for column in columns)
        states = finals[rows, numbers, depth]
        if draft.markov_head is not None:
            states = torch.cat([states, draft.markov_head.markov_w1(tokens[rows, before])], -1)
        results.append((states, index))
    return results


class BlockRecipe(StatesRecipe):
    """How block drafts are trained."""

    training = BlockTraining

"""EAGLE-3 drafts that learn from their target, unrolled over several depths ("training-time test", arXiv:2503.01840, 3.2).

At depth 1 the draft reads every token of a text beside the target's state before it. At depth k > 1 it reads the text's next
token beside its own state of depth k - 1, as in decoding after k - 1 accepted tokens. Row i at depth k attends to what rows
0 to i read at depth 1, and to its own chain. So each row is what decoding computes at depth k of a round that began there.

    theirs (speculators.models.eagle3.core)      ours
    ttt_steps, ttt_step_loss_decay               depth, decay
    flex attention over all steps' keys          one additive mask, the same keys
    targets renormalised over the V' tokens      the loss's own way with tokens that have no row (`losses.py`)
    lm_head frozen                               trained
    other weights fresh                          the target's last layer, and its last states through `fc` (toy pair, two seeds:
                                                 alpha .314, .330, fresh .279, .306; at depth 3 .286, .283, fresh .261, .285)

The target's states are computed in every step, or kept beside a teacher's cache.

Shapes: B texts, T longest text, m = T - 1 rows, W width of the target's states, D of the draft's, n produced tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig

from toolkit.config.notes import AtLeast, Between
from toolkit.config.values import check_ranges
from toolkit.distillation.data import DraftBatch
from toolkit.distillation.states import StatesRecipe, StatesTraining, layers_read
from toolkit.drafts.eagle3.model import FAMILIES, AllSteps, Eagle3
from toolkit.models.teacher import Text, pad_right

SAME = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "rope_parameters", "rms_norm_eps", "hidden_act", "bos_token_id", "eos_token_id")  # fmt: skip


@dataclass(frozen=True)
class Unrolled:
    """What makes an EAGLE-3 draft, and how deep it is unrolled in training (conf/kind/eagle3.yaml).

    target_layers  whose inputs it reads, from 0; None: 2, half of them, all but 3 (as in the paper's code), or first, middle
                   and last of a target that has fewer than seven
    depth          of the unrolling
    decay          weight of depth k: decay^(k - 1)
    flags          of `toolkit.drafts.eagle3.model`
    """

    target_layers: Sequence[Annotated[int, AtLeast(0)]] | None = None
    depth: Annotated[int, AtLeast(1)] = 3
    decay: Annotated[float, Between(0, 1, "(]")] = 1.0
    flags: Sequence[Literal["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]] = field(
        default=("norm_before_residual", "norm_before_fc")
    )

    def __post_init__(self) -> None:
        check_ranges(self, "kind.")

    def begin(self, target: Any, kept: Sequence[int] | None, seed: int) -> Eagle3:
        """A draft with a target's embeddings, output rows and, of one family, last layer; the rest is fresh.

        kept  tokens with an output row, ascending; None: all
        Raises InputError for layers that the target has not.
        """
        base = target.config.get_text_config()
        count = base.num_hidden_layers
        layers = layers_read(count, self.target_layers)
        family = base.model_type if base.model_type in FAMILIES else "llama"
        sizes = {name: getattr(base, name) for name in SAME if getattr(base, name, None) is not None}
        config = AutoConfig.for_model(family, **sizes, num_hidden_layers=1, tie_word_embeddings=False)
        config._attn_implementation = "sdpa"
        tokens = torch.arange(base.vocab_size) if kept is None else torch.tensor(list(kept))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draft = Eagle3(config, layers, len(layers) * base.hidden_size, tokens, self.flags).to(target.dtype)
        draft.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
        draft.lm_head.weight.data.copy_(target.get_output_embeddings().weight[tokens.to(target.device)])
        if base.model_type in FAMILIES:
            _copy_last_layer(draft, target.get_decoder())
        begun: Eagle3 = draft.to(target.device).eval()
        return begun


@torch.no_grad()
def _copy_last_layer(draft: Eagle3, decoder: Any) -> None:
    """Copy the target's last norm, and its last layer, which reads states where the draft reads the last of them."""
    own: Any = draft.layers[0]
    last, width = decoder.layers[-1], draft.config.hidden_size
    draft.norm.load_state_dict(decoder.norm.state_dict())
    draft.fc.weight[:, -width:] += torch.eye(width)
    own.hidden_norm.load_state_dict(last.input_layernorm.state_dict())
    for name, ours in own.named_parameters():
        if name not in ("input_layernorm.weight", "hidden_norm.weight"):
            reads_both = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))  # embeddings and states
            (ours[:, width:] if reads_both else ours).copy_(last.get_parameter(name))


def unrolled_states(draft: Eagle3, target_states: Tensor, tokens: Tensor, depth: int) -> list[Tensor]:
    """Final states [B, m, D] of every depth: row i of depth k predicts token i + 1 + k.

    target_states [B, m, W], tokens [B, T]
    """
    rows, device = tokens.shape[1] - 1, tokens.device
    position = torch.arange(rows, device=device)
    sees = position.unsqueeze(0) <= position.unsqueeze(1)
    itself = torch.eye(rows, dtype=torch.bool, device=device)
    states, steps, finals = draft.projected(target_states), AllSteps(draft), []
    followed = torch.nn.functional.pad(tokens, (0, depth))
    for step in range(depth):
        read = followed[:, 1 + step : 1 + step + rows]
        positions = position + 1 + step
        mask = steps.mask(torch.cat([sees, *[itself] * step], 1), positions)
        states, final = draft.read(read, positions.unsqueeze(0), mask, steps, states)
        finals.append(final)
    return finals


def states_by_depth(
    draft: Eagle3, target_states: Tensor, sequences: Sequence[Text], positions: Sequence[Sequence[int]], depth: int
) -> list[tuple[Tensor, Tensor]]:
    """Per depth: the final states [n', D] that predict produced tokens, and which of the n tokens these are [n'].

    A token is left out where the text is too short before it for such a round.
    positions  per text the produced tokens that are looked at, from 0, in order
    """
    tokens = pad_right([[*prompt, *produced] for prompt, produced in sequences], draft.device)
    finals = unrolled_states(draft, target_states.to(draft.dtype), tokens, depth)
    batch = [row for row, where in enumerate(positions) for _ in where]
    columns = [len(prompt) + i for (prompt, _), where in zip(sequences, positions, strict=True) for i in where]
    results = []
    for step, final in enumerate(finals):
        index = [number for number, column in enumerate(columns) if column >= step + 2]
        read = [batch[number] for number in index], [columns[number] - 2 - step for number in index]
        results.append((final[read], torch.tensor(index, dtype=torch.long, device=draft.device)))
    return results


class UnrolledTraining(StatesTraining):
    """An EAGLE-3 draft in training. Logs val/alpha_2, ... of the deeper depths beside val/alpha, which is of depth 1.

    It learns from rounds that begin inside a prompt, too. Validation leaves them out, as decoding has none.
    """

    def weight_of(self, depth: int) -> float:
        return self.kind.decay**depth  # type: ignore[no-any-return]

    def final_states(self, batch: DraftBatch) -> list[tuple[Tensor, Tensor]]:
        states = self.states.of(batch.sequences)
        return states_by_depth(self.draft, states, batch.sequences, batch.positions, self.kind.depth)


class Eagle3Recipe(StatesRecipe):
    """How EAGLE-3 drafts are trained."""

    training = UnrolledTraining

"""What the target says along an engine's texts: states for drafts that read them, logits above temperature 0. Read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from analysis.diagnosis.answers import Answer
from toolkit.distillation.states import TargetStates
from toolkit.models.pair import ModelPair
from toolkit.models.teacher import bounded, produced_logits, seen_before
from toolkit.sampling import Sampling, penalized


@dataclass
class AlongTexts:
    """The target of a pair, read along answers.

    Shapes: m tokens of prompt and text but the last, W width of the states of some layers, n tokens of a text, V vocabulary.
    """

    target: Any
    answers: Sequence[Answer]
    _states: dict[tuple[int, ...], list[Tensor]] = field(default_factory=dict)

    @torch.inference_mode()
    def states(self, layers: Sequence[int]) -> list[Tensor]:
        """States [m, W] of layers, as transformers' `hidden_states`, of every answer. Those of the first layers are kept."""
        layers = tuple(layers)
        if layers in self._states:
            return self._states[layers]
        source, states = TargetStates(self.target, layers), list[Tensor]()
        for part in bounded([answer.length for answer in self.answers], source.width):
            read = source.of([(answer.prompt_ids, answer.token_ids) for answer in self.answers[part]])
            states += [row[: answer.length - 1].clone() for row, answer in zip(read, self.answers[part], strict=True)]
        if not self._states:
            self._states[layers] = states
        return states

    @torch.inference_mode()
    def logits(self, pair: ModelPair, sampling: Sampling) -> list[Tensor]:
        """Logits [n, V] of every answer's tokens, after the repetition penalty and before anything else."""
        logits, size = list[Tensor](), pair.vocab_size
        for part in bounded([len(answer.token_ids) for answer in self.answers], size):
            texts = [(answer.prompt_ids, answer.token_ids) for answer in self.answers[part]]
            rows = produced_logits(self.target, texts).split([len(produced) for _, produced in texts])
            for (prompt, produced), row in zip(texts, rows, strict=True):
                seen = None
                if sampling.repetition_penalty != 1.0:
                    seen = seen_before(prompt, produced, size).to(row.device)
                logits.append(penalized(row, sampling, seen))
        return logits

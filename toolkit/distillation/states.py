"""Training of drafts that read their target's states: which layers, the states along texts, and what all such kinds share.

The target's states are computed in every step, or kept beside a teacher's cache.

Shapes: B texts, m tokens with states of the target, W width of these, D of the draft's, c positions at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from tqdm.auto import tqdm

from toolkit.distillation.data import TextData, length_of
from toolkit.distillation.module import DraftTraining
from toolkit.distillation.recipe import Recipe, frequent_tokens
from toolkit.distillation.teachers import Teacher, key_of
from toolkit.drafts.folders import kind_in
from toolkit.drafts.kinds import kind_of
from toolkit.engine.facts import check_evaluation, vocab_size
from toolkit.errors import InputError
from toolkit.files.tensors import load_tensors, save_tensors
from toolkit.models.pair import load_draft
from toolkit.models.teacher import Text, pad_right


def layers_read(count: int, named: Sequence[int] | None) -> list[int]:
    """The layers of a target of `count` layers whose inputs a draft reads. Raises InputError for those that it has not."""
    usual = (2, count // 2, count - 3) if count > 6 else sorted({0, count // 2, count - 1})
    layers = list(named or usual)
    if layers != sorted(set(layers)) or not all(0 <= layer < count for layer in layers):
        raise InputError(f"kind.target_layers: expected ascending layers from 0 to {count - 1}, got {layers}")
    return layers


class TargetStates:
    """The states of the target that a draft reads, along texts.

    folder  where they are kept, a file per text; None: the target reads every batch
    """

    def __init__(self, target: Any, layers: Sequence[int], folder: Path | None = None):
        self.target, self.layers, self.folder = target, tuple(layers), folder
        self.width = len(self.layers) * target.config.get_text_config().hidden_size

    def prepare(self, sequences: Sequence[Text]) -> None:
        """Compute what the folder lacks, and say its size first."""
        if self.folder is None:
            return
        missing = sorted((text for text in sequences if not self._file(text).exists()), key=length_of)
        if not missing:
            return
        total = sum(len(prompt) + len(produced) - 1 for prompt, produced in missing)
        size = total * self.width * self.target.dtype.itemsize / 1e6
        print(f"states: the target reads {total:,} tokens once, {size:,.0f} MB go to {self.folder}", flush=True)
        with tqdm(total=total, desc="states", unit="token") as bar:
            for text in missing:
                states = self._computed([text])[0].cpu()
                save_tensors(self._file(text), {"states": states})
                bar.update(len(states))

    def of(self, sequences: Sequence[Text]) -> Tensor:
        """States [B, m, W] that have read each token but the last, on the target's device, padded on the right."""
        if self.folder is None:
            return self._computed(sequences)
        parts = [load_tensors(self._file(text), "target states")[0]["states"] for text in sequences]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).to(self.target.device)

    @torch.no_grad()
    def _computed(self, sequences: Sequence[Text]) -> Tensor:
        check_evaluation(self.target)
        tokens = pad_right([[*prompt, *produced][:-1] for prompt, produced in sequences], self.target.device)
        output = self.target.get_output_embeddings()
        with output.register_forward_pre_hook(lambda module, args: (args[0][:, -1:],)):
            states = self.target(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([states[layer] for layer in self.layers], -1)

    def _file(self, text: Text) -> Path:
        assert self.folder is not None
        return self.folder / "-".join(map(str, self.layers)) / f"{key_of(text)}.safetensors"


class StatesTraining(DraftTraining):
    """A draft that reads the target's states in training.

    states  of the target;  kind  the settings of conf/kind/NAME.yaml
    """

    def __init__(self, *args: Any, states: TargetStates, kind: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.states, self.kind = states, kind

    @property
    def tokens(self) -> Tensor | None:
        return None if self.draft.lm_head.is_whole else self.draft.lm_head.kept

    def logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self.draft.lm_head.rows(states)
        return logits.float()


class StatesRecipe(Recipe):
    """How a draft that reads the target's states is begun and trained. A kind names its `training`.

    Its settings have `begin(target, kept, seed)`: a draft whose rows are of the tokens `kept`, ascending; None: of all.
    """

    training: ClassVar[type[StatesTraining]]

    def begin(self, texts: TextData) -> Any:
        """The draft of `from_pretrained`, if that is of this kind, else fresh weights.

        Raises InputError for keys of other kinds of draft, and without the target.
        """
        cfg, kind, target = self.cfg, self.kind, self.target
        for name in ("layers", "lmbda", "exports", "shape"):
            if getattr(cfg, name):
                raise InputError(
                    f"{name}: kind={kind.name} takes none, for its draft reads the target's states; leave it out"
                )
        if target is None:
            raise InputError(
                f"kind={kind.name}: the draft reads the target's states; expected teacher.on_missing=generate"
            )
        source = cfg.from_pretrained
        if source is not None and (stated := kind_in(source)).reads_target:
            if stated is not kind:
                raise InputError(
                    f"from_pretrained: {source} holds a draft of the kind {stated.name}, expected {kind.name}"
                )
            return self._trainable(load_draft(source, str(target.device), cfg.pair.dtype, target=target.target))
        size, tokens = vocab_size(target.target), None
        if cfg.vocabulary is not None and cfg.vocabulary < size:
            tokens = frequent_tokens(cfg.vocabulary, size, target.end_ids or (), texts, "have")
        return self._trainable(self.settings.begin(target.target, tokens, cfg.seed))

    def module(self, arguments: Sequence[Any], teacher: Teacher, texts: Sequence[Text]) -> DraftTraining:
        assert self.target is not None
        draft, folder = arguments[0], teacher.folder
        states = TargetStates(self.target.target, draft.target_layers, None if folder is None else folder / "states")
        states.prepare(texts)
        return self.training(*arguments, states=states, kind=self.settings)

    @staticmethod
    def _trainable(draft: Any) -> Any:
        """The draft with gradients for all but the target's embeddings, and what its kind holds still."""
        draft.requires_grad_(True)
        for name in kind_of(draft).frozen:
            draft.get_submodule(name).requires_grad_(False)
        return draft

"""What a kind of draft is, and which kind a model is of. The parts of a kind are imported when they are first used.

A kind is a folder beside this file, an entry of KINDS and conf/kind/NAME.yaml, which names it: `_target_: package.module:KIND`.
One of a user's own needs a module and such a yaml (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from toolkit.config.files import user_folders
from toolkit.errors import InputError
from toolkit.files.text import first_line

KINDS = ("toolkit.drafts.eagle3:EAGLE3", "toolkit.drafts.block:DFLASH", "toolkit.drafts.block:DSPARK")


@dataclass(frozen=True)
class DraftKind:
    """A kind of draft. Parts are texts "module:object".

    name      of conf/kind/NAME.yaml, in commands and on cards
    label     as messages call it: EAGLE-3
    names     pattern of the names that claim a folder: `speculators_model_type`, class names and model type of its config.json
    keys      keys of a config.json that claim it
    weights   names of weights that claim it, all of them together
    load      (folder, dtype, target, device) -> the draft; None: a causal language model, as transformers loads it
    save      (folder, draft, name of the target, names of the target's classes)
    session   (draft, rows, capacity, captures, the target's session) -> Session; None: that of causal language models
    settings  class of the keys of conf/kind/NAME.yaml
    training  class of how a draft is begun, trained and exported (`toolkit.distillation.recipe.Recipe`)
    proposer  class that drafts chains of it
    recorder  class that records it (`toolkit.trace.record.Recorder`)
    causes    function from a `toolkit.drafts.causes.Case` to what engines get wrong with it; None: no causes
    reads_target  whether it reads the target's states: it has `target_layers`, its folder no tokenizer
    frozen    its modules that are the target's: training leaves them as they are
    forwards  what one forward pass gives: a token, or a block of `block_length` tokens
    engines   the name of the kind by serving engine (`analysis.advise`); engines without one do not load it
    cautions  function from a draft's folder and numbers of drafted tokens to what these engines refuse or misread, a line each;
              None: nothing
    """

    name: str
    label: str
    names: str = "(?!)"
    keys: tuple[str, ...] = ()
    weights: frozenset[str] = frozenset()
    load: str | None = None
    save: str = "toolkit.drafts.separate.exports:save"
    session: str | None = None
    settings: str | None = None
    training: str = "toolkit.drafts.separate.training:SeparateRecipe"
    proposer: str = "toolkit.decoding.proposers.chain:ChainProposer"
    recorder: str = "toolkit.trace.record:Recorder"
    causes: str | None = None
    reads_target: bool = False
    frozen: tuple[str, ...] = ("embed_tokens",)
    forwards: Literal["token", "block"] = "token"
    engines: Mapping[str, str] = field(default_factory=dict)
    cautions: str | None = None

    def part(self, name: str) -> Any:
        """Return the object that a part's text names. Raises InputError if there is none."""
        return named_object(getattr(self, name) or "")

    @property
    def phrase(self) -> str:
        """A draft of it, as messages say it: an EAGLE-3 draft."""
        return f"{'an' if self.label[0] in 'AEIOUaeiou' else 'a'} {self.label} draft"

    @property
    def settings_class(self) -> Any:
        """The class of its settings, whose keys are those of conf/kind/NAME.yaml."""
        return self.part("settings")

    def __call__(self, **settings: Any) -> Any:
        """Build the settings of conf/kind/NAME.yaml."""
        return self.settings_class(**settings)


SEPARATE = DraftKind(
    "separate",
    "separate",
    causes="toolkit.drafts.separate.causes:causes",
    engines={
        "transformers": "assistant_model",
        "vllm": "draft_model",
        "tensorrt_llm": "DraftTarget",
        "sglang": "STANDALONE",
        "llama_cpp": "draft-simple",
    },
)
_REGISTERED: list[DraftKind] = []


def register(kind: DraftKind) -> DraftKind:
    """Make a kind known to this process, whose folders are then loaded as its own; returns it."""
    _REGISTERED.append(kind)
    return kind


def all_kinds() -> list[DraftKind]:
    """Every kind but the separate one: ours, those of the user's conf/kind/*.yaml, those that were registered."""
    named = [*KINDS, *(target for folder in user_folders() for target in _targets(folder))]
    return list({kind.name: kind for kind in (*map(_kind_at, named), *_REGISTERED)}.values())


def kind_by_target(config: Mapping[str, Any] | None) -> DraftKind:
    """The kind that a choice of conf/kind/ names by its `_target_`; None: the separate one. Raises InputError for another."""
    return SEPARATE if config is None else _kind_at(str(config["_target_"]))


def _kind_at(target: str) -> DraftKind:
    kind = named_object(target)
    if not isinstance(kind, DraftKind):
        raise InputError(f"kind._target_: expected package.module:KIND, a DraftKind, got {target}")
    return kind


def kind_of(model: Any) -> DraftKind:
    """The kind of a loaded draft: its `draft_kind`, else the separate one."""
    kind: DraftKind = getattr(model, "draft_kind", SEPARATE)
    return kind


def reads_states(model: Any) -> bool:
    """Whether a draft reads the target's states."""
    return kind_of(model).reads_target


def gives_blocks(model: Any) -> bool:
    """Whether a draft gives a block of tokens per forward pass."""
    return kind_of(model).forwards == "block"


def block_length(model: Any) -> int | None:
    """How many tokens a draft gives in one forward pass; None: it drafts one after another."""
    return int(model.block_length) if gives_blocks(model) else None


def reading_kinds() -> str:
    """The kinds of drafts that read the target's states, as messages say them: an EAGLE-3, DFlash or DSpark draft."""
    first, *others = [kind for kind in all_kinds() if kind.reads_target]
    labels = [first.phrase.removesuffix(" draft"), *(kind.label for kind in others)]
    return f"{', '.join(labels[:-1])} or {labels[-1]} draft"


def needs_target(draft: Any) -> str:
    """The line for a draft that is read alone and cannot be."""
    return (
        f"{kind_of(draft).phrase} reads its target's states and cannot be read alone: it decodes beside its target, "
        "toolkit.distill trains it and data_gen.traces records it; token-mixed datasets and the oracle need a draft of its own"
    )


@cache
def named_object(text: str) -> Any:
    """What "package.module:name" names. Raises InputError if it cannot be imported."""
    module, _, name = text.partition(":")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # whatever the module does
        raise InputError(f"expected package.module:NAME, got {text!r}: {first_line(error)}") from error


def _targets(folder: Path) -> list[str]:
    """The kinds that a user's folder of configs names."""
    from omegaconf import OmegaConf

    configs = (OmegaConf.to_container(OmegaConf.load(path)) for path in sorted((folder / "kind").glob("*.yaml")))
    targets = [str(config.get("_target_")) for config in configs if isinstance(config, dict)]
    return [target for target in targets if ":" in target]

"""The config of a command: a dataclass with the type, range, default and meaning of every key.

    mixing_ratio: Annotated[float, Between(0, 1, "()"), "r: share of positions that keep the target's token"] = 0.15

A key without a default has to be given. `ConfigGroup` marks what a config group fills in: the keys there are those of the class
that it names (`toolkit.config.classes`), and conf/<command>.yaml says which choice is the default. `File`, `Head` and `Model`
mark what counts by its content. The commands of `data_gen` and of `analysis` stand in `keys.py` there. What several packages
share is here, with the toolkit's own commands.
"""
# ruff: noqa: RUF012  # every config has its own copy of a list

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, partial
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform

from toolkit.config.notes import (
    REQUIRED,
    Above,
    AtLeast,
    Between,
    ConfigGroup,
    File,
    Head,
    HubData,
    Key,
    Keys,
    Probability,
    meaning_of,
    notes,
)
from toolkit.config.values import options


@dataclass_transform(kw_only_default=True, eq_default=False)
class ConfigSection:
    """Keys that belong together; every subclass is a dataclass, every config has its own copy of a default."""

    def __init_subclass__(cls) -> None:
        for name, value in [*vars(cls).items()]:
            if isinstance(value, list | dict | ConfigSection) and not name.startswith("_"):
                setattr(cls, name, field(default_factory=partial(deepcopy, value)))
        dataclass(kw_only=True, eq=False)(cls)


Count = Annotated[int, AtLeast(1)]
Amount = Annotated[float, AtLeast(0)]
Positive = Annotated[float, Above(0)]
Seed = Annotated[int, AtLeast(0)]
Seed32 = Annotated[int, Between(0, 2**32 - 1)]  # as Lightning's seed_everything takes them
CostRatio = Annotated[Positive, "c, draft forward / target forward"]
Folders = list[str]
Inputs = Annotated[str | Folders, File()]
LOAD_DRAFT = {"_target_": "toolkit.models.pair.load_draft", "source": "${pair.draft}", "target": "${pair.target}",
              "device": "cpu", "dtype": "${pair.dtype}"}  # fmt: skip
READ_RESPONSES = {"_target_": "data_gen.texts.read_responses", "_partial_": True}


class Paths(ConfigSection):
    root_dir: Annotated[str, "output goes to ROOT_DIR/<command>-<hash of what determines the content>"] = "outputs"
    output_dir: Annotated[str | None, "this very folder instead"] = None


class Command(ConfigSection):
    """What every command takes."""

    module: ClassVar[str]
    example: ClassVar[str]  # its overrides
    appended: ClassVar[tuple[str, ...]] = ()  # groups that +group=choice adds to the whole config
    reads_grammars: ClassVar[bool] = False

    paths: Annotated[Paths, "where output goes"] = Paths()
    overwrite: Annotated[bool, "replace what the output folder holds of another configuration"] = False


class OnPair(ConfigSection):
    pair: Annotated[Any, ConfigGroup("pair"), "target and draft: pair.target=PATH pair.draft=PATH for any checkpoints"]


class ReadsDraft(OnPair):
    draft: Annotated[Any, ConfigGroup(), "draft whose embeddings are read"] = LOAD_DRAFT


class OnPrompts(OnPair):
    prompts: Annotated[Any, ConfigGroup("prompts"), "the prompts; prompts.path=FILE.jsonl for your own"]
    sampling: Annotated[Any, ConfigGroup("sampling"), "how tokens are drawn and when a response ends"]


class Shared(ConfigSection):
    rank: Annotated[int, AtLeast(0), "which part this process makes: every world_size-th of the same folder"] = 0
    world_size: Annotated[Count, "processes that share the work: -m rank=0,1 world_size=2 hydra/launcher=joblib"] = 1


class Tracked(ConfigSection):
    track: Annotated[bool, "log to Weights & Biases (offline unless there is an API key)"] = True


class Grid(ConfigSection):
    """Methods of conf/method/, each with lists of values for its keys: checked by `check.check`."""

    references: ClassVar[tuple[str, ...]] = ()  # further names, no methods, with parameters of their own


class OfMethod(ConfigSection):
    """What a grid may say of a method beside its own keys."""

    head: Annotated[str | list[str | None] | None, Head(), "acceptance heads; null: the pair's own"] = None


class StageSpec(ConfigSection):
    run: Annotated[str, "module.function of the stage"]
    config: Annotated[str, "its root config"]
    overrides: Annotated[list[str], 'of that config; "{name}" is the folder of an earlier stage'] = []
    for_each: Annotated[
        Mapping[str, list[str] | Mapping[str, list[str]]],
        'one stage per combination of these names; "{name}" stands for each. A mapping adds overrides to each name',
    ] = {}
    inherit: Annotated[list[str], "nodes of the experiment that replace the stage's own, whole: [pair]"] = []


OneHead = Annotated[str | None, Head(), "folder of an acceptance head; null: the one that ships with the pair"]
Statistics = Annotated[
    str | None, File(), "of analysis.heads statistics=: acceptance where there is no head; null: weights that ship"
]
OneMethod = Annotated[Any, ConfigGroup("method"), "proposer, policy and rule"]


class Decode(Command, OnPrompts, Tracked):
    module, example = "toolkit.decode", "method=specdec_pp prompts=toy_math"
    reads_grammars = True
    method: OneMethod
    head: OneHead = None
    statistics: Statistics = None
    batch_size: Annotated[
        Count, "prompts decoded together; the tokens depend on it only where a rule weighs costs at this size"
    ] = 8
    cost_ratio: Annotated[CostRatio, "for the throughput that is logged"] = 0.2
    export: Annotated[
        bool, "write acceptance.csv, Spec-Bench's and SpecDec++'s formats, too; with times if batch_size is 1"
    ] = False
    category: Annotated[
        str, "of exported prompts that name none; Spec-Bench's: translation, summarization, qa, rag, ..."
    ] = "overall"
    model_id: Annotated[str | None, "how exported answers call their model; null: the folder's name"] = None


class MethodOnly(ConfigSection):
    """What the library composes for a method by name: no command."""

    method: OneMethod
    head: OneHead = None
    statistics: Statistics = None
    policy: Annotated[Any, ConfigGroup("stopping"), "a policy by itself: +stopping@policy=NAME"] | None = None


class TrainsHeads(OnPair):
    data: Annotated[
        Any, ConfigGroup("data", nullable=True), "data to learn from, and the draft whose states are read"
    ] = None
    head: Annotated[Any, ConfigGroup("model", nullable=True), "shape of the head"]
    loss: Annotated[Any, ConfigGroup("model", nullable=True), "what the training minimises"]
    optimizer: Annotated[Any, ConfigGroup("model", nullable=True), "how it is minimised"]
    scheduler: Annotated[Any, ConfigGroup("model", nullable=True), "the learning rate over training; null: constant"]
    model: Annotated[
        Any,
        ConfigGroup("model", nullable=True),
        "the Lightning module of all these; null: nothing is trained, only stages are run",
    ]
    seed: Annotated[Seed32, "seed of the weights and of the order of the data"] = 0


class Trains(ConfigSection):
    trainer: Annotated[Any, ConfigGroup("trainer"), "arguments of pytorch_lightning.Trainer"]
    callbacks: Annotated[Mapping[str, Any] | None, ConfigGroup("callbacks", built=False), "checkpoints and the like"]
    logger: Annotated[Mapping[str, Any] | None, ConfigGroup("logger", built=False), "where curves go"]
    tags: Annotated[list[str], "tags of the Weights & Biases runs"] = []
    ckpt_path: Annotated[str | None, "resume from this checkpoint; null or last: from the run folder's own"] = None
    before: Annotated[Mapping[str, StageSpec] | None, ConfigGroup("before", built=False), "stages that run first"] = {}
    after: Annotated[
        Mapping[str, StageSpec] | None, 'stages that run last; "{train}" or "{distill}" is the run\'s folder'
    ] = {}


class Train(Command, TrainsHeads, Trains):
    module, example = "toolkit.train", "+experiment=toy_head head.depth=3 loss.w_rej=6"
    appended = ("experiment", "hparams_search", "debug")
    optimized_metric: Annotated[
        str, "score for best.ckpt and a sweeper; val/auroc needs callbacks.checkpoints.mode=max"
    ] = "val/log_loss_calibrated"
    from_pretrained: Annotated[str | None, Head(), "start from the head in this folder"] = None
    prompts: Annotated[
        Any, ConfigGroup("prompts", nullable=True), "prompts of an experiment that makes its own data"
    ] = None
    sampling: Annotated[Any, ConfigGroup("sampling", nullable=True), "sampling of such an experiment's responses"] = (
        None
    )
    toy: Annotated[
        Mapping[str, Any] | None, "set by the experiments of papers: their data and sizes for the toy pair"
    ] = None
    dry_run: Annotated[bool, "compose and check every stage, print the plan, load and run nothing"] = False


class Distill(Command, OnPair, Trains):
    module, example = "toolkit.distill", "responses=[FOLDER,...] loss=lk"
    appended = ("experiment",)
    responses: Annotated[Inputs, "folders of data_gen.responses: the target's own texts"]
    read: Annotated[Any, ConfigGroup(), "function that reads them"] = READ_RESPONSES
    data: Annotated[Any, ConfigGroup(), "how responses become batches"]
    loss: Annotated[Any, ConfigGroup("loss"), "what the training minimises"]
    teacher: Annotated[Any, ConfigGroup("teacher"), "where the target's probabilities come from"]
    from_pretrained: Annotated[
        str | None, HubData(kind="model"), "a folder, a hub name or toy/draft to begin with; null: fresh weights"
    ] = "${pair.draft}"
    layers: Annotated[
        Count | list[Annotated[int, AtLeast(0)]] | None,
        "layers of the target that make the draft; a number: those whose absence costs most; null: pair.draft is trained on",
    ] = None
    kind: Annotated[
        Any,
        ConfigGroup("kind", nullable=True),
        "null: a model of its own; NAME: another kind of draft",
    ] = None
    vocabulary: Annotated[
        Count | None, "V': output tokens that the draft keeps, the most frequent of the responses; null: all"
    ] = None
    exports: Annotated[
        list[Literal["plain", "gguf", "compact"]],
        "further files: plain (draft_plain/, whole vocabulary, for transformers), gguf (draft.gguf, for llama.cpp; a Llama), "
        "compact (draft_compact/, without the target's embeddings, in bfloat16)",
    ] = []
    export: Annotated[bool, "export the best draft that an interrupted run has made, and train no further"] = False
    rehearse: Annotated[bool, "only try whether such a draft can be made, written and read; no responses are read"] = (
        False
    )
    shape: Annotated[
        Mapping[str, Any] | None, "config keys of a draft with fresh weights that differ from the pair's draft's"
    ] = None
    temperature: Annotated[Positive, "temperature of p and q in the loss; null: the responses' own, or 1"] | None = None
    lmbda: Annotated[float, Probability, "probability that a batch's texts are drawn from the draft itself"] = 0.0
    optimizer: Annotated[Any, ConfigGroup(), "how it is minimised"]
    scheduler: Annotated[Any, ConfigGroup(), "the learning rate over training; null: constant"] | None
    seed: Annotated[Seed32, "seed of fresh weights, of the order of the texts, of the draft's own texts"] = 0
    optimized_metric: Annotated[
        str, "score for best.ckpt and a sweeper; val/loss needs callbacks.checkpoints.mode=min"
    ] = "val/alpha"


class TrainHeads(Command, TrainsHeads):
    module, example = "toolkit.train_heads", "data.path=FOLDER depths=[0,3] w_rejs=[1,6]"
    depths: Annotated[list[Annotated[int, AtLeast(0)]], "values of D, the number of residual blocks"] = [0, 1, 2, 3, 4]
    w_rejs: Annotated[list[Positive], "values of w_rej, the weight of a rejection"] = [1, 3, 6, 12]
    max_epochs: Annotated[Count, "passes over the training data, at most"] = 16
    patience: Annotated[Count, "validations of a head without a better score before it stops"] = 4
    optimized_metric: Annotated[str, "validation score; the state where it is smallest is kept"] = (
        "val/log_loss_calibrated"
    )


class Sync(Command):
    module, example = "toolkit.sync", "folder=outputs"
    folder: Annotated[str, "every offline run below it is uploaded"] = "outputs"
    project: Annotated[str | None, "another project than the runs name"] = None
    entity: Annotated[str | None, "who they will belong to; null: the API key's"] = None
    dry_run: Annotated[bool, "say what would be uploaded"] = False


MODULES = {  # of the classes of configs, which are called as the configs are: TrainHeads for conf/train_heads.yaml
    __name__: "method_only decode train train_heads distill sync",
    "data_gen.keys": "toy responses mix traces",
    "analysis.keys": "sweep quickstart_sweep frontier compare heads acceptance timing advise serving diagnose report paper",
}
COMMANDS = {config_name: module for module, names in MODULES.items() for config_name in names.split()}


def command_of(config_name: str) -> type[ConfigSection] | None:
    """The keys of conf/<config_name>.yaml, their module imported; None of a root config of the user's own."""
    if config_name not in COMMANDS:
        return None
    section: type[ConfigSection] = getattr(import_module(COMMANDS[config_name]), config_name.title().replace("_", ""))
    return section


def _keys_of(section: Any) -> Keys:
    hints = typing.get_type_hints(section, include_extras=True)
    own = dict.fromkeys(name for kind in section.__mro__ for name in vars(kind).get("__annotations__", {}))
    defaults: dict[str, Any] = {}
    for entry in fields(section):
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        defaults[entry.name] = REQUIRED if default is MISSING else default
    keys = (Key(name, hints[name], meaning_of(hints[name]), defaults[name]) for name in own if name in defaults)
    return Keys({key.name: key for key in keys}, no_blanks=True)


keys_of: Callable[[Any], Keys] = cache(_keys_of)


def defaults_of(section: type[ConfigSection]) -> dict[str, Any]:
    """Every key with its default as plain containers; ??? where there is none."""
    return {name: _plain(key.default) for name, key in keys_of(section).keys.items()}


def _plain(value: Any) -> Any:
    if value is REQUIRED:
        return "???"
    if not isinstance(value, ConfigSection):
        return value
    return {name: _plain(content) for name, content in vars(value).items()}


def section_in(annotation: Any) -> type[ConfigSection] | None:
    """The declared section that an annotation asks for, if it does."""
    kinds = (kind for kind in options(annotation) if isinstance(kind, type) and issubclass(kind, ConfigSection))
    return next(kinds, None)


def group_of(annotation: Any) -> ConfigGroup | None:
    """The config group that fills a key in."""
    return next((note for note in notes(annotation) if isinstance(note, ConfigGroup)), None)

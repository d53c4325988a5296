"""The config of every command: one dataclass each, with the type, range, default and meaning of every key.

    mixing_ratio: Annotated[float, Between(0, 1, "()"), "r: share of positions that keep the target's token"] = 0.15

A key without a default has to be given. `ConfigGroup` marks what a config group fills in: the keys there are those of the class
that it names (`toolkit.config.classes`), and conf/<command>.yaml says which choice is the default. `File`, `Head` and `Model`
mark what counts by its content.
"""
# ruff: noqa: RUF012  # every config has its own copy of a list

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform

from toolkit.config.notes import (
    REQUIRED,
    Above,
    AtLeast,
    Between,
    Choice,
    ConfigGroup,
    File,
    Head,
    HubData,
    Key,
    Keys,
    Model,
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
AProbability = Annotated[float, Probability]
Seed = Annotated[int, AtLeast(0)]
Seed32 = Annotated[int, Between(0, 2**32 - 1)]  # as Lightning's seed_everything takes them
CostRatio = Annotated[Positive, "c, draft forward / target forward"]
Resamples = Annotated[Count, "bootstrap samples"]
Seconds = Positive
Folders = list[str]
Inputs = Annotated[str | Folders, File()]
Named = Annotated[Mapping[str, str], File()]  # {NAME: FOLDER}
Hidden = Annotated[bool, "keep the draft's states beside the recording: further heads then need no new one"]
SMALL_RATIOS = [0.05, 0.1, 0.2, 0.3, 0.5]
TABLE_COSTS = [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5]
OF_TREES = ["specinfer", "spectr", "importance", "mcsd", "mcsd_naive", "greedy_multi"]
COST_RANGE = [0.05, 5.0]
LOAD_DRAFT = {"_target_": "toolkit.models.pair.load_draft", "source": "${pair.draft}", "target": "${pair.target}",
              "device": "cpu", "dtype": "${pair.dtype}"}  # fmt: skip
READ_RESPONSES = {"_target_": "data_gen.texts.read_responses", "_partial_": True}
Hardware = Literal["h100", "h200", "a100", "l40s"]


class Paths(ConfigSection):
    root_dir: Annotated[str, "output goes to ROOT_DIR/<command>-<hash of what determines the content>"] = "outputs"
    output_dir: Annotated[str | None, "this very folder instead"] = None


class Command(ConfigSection):
    """What every command takes."""

    module: ClassVar[str]
    example: ClassVar[str]  # its overrides
    appended: ClassVar[tuple[str, ...]] = ()  # groups that +group=choice adds to the whole config

    paths: Annotated[Paths, "where output goes"] = Paths()
    overwrite: Annotated[bool, "replace what the output folder holds of another configuration"] = False


class OnPair(ConfigSection):
    pair: Annotated[Any, ConfigGroup("pair"), "target and draft: pair.target=PATH pair.draft=PATH for any checkpoints"]


class ReadsDraft(OnPair):
    draft: Annotated[Any, ConfigGroup(), "draft whose embeddings are read"] = LOAD_DRAFT


class OnPrompts(OnPair):
    prompts: Annotated[Any, ConfigGroup("prompts"), "the prompts; prompts.path=FILE.jsonl for your own"]
    sampling: Annotated[Any, ConfigGroup("sampling"), "how tokens are drawn and when a response ends"]


class Labels(OnPrompts):
    dataset: Annotated[str | None, "how tables call the prompt set; null: its name in the config, or the file's"] = None
    split: Annotated[str | None, "how tables call its part; null: prompts.split"] = None


class Intervals(ConfigSection):
    resamples: Resamples = 10000
    confidence: Annotated[float, Between(0, 1, "()"), "level of the intervals"] = 0.95
    seed: Annotated[Seed, "seed of everything random here"] = 0


class Shared(ConfigSection):
    rank: Annotated[int, AtLeast(0), "which part this process makes: every world_size-th of the same folder"] = 0
    world_size: Annotated[Count, "processes that share the work: -m rank=0,1 world_size=2 hydra/launcher=joblib"] = 1


class Tracked(ConfigSection):
    track: Annotated[bool, "log to Weights & Biases (offline unless there is an API key)"] = True


class Grid(ConfigSection):
    """Methods of conf/method/, each with lists of values for its keys: checked by `check.check`."""


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
MethodGrid = Annotated[Grid, ConfigGroup("grid", built=False), "methods, and lists of values for their keys"]


class Decode(Command, OnPrompts, Tracked):
    module, example = "toolkit.decode", "method=specdec_pp prompts=toy_math"
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
        "null: a model of its own; eagle3, dflash, dspark: one that reads the target's states",
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


class EndpointKeys(ConfigSection):
    model: Annotated[str | None, "what the endpoints call the target"] = None
    engine: Annotated[
        Literal["vllm", "sglang", "transformers", "openai"],
        "its names of the request's fields; transformers (its serve) and openai lack some: what would need those is refused",
    ] = "vllm"
    key_variable: Annotated[str | None, "environment variable with the endpoints' key; null: none is sent"] = None
    concurrency: Annotated[Count, "requests to each endpoint at once"] = 16
    requests_per_minute: Annotated[Positive, "most requests to each endpoint in a minute; null: any number"] | None = (
        None
    )
    seconds: Annotated[Positive, "most seconds of one try, the whole response included"] = 600
    attempts: Annotated[Count, "tries of one prompt in succession; a second such series follows later"] = 4
    backoff: Annotated[Amount, "seconds before the second try, then doubled each time; Retry-After wins"] = 1
    request: Annotated[
        Mapping[str, Any], "further keys of a request; null leaves out one of neutral value, or the seed"
    ] = {}


class Responses(Command, OnPrompts, Shared):
    module, example = "data_gen.responses", "prompts=toy_instruct prompts.split=train prompts.limit=2000"
    shard_size: Annotated[Count, "prompts per file; an interruption loses at most one file's work"] = 256
    max_prompt_tokens: Annotated[Count, "longer prompts are skipped and counted; null: none are"] | None = None
    batch_size: Annotated[Count, "prompts decoded together; the responses do not depend on it"] = 32
    endpoints: Annotated[list[str], "base addresses with /completions: http://localhost:8000/v1; []: decode here"] = []
    served: Annotated[EndpointKeys, "requests to endpoints"] = EndpointKeys()


class Mix(Command, OnPair, Shared):
    module, example = "data_gen.mix", "responses=outputs/responses-HASH"
    responses: Annotated[Inputs, "folders of data_gen.responses; their sampling is used"]
    mixing_ratio: Annotated[float, Between(0, 1, "()"), "r: share of positions that keep the target's token"] = 0.15
    validation: Annotated[
        Inputs | None, "responses to validate on; null: those to validation_fraction of the prompts"
    ] = None
    validation_fraction: Annotated[float, Between(0, 1, "()"), "share of the prompts to validate on"] = 0.1
    seed: Annotated[Seed, "seed of drafted tokens, acceptance draws and the split"] = 0
    batch_size: Annotated[Count, "does not change the data, float ties aside"] = 16


class Traces(Command, OnPair, Shared):
    module, example = "data_gen.traces", "responses=outputs/responses-HASH"
    responses: Annotated[
        str | Folders,
        File(),
        'folder of data_gen.responses, a list of them, or a .jsonl file of {"prompt_ids": [...], "token_ids": [...]} '
        '(with "text", the tokenizer is checked)',
    ]
    sampling: Annotated[
        Mapping[str, Any] | None, "sampling that a .jsonl file was drawn with: {temperature: 1.0, ...}"
    ] = None
    limit: Annotated[Count, "only the first so many texts"] | None = None
    heads: Annotated[
        Mapping[str, str] | None, Head(), "{NAME: FOLDER}: heads whose estimates are stored; null: the pair's, as `own`"
    ] = None
    hidden: Annotated[bool, "store the draft's states: any further head can then be replayed here"] = False
    upper_bound: Annotated[bool, "run the target along the roll-outs, too: the upper bound needs it"] = False
    max_drafted: Annotated[
        Count | Literal["auto"],
        "the most tokens a replayed policy may draft in a round; auto: as many as pay on the first texts, at most 20",
    ] = 20
    draft_temperature: Annotated[Amount, "the draft's own; null: the sampling's"] | None = None
    replicates: Annotated[Count, "recordings of the same texts with new acceptance draws"] = 1
    shard_size: Annotated[Count, "texts per file; an interruption loses at most one file's work"] = 64
    batch_size: Annotated[Count, "texts at a time; does not change the traces, float ties aside"] = 4
    dry_run: Annotated[bool, "record a few texts, print the size and the time of all, write nothing"] = False


class PerDomain(ConfigSection):
    instruct: Annotated[Amount, "short word tasks"]
    math: Annotated[Amount, "word problems"]
    code: Annotated[Amount, "documented functions of the standard library"]


class ToyModel(ConfigSection):
    hidden_size: Annotated[Count, "size of its states"]
    intermediate_size: Annotated[Count, "inner size of its MLPs"]
    num_layers: Annotated[Count, "number of layers; the draft has one, so that it cannot copy as the target does"]
    num_heads: Annotated[Count, "attention heads"]
    steps: Annotated[Count, "batches of the training"]
    warmup: Annotated[int, AtLeast(0), "steps until the full rate; a cosine follows"]
    learning_rate: Annotated[Positive, "Adam's, for embeddings and norms"] = 0.003
    matrix_learning_rate: Annotated[Positive, "Muon's, for the layers' matrices"] = 0.004


class ToyEvaluation(ConfigSection):
    prompts: Annotated[Count, "frozen test prompts per domain"] = 400
    max_new_tokens: Annotated[Count, "most tokens of a response"] = 256


class Toy(Command):
    module = "data_gen.toy"
    example = "target.steps=20 draft.steps=20 examples=200 evaluation.prompts=4 paths.output_dir=FOLDER"
    seed: Annotated[Seed32, "seed of data, weights and batches"] = 0
    threads: Annotated[Count, "threads of the CPU; 1 is faster where other programs compete for the cores"] = 2
    examples: Annotated[Count, "training examples per domain (code has only as many as the standard library)"] = 60000
    shares: Annotated[PerDomain, "share of all training tokens, by domain"] = PerDomain(
        instruct=0.42, math=0.4, code=0.18
    )
    vocab_size: Annotated[int, AtLeast(257), "tokens of the byte-level BPE"] = 1024
    tokenizer_examples: Annotated[
        PerDomain, "examples that the tokenizer learns from, so that most toy words are one token"
    ] = PerDomain(instruct=12000, math=4000, code=400)
    max_length: Annotated[Count, "most tokens of a document; longer ones are left out"] = 512
    max_positions: Annotated[Count, "max_position_embeddings of both models"] = 1024
    tokens_per_batch: Annotated[Count, "tokens of a batch, padding included; documents of like length share one"] = 768
    prompt_weight: Annotated[Amount, "weight of a prompt token in the loss; of a response token: 1"] = 0.1
    weight_decay: Annotated[Amount, "decay of the layers' matrices"] = 0.02
    clip_norm: Annotated[Positive, "largest norm of a step's gradient, per model"] = 1.0
    checkpoint_every: Annotated[Count, "steps between checkpoints"] = 1000
    log_every: Annotated[Count, "steps between updates of the progress bar"] = 100
    target: Annotated[ToyModel, "the large model"] = ToyModel(
        hidden_size=192, intermediate_size=544, num_layers=4, num_heads=6, steps=20000, warmup=400
    )
    draft: Annotated[ToyModel, "the small model"] = ToyModel(
        hidden_size=96, intermediate_size=192, num_layers=1, num_heads=3, steps=16000, warmup=200
    )
    evaluation: Annotated[ToyEvaluation, "what the card reports"] = ToyEvaluation()


class Sweep(Command, Labels, Tracked, Shared):
    module, example = "analysis.sweep", "prompts=toy_math prompts.split=dev"
    grid: Annotated[Grid, ConfigGroup("grid", built=False), "methods and values: grid.tail.policy.threshold=[.1,.2]"]
    source: Annotated[
        Literal["traces", "live"],
        "traces: decode plainly, record, and replay every chain method on the recording; live: decode every setting",
    ] = "traces"
    replayed: Annotated[Folders, File(), "with source=live: replayed sweeps of the same prompts to compare with"] = []
    max_drafted: Annotated[Count, "the most tokens of a round: of a recording, and where a method names no other"] = 20
    hidden: Hidden = True
    batch_size: Annotated[Count, "prompts decoded together; does not change the results"] = 32
    cost_ratio: Annotated[CostRatio, "c of the figures that are shown on the way; changes no result"] = 0.2
    artifacts: Annotated[bool, "upload the recorded traces to Weights & Biases, too"] = False


class UnderLoad(OnPrompts, Tracked):
    grid: MethodGrid
    hardware: Annotated[Hardware | None, "model the costs instead, from a device's peak figures"] = None
    devices: Annotated[Count, "with `hardware`: devices that the target is spread over"] = 1
    rounds: Annotated[int, AtLeast(5), "timed forward passes per batch size, width and context; medians count"] = 5
    max_drafted: Annotated[
        Count | Literal["auto"],
        "most tokens of a round; auto: as many as the first texts say pay, at most 20, and deeper settings are left out",
    ] = "auto"
    hidden: Hidden = True
    batch_size: Annotated[Count, "prompts decoded together for the responses; does not change them"] = 32


class Advise(Command, UnderLoad, Intervals):
    module, example = "analysis.advise", "pair.draft=[toy/draft] batch_sizes=[1,4,16]"
    resamples: Resamples = 2000
    batch_sizes: Annotated[list[Count], "numbers of requests that are decoded side by side"] = [1, 4, 16]
    heads: Annotated[list[str | None] | None, Head(), "a head, or null, for each draft; null: the pair's own"] = None
    costs: Annotated[Inputs | None, "a cost table (JSON or CSV), or one for each draft; null: measured here"] = None
    drops: Annotated[
        Literal["always", "half", "flattened"],
        "always: a batch is as large as the requests in it; half: free slots stay until they are half of it, as here; "
        "flattened: as always, and a target forward costs what its tokens cost side by side, as in engines",
    ] = "half"
    responses: Annotated[
        str | None,
        File(),
        "advise from an engine's counts: vLLM's answers or /metrics, or decode's generations.jsonl; no model is loaded",
    ] = None
    cost_ratio: Annotated[Positive, "c, draft forward / target forward, with `responses`"] = 0.2
    blocks: Annotated[bool, "with `responses`: the draft gives a block per forward pass (DFlash, DSpark)"] = False


class Serving(Command, UnderLoad):
    module, example = "analysis.serving", "hardware=h100 users=[1,4,16] slots=16"
    slots: Annotated[Count, "most requests decoded side by side"] = 16
    users: Annotated[list[Count], "loads: so many users, each waiting for its answer"] = [1, 4, 16, 32]
    rates: Annotated[list[Positive], "loads: so many requests per second, at random times"] = []
    requests: Annotated[
        Count, "most requests of a simulation; prompts are taken in turn, 16 per user and at least 64"
    ] = 256
    shapes: Annotated[
        list[str], "with `hardware`: shapes of target and draft, of llama-70b, llama-8b, llama-1b; []: the pair's own"
    ] = []
    costs: Annotated[Inputs | None, "a cost table (JSON or CSV); null: measured here"] = None
    drops: Annotated[
        Literal["always", "half", "flattened"],
        "always: a batch is as large as the requests in it; half: free slots stay until they are half of it; "
        "flattened: as always, and a target forward costs what its tokens cost side by side",
    ] = "always"


class Compare(Command, Labels, Intervals, Tracked):
    module, example = "analysis.compare", "prompts=toy_math pair=toy_padded"
    grid: MethodGrid
    group_size: Annotated[Count, "prompts decoded together; settings take turns on every group"] = 1
    dev_share: Annotated[
        float,
        Between(0, 1, "[)"),
        "share of the groups that settings are chosen on; results are of the others. 0: results are of all",
    ] = 0.0
    warmup: Annotated[int, AtLeast(0), "groups every setting decodes before anything is timed"] = 1
    idle_seconds: Annotated[float, AtLeast(0), "seconds over which idle power is measured beforehand; 0: it is not"] = 5
    metrics: Annotated[
        list[Annotated[str, Choice("quality", "quality metric")] | Mapping[str, Mapping[str, Any] | None]],
        "quality metrics, names of conf/quality/; {name: {option: value}} changes an option",
    ] = ["exact_match", "perplexity"]
    baseline: Annotated[str, "method and setting that speeds are divided by, as the table says them"] = "autoregressive"
    cost_ratio: Annotated[CostRatio, "c of tokens per target-forward time"] = 0.2


class Frontier(Command, Intervals, Tracked):
    module, example = "analysis.frontier", "dev=[SWEEP,...] test=[SWEEP,...] cost_ratio=.2"
    dev: Annotated[Inputs, "folders of analysis.sweep that settings are chosen on, any number"]
    test: Annotated[Inputs, "the same data sets, other prompts; null: half of dev's prompts"] | None = None
    apart: Annotated[list[str], "parameters, as settings call them, whose values are methods of their own: [head]"] = []
    cost_ratio: CostRatio = 0.2
    node_cost: Annotated[
        Amount, "a drafted token beyond one per draft forward (of trees, copies, block drafts), in target forwards"
    ] = 0.0
    draft_seconds: (
        Annotated[Seconds, "seconds of a draft forward; with target_seconds it replaces cost_ratio"] | None
    ) = None
    target_seconds: Annotated[Seconds, "seconds of a target forward"] | None = None
    cost_range: Annotated[
        list[Positive], "lowest and highest c of the figure; settings are chosen again at every c"
    ] = COST_RANGE
    table_costs: Annotated[list[Positive], "values of c in standing.md; settings are chosen again at each"] = (
        TABLE_COSTS
    )
    baseline: Annotated[str, "method that the others are compared with"] = "speculative"


class Timing(Command, ReadsDraft, OnPrompts, Tracked):
    module, example = "analysis.timing", "prompts=toy_math prompts.limit=40"
    num_drafted: Annotated[list[Count], "fixed K whose rounds the seconds are regressed on"] = [1, 2, 4, 8]
    head: Annotated[
        str | None,
        Head(),
        "head of SpecDec++'s row; null: the pair's own; with `traces`: the head whose price is solved",
    ] = None
    warm_up: Annotated[int, AtLeast(0), "first prompts that are decoded and not counted"] = 2
    batch_sizes: Annotated[list[Count], "also time forwards at these; writes costs.json; []: do not"] = []
    rounds: Annotated[int, AtLeast(5), "timed forward passes per batch size, width and context; medians count"] = 5
    traces: Annotated[
        str | None,
        File(),
        "solve the rate rule's price on these traces (hidden=true, or with the head); nothing is timed",
    ] = None
    cost_ratios: Annotated[list[Positive], "with `traces`: values of c that the price is solved at"] = SMALL_RATIOS
    min_drafted: Annotated[Count, "with `traces`: shortest round"] = 1


class Acceptance(Command, Labels, Intervals, Tracked):
    module, example = "analysis.acceptance", "prompts=toy_math prompts.limit=64"
    methods: Annotated[
        list[Annotated[str, Choice("method", "method")]],
        "rules that are compared: methods of conf/method/ with trees of one draft",
    ] = OF_TREES
    overrides: Annotated[list[str], "keys of every method: rule.num_free=8, proposer.scheme=independent, ..."] = []
    num_drafts: Annotated[list[Count], "K, candidates per node"] = [1, 2, 3, 4, 5, 6, 7, 8]
    draft_temperature: Annotated[Amount, "temperature of q; null: as the target's"] | None = None
    target_probs: Annotated[
        list[AProbability] | None,
        "p, of rules for given distributions: all V^K tuples of candidates are enumerated, and no model is used",
    ] = None
    draft_probs: Annotated[
        list[list[AProbability]] | None, "with `target_probs`: one q per draft, over the same tokens"
    ] = None
    responses: Annotated[
        str | None, File(), "folder of data_gen.responses whose texts are read, in the place of fresh ones"
    ] = None
    read: Annotated[Any, ConfigGroup(), "function that reads it"] = READ_RESPONSES
    positions: Annotated[Count, "positions of a text, drawn at random; null: all"] | None = 8
    draws: Annotated[Count, "times that candidates are drawn at each position"] = 8
    optimum: Annotated[bool, "the best any rule could do, too; the most expensive part"] = True
    alphabet: Annotated[bool, "count, too, how many tokens have a probability at each position"] = False
    join: Annotated[Folders, File(), "finished folders of this command whose lines are shown, too"] = []
    sweeps: Annotated[Folders, File(), "folders of analysis.sweep grid=trees: block efficiency per tree shape"] = []
    cost_ratio: Annotated[Amount, "a draft forward in units of a target forward; there is one per level"] = 0.2
    node_cost: Annotated[Amount, "verifying one more node, in the same units"] = 0.01
    target_seconds: (
        Annotated[Seconds, "seconds of a target forward; all three seconds replace cost_ratio and node_cost"] | None
    ) = None
    draft_seconds: Annotated[Amount, "seconds of a draft forward"] | None = None
    node_seconds: Annotated[Amount, "seconds of one more node"] | None = None
    max_nodes: Annotated[Count, "most nodes of the trees that are compared"] = 64
    max_levels: Annotated[Count, "most levels of the trees that are compared"] = 8
    batch_size: Annotated[Count, "positions at a time; does not change the results"] = 8


class Heads(Command, ReadsDraft, Intervals, Tracked):
    module, example = "analysis.heads", "traces=outputs/traces-HASH heads=[outputs/train-HASH,...]"
    traces: Annotated[
        str | None, File(), "folder of data_gen.traces: hidden=true for any heads, or recorded with these very heads"
    ] = None
    heads: Annotated[Folders | None, Head(), "heads, or output folders of toolkit.train"] = None
    dev: Annotated[
        str | None,
        File(),
        "other traces to choose thresholds on; null: some of `traces`. With `drafts`: other responses, for K",
    ] = None
    dev_share: Annotated[
        float, Between(0, 1, "()"), "share of the texts that thresholds are chosen on; every number is of the others"
    ] = 0.33
    thresholds: Annotated[list[AProbability], "values of h, the threshold of the survival rule"] = [
        n / 20 for n in range(1, 20)
    ]
    min_drafted: Annotated[Count, "shortest round of acceptance heads; published: 2. Of pre-read heads it is 1"] = 2
    corrected: Annotated[bool, "undo the class weights' shift before the threshold; published: false"] = False
    cost_ratio: CostRatio = 0.2
    drafts: Annotated[Mapping[str, str] | None, Model(), "compare drafts instead of heads: {NAME: FOLDER}"] = None
    responses: Annotated[
        Mapping[str, str] | None,
        File(),
        "with `drafts`: {DOMAIN: FOLDER} of data_gen.responses that they are compared on",
    ] = None
    vocabularies: Annotated[
        list[Count | None],
        "V': every draft is reduced to so many output tokens, the most frequent of `frequencies`; null: all that it has",
    ] = [None]
    frequencies: Annotated[
        list[str], File(), "with `vocabularies`: folders of data_gen.responses to prompts that drafts were trained on"
    ] = []
    measured: Annotated[bool, "time forward passes here, instead of cost_ratio; the best draft goes to best/"] = False
    copies: Annotated[
        Inputs | None, "fit the acceptance of copied tokens instead, to these responses; dev_share of them is held out"
    ] = None
    statistics: Annotated[
        Inputs | None,
        "fit acceptance from statistics of q instead, to these traces; dev_share of their texts is held out",
    ] = None
    calibration: Annotated[
        Inputs | None, "scale and shift these statistics, or `heads`, by depth, as these traces say"
    ] = None
    counts: Annotated[
        str | None, File(), "with `statistics`: what an engine counted of its drafts; shifts by depth follow from it"
    ] = None
    tuning: Annotated[
        Named | None,
        "with `statistics`: {DOMAIN: TRACES}, rows are compared, their settings chosen here",
    ] = None
    tests: Annotated[Named | None, "with `tuning`: {DOMAIN: TRACES}, every number is of these"] = None
    form: Annotated[
        Literal["best", "log_odds", "ratio", "numbers", "products"],
        "with `statistics`: what is read; products of numbers carry over worse to other texts; best: whichever predicts better",
    ] = "best"
    earlier: Annotated[str | None, File(), "with `copies`: other responses that are copied from, too"] = None
    limit: Annotated[Count, "only the first so many texts of each"] | None = None
    depth: Annotated[Count, "K of the rounds whose mean accepted length is reported of a draft"] = 8
    max_drafted: Annotated[
        Count, "largest fixed K that is replayed with a draft; the longest copy; depths with weights of their own"
    ] = 12
    replicates: Annotated[Count, "acceptance draws per text: more cut the variance of a draft's figures"] = 1
    batch_size: Annotated[Count, "texts at a time; does not change the results, float ties aside"] = 16


class Report(Command):
    module, example = "analysis.report", "inputs=[FOLDER,...]"
    inputs: Annotated[Inputs, "output folders of any commands: frontier, train, sweep, ..."]
    title: Annotated[str, "title of the page"] = "Report"
    max_cells: Annotated[Count, "larger tables, such as the rows of a sweep, are named and not shown"] = 40000
    publish: Annotated[bool, "make a W&B report of it, too, once toolkit.sync has uploaded its runs"] = False
    entity: Annotated[str | None, "who the runs belong to; null: the API key's"] = None
    project: Annotated[str | None, "where the runs are; null: WANDB_PROJECT, or acceptance-toolkit"] = None
    draft: Annotated[bool, "visible to its author only until published there"] = True
    dry_run: Annotated[bool, "with publish=true: build the W&B report and write its specification, send nothing"] = (
        False
    )


class Paper(Command, Tracked):
    module, example = "analysis.paper", "table=specdecpp_table1 'runs={alpaca: FOLDER}'"
    table: Annotated[Mapping[str, Any], ConfigGroup("table", built=False), "rows, columns, numbers, what was published"]
    runs: Annotated[Named | None, "{NAME: FOLDER}: what the table's cells name"] = None
    models: Annotated[str, "the pair that ran, as the page calls it"] = "the toy pair"


class Sync(Command):
    module, example = "toolkit.sync", "folder=outputs"
    folder: Annotated[str, "every offline run below it is uploaded"] = "outputs"
    project: Annotated[str | None, "another project than the runs name"] = None
    entity: Annotated[str | None, "who they will belong to; null: the API key's"] = None
    dry_run: Annotated[bool, "say what would be uploaded"] = False


COMMANDS: dict[str, type[ConfigSection]] = {
    **{kind.module.rpartition(".")[2]: kind for kind in Command.__subclasses__()},
    "quickstart_sweep": Sweep,
    "method_only": MethodOnly,
}


def command_of(config_name: str) -> type[ConfigSection] | None:
    return COMMANDS.get(config_name)


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

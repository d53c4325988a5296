"""The keys of every command: type, range and meaning. Defaults are in `conf/<command>.yaml`, and nowhere else.

`Group` marks what a config group fills in; its keys are those of the class it names (`sources`), or of the type here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import toolkit.config.sources as sources
from toolkit.config.ranges import Above, AtLeast, Between, Probability
from toolkit.config.values import Choice, annotations_of, notes


@dataclass(frozen=True)
class Group:
    """A note beside a key: chosen in `conf/<name>/`. `built`: a class with its arguments."""

    name: str
    built: bool = True


class Section:
    """Keys that belong together. A class of keys: only its annotations matter."""


Seed = Annotated[int, AtLeast(0)]
CostRatio = Annotated[float, Above(0), "c, draft forward / target forward"]
Seconds = Annotated[float, Above(0)]
Folders = list[str]
Hidden = Annotated[bool, "keep the draft's states beside the recording: further heads then need no new one"]
Hardware = Literal["h100", "h200", "a100", "l40s", "cpu"]
Draft = Annotated[Any, Group("draft"), "the pair's draft alone, read for the embeddings that pre-read heads need"]


class Paths(Section):
    root_dir: Annotated[str, "output goes to ROOT_DIR/<command>-<hash of what determines the content>"]
    output_dir: Annotated[str | None, "this very folder instead"]


class Command(Section):
    """What every command takes."""

    module: ClassVar[str]
    example: ClassVar[str]  # its overrides
    appended: ClassVar[tuple[str, ...]] = ()  # groups that +group=choice adds to the whole config

    paths: Annotated[Paths, "where output goes"]
    overwrite: Annotated[bool, "start afresh an output folder that holds work of another configuration"]


class OnPair(Section):
    pair: Annotated[Any, Group("pair"), "target and draft model: pair.target=PATH pair.draft=PATH for any checkpoints"]


class OnPrompts(OnPair):
    prompts: Annotated[Any, Group("prompts"), "what is asked: prompts.path=FILE.jsonl for any prompts"]
    sampling: Annotated[Any, Group("sampling"), "how tokens are drawn and when a response ends"]


class Labels(Section):
    dataset: Annotated[str | None, "how tables call the prompt set; null: its name in the config, or the file's"]
    split: Annotated[str | None, "how tables call its part; null: prompts.split"]


class Intervals(Section):
    resamples: Annotated[int, AtLeast(1), "bootstrap samples"]
    confidence: Annotated[float, Between(0, 1, "()"), "of the intervals"]
    seed: Annotated[Seed, "of everything random here"]


class Shared(Section):
    rank: Annotated[int, AtLeast(0), "which part this process makes: every world_size-th of the same folder"]
    world_size: Annotated[
        int, AtLeast(1), "processes that share the work: -m rank=0,1 world_size=2 hydra/launcher=joblib"
    ]


class Tracked(Section):
    track: Annotated[bool, "log to Weights & Biases (offline unless there is an API key)"]


class Grid(Section):
    """Methods of conf/method/, each with lists of values for its keys: checked by `methods.check_grid`."""


class StageSpec(Section):
    run: Annotated[str, "module.function of the stage"]
    config: Annotated[str, "its root config"]
    overrides: Annotated[list[str], 'of that config; "{name}" is the folder of an earlier stage'] = []  # noqa: RUF012
    for_each: Annotated[
        Mapping[str, list[str] | Mapping[str, list[str]]],
        'one stage per combination of these names; "{name}" stands for each. A mapping adds overrides to each name',
    ] = {}
    inherit: Annotated[list[str], "nodes of the experiment that replace the stage's own, whole: [pair]"] = []  # noqa: RUF012


class Decode(Command, OnPrompts):
    module, example = "toolkit.decode", "method=specdec_pp prompts=toy_math"
    method: Annotated[Any, Group("method"), "proposer, policy and rule"]
    head: Annotated[str | None, "folder of an acceptance head; null: the one that ships with the pair"]
    batch_size: Annotated[int, AtLeast(1), "prompts decoded together; the tokens do not depend on it"]


class MethodOnly(Section):
    """What the library composes for a method by name: no command."""

    method: Annotated[Any, Group("method"), "proposer, policy and rule"]
    head: Annotated[str | None, "folder of an acceptance head; null: the one that ships with the pair"]
    policy: Annotated[Any, Group("stopping"), "a policy by itself: +stopping@policy=NAME"] | None = None


class Train(Command, OnPair):
    module, example = "toolkit.train", "+experiment=toy_head head.depth=3 loss.w_rej=6"
    appended = ("experiment", "hparams_search", "debug")
    data: Annotated[Any, Group("data"), "what the head learns from, and the draft whose states are read"] = None
    head: Annotated[Any, Group("model"), "the head's shape"] | None
    loss: Annotated[Any, Group("model"), "what is minimised"] | None
    optimizer: Annotated[Any, Group("model"), "how"] | None
    scheduler: Annotated[Any, Group("model"), "the learning rate over training; null: constant"] | None
    model: (
        Annotated[Any, Group("model"), "all of these as a Lightning module; null: nothing is trained, only stages run"]
        | None
    )
    trainer: Annotated[Any, Group("trainer"), "arguments of pytorch_lightning.Trainer"]
    callbacks: Annotated[
        Mapping[str, Any] | None, Group("callbacks", built=False), "checkpoints and what else happens on the way"
    ]
    logger: Annotated[Mapping[str, Any] | None, Group("logger", built=False), "where curves go"]
    seed: Annotated[Seed, "of the weights and of the order of the data"]
    tags: Annotated[list[str], "of the Weights & Biases run"]
    optimized_metric: Annotated[str, "score that best.ckpt and a sweeper look at"]
    ckpt_path: Annotated[
        str | None, "resume from this checkpoint; null or last: from the run folder's own, if there is one"
    ]
    from_pretrained: Annotated[str | None, "start from the head in this folder"]
    before: Annotated[
        Mapping[str, StageSpec] | None, Group("before", built=False), "stages that run first; what they wrote is kept"
    ]
    after: Annotated[Mapping[str, StageSpec] | None, 'stages that run last; "{train}" is the run\'s folder']
    prompts: Annotated[
        Any, Group("prompts"), "of an experiment that makes its data from prompts: prompts.path=FILE.jsonl"
    ] = None
    sampling: Annotated[Any, Group("sampling"), "of such an experiment's responses, recordings and sweeps"] = None
    toy: Annotated[
        Mapping[str, Any] | None,
        "of an experiment of a paper: what stands in for its data and sizes while the pair is the toy pair",
    ] = None
    dry_run: Annotated[bool, "compose and check every stage, print the plan, load and run nothing"]


class Distill(Command, OnPair):
    module, example = "toolkit.distill", "responses=[FOLDER,...] loss=lk"
    appended = ("experiment",)
    responses: Annotated[str | Folders, "folder of data_gen.responses, or a list of them: the target's own texts"]
    read: Annotated[Any, Group("read"), "what reads them"]
    data: Annotated[Any, Group("data"), "how they become batches"]
    loss: Annotated[Any, Group("loss"), "what is minimised"]
    teacher: Annotated[Any, Group("teacher"), "where the target's probabilities come from"]
    from_pretrained: Annotated[
        str | None, "the draft to begin with: a folder, a hub name, toy/draft; null: fresh weights"
    ]
    shape: (
        Annotated[
            Mapping[str, Any], "of fresh weights: keys of the draft's configuration that differ from the pair's draft's"
        ]
        | None
    )
    temperature: Annotated[float, Above(0), "of p and q in the loss; null: the responses' own, or 1"] | None
    lmbda: Annotated[float, Probability, "chance that a batch's texts are drawn from the draft itself"]
    optimizer: Annotated[Any, Group("model"), "how"]
    scheduler: Annotated[Any, Group("model"), "the learning rate over training; null: constant"] | None
    trainer: Annotated[Any, Group("trainer"), "arguments of pytorch_lightning.Trainer"]
    callbacks: Annotated[
        Mapping[str, Any] | None, Group("callbacks", built=False), "checkpoints and what else happens on the way"
    ]
    logger: Annotated[Mapping[str, Any] | None, Group("logger", built=False), "where curves go"]
    seed: Annotated[Seed, "of fresh weights, of the order of the texts, of the draft's own texts"]
    tags: Annotated[list[str], "of the Weights & Biases run"]
    optimized_metric: Annotated[str, "score that best.ckpt and a sweeper look at: val/alpha, or val/loss with mode=min"]
    ckpt_path: Annotated[
        str | None, "resume from this checkpoint; null or last: from the run folder's own, if there is one"
    ]
    before: Annotated[
        Mapping[str, StageSpec] | None, Group("before", built=False), "stages that run first; what they wrote is kept"
    ]
    after: Annotated[Mapping[str, StageSpec] | None, 'stages that run last; "{distill}" is the run\'s folder']


class TrainHeads(Command, OnPair):
    module, example = "toolkit.train_heads", "data.path=FOLDER depths=[0,3] w_rejs=[1,6]"
    data: Annotated[Any, Group("data"), "what the heads learn from, and the draft whose states are read"]
    head: Annotated[Any, Group("model"), "the heads' shape, their depth apart"]
    loss: Annotated[Any, Group("model"), "what is minimised, w_rej apart"]
    optimizer: Annotated[Any, Group("model"), "how; every head has its own"]
    scheduler: Annotated[Any, Group("model"), "the learning rate over training; null: constant"] | None
    model: Annotated[Any, Group("model"), "all of these as a Lightning module"]
    depths: Annotated[list[Annotated[int, AtLeast(0)]], "D, residual blocks"]
    w_rejs: Annotated[list[Annotated[float, Above(0)]], "weights of a rejection"]
    max_epochs: Annotated[int, AtLeast(1), "passes over the training data, at most"]
    patience: Annotated[int, AtLeast(1), "validations of a head without a better score before it stops"]
    seed: Annotated[Seed, "of every head's weights and of the order of the data"]
    optimized_metric: Annotated[str, "validation score whose smallest value says which state is kept"]


class Served(Section):
    model: Annotated[str | None, "what the endpoints call the target"]
    engine: Annotated[
        Literal["vllm", "sglang", "transformers", "openai"],
        "its names of the request's fields; transformers (its serve) and openai lack some: what would need those is refused",
    ]
    key_variable: Annotated[str | None, "environment variable with the endpoints' key; null: none is sent"]
    concurrency: Annotated[int, AtLeast(1), "requests to each endpoint at once"]
    requests_per_minute: Annotated[float, Above(0), "to each endpoint, at most; null: any number"] | None
    seconds: Annotated[float, Above(0), "one try may take, the whole response included"]
    attempts: Annotated[int, AtLeast(1), "tries of one prompt in succession; a second such series follows later"]
    backoff: Annotated[
        float, AtLeast(0), "seconds before the second try, then twice as long each time; Retry-After wins"
    ]
    request: Annotated[
        Mapping[str, Any],
        "further keys of a request, part of the folder's hash; null leaves out a key of neutral value",
    ]


class Responses(Command, OnPrompts, Shared):
    module, example = "data_gen.responses", "prompts=toy_instruct prompts.split=train prompts.limit=2000"
    shard_size: Annotated[int, AtLeast(1), "prompts per file; an interruption loses at most one file's work"]
    max_prompt_tokens: Annotated[int, AtLeast(1), "longer prompts are skipped and counted; null: none are"] | None
    batch_size: Annotated[int, AtLeast(1), "prompts decoded together; the responses do not depend on it"]
    endpoints: Annotated[list[str], "base addresses with /completions, as http://localhost:8000/v1; []: decode here"]
    served: Annotated[Served, "how endpoints are asked"]


class Mix(Command, OnPair, Shared):
    module, example = "data_gen.mix", "responses=outputs/responses-HASH"
    responses: Annotated[str | Folders, "folder of data_gen.responses, or a list of them; their sampling is used"]
    mixing_ratio: Annotated[float, Probability, "r: share of positions that keep the target's token"]
    validation_fraction: Annotated[float, Between(0, 1, "()"), "of the prompts"]
    seed: Annotated[Seed, "of drafted tokens, acceptance draws and the split"]
    batch_size: Annotated[int, AtLeast(1), "does not change the data, float ties aside"]


class Traces(Command, OnPair, Shared):
    module, example = "data_gen.traces", "responses=outputs/responses-HASH"
    responses: Annotated[
        str | Folders,
        'folder of data_gen.responses, a list of them, or a .jsonl file of {"prompt_ids": [...], "token_ids": [...]} '
        '(with "text", the tokenizer is checked)',
    ]
    sampling: Annotated[
        Mapping[str, Any] | None, "of a .jsonl file: {temperature: 1.0, ...}; folders say it themselves"
    ]
    limit: Annotated[int, AtLeast(1), "only the first so many texts"] | None
    heads: Annotated[
        Mapping[str, str] | None,
        "{NAME: FOLDER}: acceptance heads whose estimates are stored; null: the pair's own, if it ships one, as `own`",
    ]
    hidden: Annotated[
        bool,
        "store the draft's states, D numbers per step: any further head can then be replayed on this recording",
    ]
    upper_bound: Annotated[
        bool, "run the target along the roll-outs, too: the upper bound needs the exact chance of every drafted token"
    ]
    max_drafted: Annotated[int, AtLeast(1), "the most tokens a replayed policy may draft in a round"]
    draft_temperature: Annotated[float, AtLeast(0), "the draft's own; null: the sampling's"] | None
    replicates: Annotated[int, AtLeast(1), "recordings of the same texts with new acceptance draws"]
    shard_size: Annotated[int, AtLeast(1), "texts per file; an interruption loses at most one file's work"]
    batch_size: Annotated[int, AtLeast(1), "texts at a time; does not change the traces, float ties aside"]
    dry_run: Annotated[bool, "record a few texts, print the size and the time of all, write nothing"]


class PerDomain(Section):
    instruct: Annotated[float, AtLeast(0), "short word tasks"]
    math: Annotated[float, AtLeast(0), "word problems"]
    code: Annotated[float, AtLeast(0), "documented functions of the standard library"]


class ToyModel(Section):
    hidden_size: Annotated[int, AtLeast(1), "of its states"]
    intermediate_size: Annotated[int, AtLeast(1), "of its MLPs"]
    num_layers: Annotated[int, AtLeast(1), "the draft has one, so that it cannot copy as the target does"]
    num_heads: Annotated[int, AtLeast(1), "of its attention"]
    steps: Annotated[int, AtLeast(1), "batches"]
    warmup: Annotated[int, AtLeast(0), "steps until the full rate; a cosine follows"]
    learning_rate: Annotated[float, Above(0), "Adam's, for embeddings and norms"]
    matrix_learning_rate: Annotated[float, Above(0), "Muon's, for the layers' matrices"]


class ToyEvaluation(Section):
    prompts: Annotated[int, AtLeast(1), "frozen test prompts per domain"]
    max_new_tokens: Annotated[int, AtLeast(1), "of a response"]


class Toy(Command):
    module = "data_gen.toy"
    example = "target.steps=20 draft.steps=20 examples=200 evaluation.prompts=4 paths.output_dir=FOLDER"
    seed: Annotated[Seed, "of data, weights and batches"]
    threads: Annotated[int, AtLeast(1), "of the CPU; 1 is faster where other programs compete for the cores"]
    examples: Annotated[int, AtLeast(1), "training examples per domain (code has only as many as the standard library)"]
    shares: Annotated[PerDomain, "part of all training tokens per domain"]
    vocab_size: Annotated[int, AtLeast(257), "of the byte-level BPE"]
    tokenizer_examples: Annotated[PerDomain, "what it learns from, so that most toy words are one token"]
    max_length: Annotated[int, AtLeast(1), "tokens; longer documents are left out"]
    max_positions: Annotated[int, AtLeast(1), "max_position_embeddings of both models"]
    tokens_per_batch: Annotated[int, AtLeast(1), "padding included; documents of like length share a batch"]
    prompt_weight: Annotated[float, AtLeast(0), "weight of a prompt token in the loss; a response token has weight 1"]
    weight_decay: Annotated[float, AtLeast(0), "of the layers' matrices"]
    clip_norm: Annotated[float, Above(0), "largest norm of a step's gradient, per model"]
    checkpoint_every: Annotated[int, AtLeast(1), "steps"]
    log_every: Annotated[int, AtLeast(1), "steps between updates of the progress bar"]
    target: Annotated[ToyModel, "the large model"]
    draft: Annotated[ToyModel, "the small one"]
    evaluation: Annotated[ToyEvaluation, "what the card reports"]


class Sweep(Command, OnPrompts, Labels, Tracked, Shared):
    module, example = "analysis.sweep", "prompts=toy_math prompts.split=dev"
    grid: Annotated[
        Grid,
        Group("grid", built=False),
        "methods, and lists of values for their keys: grid.tail.policy.threshold=[.1,.2]",
    ]
    source: Annotated[
        Literal["traces", "live"],
        "traces: decode plainly, record, and replay every chain method on the recording; live: decode every setting",
    ]
    max_drafted: Annotated[
        int, AtLeast(1), "the most tokens of a round: of a recording, and of methods that name no other bound"
    ]
    hidden: Hidden
    batch_size: Annotated[int, AtLeast(1), "prompts decoded together; does not change the results"]
    cost_ratio: Annotated[CostRatio, "for the figures that are shown on the way only"]
    artifacts: Annotated[bool, "upload the recorded traces to Weights & Biases, too"]


class Advise(Command, OnPrompts, Intervals, Tracked):
    module, example = "analysis.advise", "pair.draft=[toy/draft] batch_sizes=[1,4,16]"
    grid: Annotated[Grid, Group("grid", built=False), "methods, and lists of values for their keys"]
    batch_sizes: Annotated[list[Annotated[int, AtLeast(1)]], "requests decoded side by side"]
    heads: Annotated[list[str | None] | None, "an acceptance head, or null, for each draft; null: the pair's own"]
    train_heads: Annotated[
        bool,
        "train and calibrate heads for every draft, on two further parts of the prompts (at least 32 prompts)",
    ]
    costs: Annotated[str | Folders | None, "a cost table (JSON or CSV), or one for each draft; null: measured here"]
    hardware: Annotated[
        Hardware | None, "model the costs instead: h100, h200, a100, l40s or cpu, from its peak figures"
    ]
    devices: Annotated[int, AtLeast(1), "of hardware=...: how many the target is spread over"]
    rounds: Annotated[int, AtLeast(8), "timed rounds per batch size, draft length and repeat, where costs are measured"]
    drops: Annotated[
        Literal["always", "half"],
        "always: a batch is as large as the requests in it; half: free slots stay until they are half of it, as here",
    ]
    max_drafted: Annotated[int, AtLeast(1), "most tokens of a round"]
    hidden: Hidden
    batch_size: Annotated[int, AtLeast(1), "prompts decoded together for the responses; does not change them"]


class Serving(Command, OnPrompts, Tracked):
    module, example = "analysis.serving", "hardware=h100 users=[1,4,16] slots=16"
    grid: Annotated[Grid, Group("grid", built=False), "methods, and lists of values for their keys"]
    slots: Annotated[int, AtLeast(1), "most requests decoded side by side"]
    users: Annotated[list[Annotated[int, AtLeast(1)]], "loads: so many users, each waiting for its answer"]
    rates: Annotated[list[Annotated[float, Above(0)]], "loads: so many requests per second, at random times"]
    requests: Annotated[
        int, AtLeast(1), "of a simulation, at most; prompts are taken in turn, 16 per user and at least 64"
    ]
    shapes: Annotated[
        list[str], "of hardware=...: target and draft, of llama-70b, llama-8b, llama-1b; []: the pair's own"
    ]
    costs: Annotated[str | Folders | None, "a cost table (JSON or CSV); null: measured here"]
    hardware: Annotated[
        Hardware | None, "model the costs instead: h100, h200, a100, l40s or cpu, from its peak figures"
    ]
    devices: Annotated[int, AtLeast(1), "of hardware=...: how many the target is spread over"]
    rounds: Annotated[int, AtLeast(8), "timed rounds per batch size, draft length and repeat, where costs are measured"]
    drops: Annotated[Literal["always", "half"], "as in analysis.advise"]
    max_drafted: Annotated[int, AtLeast(1), "most tokens of a round"]
    hidden: Hidden
    batch_size: Annotated[int, AtLeast(1), "prompts decoded together for the responses; does not change them"]


class Compare(Command, OnPrompts, Labels, Intervals, Tracked):
    module, example = "analysis.compare", "prompts=toy_math pair=toy_padded"
    grid: Annotated[Grid, Group("grid", built=False), "methods, and lists of values for their keys"]
    group_size: Annotated[int, AtLeast(1), "prompts decoded together; settings take turns on every group"]
    dev_share: Annotated[
        float,
        Between(0, 1, "[)"),
        "of the groups: settings are chosen on these, results are of the others; 0: results are of all",
    ]
    warmup: Annotated[int, AtLeast(0), "groups every setting decodes before anything is timed"]
    idle_seconds: Annotated[
        float,
        AtLeast(0),
        "over which idle power is measured beforehand, to be shown beside the others; 0: it is not measured",
    ]
    metrics: Annotated[
        list[Annotated[str, Choice("quality", "quality metric")] | Mapping[str, Mapping[str, Any] | None]],
        "of conf/quality/; {name: {option: value}} changes an option",
    ]
    baseline: Annotated[str, "the setting that speeds are divided by: its method and setting as the table says them"]
    cost_ratio: Annotated[CostRatio, "for tokens per target time"]


class Frontier(Command, Intervals, Tracked):
    module, example = "analysis.frontier", "dev=[SWEEP,...] test=[SWEEP,...] cost_ratio=.2"
    dev: Annotated[
        str | Folders, "output folders of analysis.sweep that settings are chosen on, any number of data sets"
    ]
    test: (
        Annotated[str | Folders, "the same data sets, other prompts: what is reported; null: half of dev's prompts"]
        | None
    )
    apart: Annotated[list[str], "parameters, as settings call them, whose values are methods of their own: [head]"]
    cost_ratio: CostRatio
    node_cost: Annotated[
        float, AtLeast(0), "a drafted node beyond one per draft forward (trees, forests), in target forwards"
    ]
    draft_seconds: (
        Annotated[Seconds, "of one draft forward, both or none: then c is their ratio, and times are reported too"]
        | None
    )
    target_seconds: Annotated[Seconds, "of one target forward"] | None
    cost_range: Annotated[
        list[Annotated[float, Above(0)]], "of the figure over cost ratios; settings are chosen anew at every ratio"
    ]
    table_costs: Annotated[list[Annotated[float, Above(0)]], "of the table over cost ratios, likewise"]
    baseline: Annotated[str, "method that the others are compared with"]


class Standing(Command, Intervals, Tracked):
    module, example = "analysis.standing", "dev=[SWEEP,...] cost_ratios=[.1,.2,.3]"
    dev: Annotated[str | Folders, "output folders of analysis.sweep grid=policies that settings are chosen on"]
    test: (
        Annotated[str | Folders, "the same data sets, other prompts: what is reported; null: half of dev's prompts"]
        | None
    )
    apart: Annotated[list[str], "parameters, as settings call them, whose values are methods of their own: [head]"]
    cost_ratios: Annotated[
        list[Annotated[float, Above(0)]], "c, a draft forward over a target forward: a table for each"
    ]
    baseline: Annotated[str, "method that the others are compared with"]


class Agreement(Command, Intervals):
    module, example = "analysis.agreement", "replayed=[SWEEP,...] live=[SWEEP,...]"
    replayed: Annotated[str | Folders, "output folders of analysis.sweep"]
    live: Annotated[str | Folders, "output folders of analysis.sweep source=live"]
    cost_ratio: CostRatio


class Timing(Command, OnPrompts, Tracked):
    module, example = "analysis.timing", "prompts=toy_math prompts.limit=40"
    num_drafted: Annotated[list[Annotated[int, AtLeast(1)]], "fixed K whose rounds the seconds are regressed on"]
    head: Annotated[
        str | None, "acceptance head for the row of SpecDec++; null: the pair's own, or no such row if it has none"
    ]
    warm_up: Annotated[int, AtLeast(0), "first prompts that are decoded and not counted"]
    batch_sizes: Annotated[
        list[Annotated[int, AtLeast(1)]], "also time forwards at these; writes costs.json; []: do not"
    ]
    rounds: Annotated[int, AtLeast(8), "timed rounds per batch size, draft length and repeat"]


class Acceptance(Command, OnPrompts, Labels, Intervals, Tracked):
    module, example = "analysis.acceptance", "prompts=toy_math prompts.limit=64"
    methods: Annotated[list[Annotated[str, Choice("method", "method")]], "of conf/method/, with trees of one draft"]
    overrides: Annotated[list[str], "of every one of them: rule.num_free=8, proposer.scheme=independent, ..."]
    num_drafts: Annotated[list[Annotated[int, AtLeast(1)]], "K, candidates per node"]
    draft_temperature: Annotated[float, AtLeast(0), "of q; null: as the target's"] | None
    responses: Annotated[str | None, "a folder that `read` can read (of data_gen.responses): its texts, not fresh ones"]
    read: Annotated[Any, Group("read"), "what reads it"]
    positions: Annotated[int, AtLeast(1), "per text, drawn at random; null: all"] | None
    draws: Annotated[int, AtLeast(1), "of the candidates at each position"]
    optimum: Annotated[
        bool, "the best any rule could do, too; of many candidates without replacement it costs the most"
    ]
    alphabet: Annotated[bool, "count, too, how many tokens have a chance at each position"]
    join: Annotated[
        Folders, "finished folders of this command, other prompt sets: their lines are shown beside this run's"
    ]
    sweeps: Annotated[Folders, "folders of analysis.sweep with grid=trees: block efficiency per tree shape"]
    cost_ratio: Annotated[
        float, AtLeast(0), "a draft forward in units of a target forward, for the advice; there is one per level"
    ]
    node_cost: Annotated[float, AtLeast(0), "verifying one more node, in the same units"]
    target_seconds: Annotated[Seconds, "of a target forward: all three seconds instead of the two units"] | None
    draft_seconds: Annotated[float, AtLeast(0), "of a draft forward"] | None
    node_seconds: Annotated[float, AtLeast(0), "of one more node"] | None
    max_nodes: Annotated[int, AtLeast(1), "of the trees that are weighed"]
    max_levels: Annotated[int, AtLeast(1), "of the trees that are weighed"]
    batch_size: Annotated[int, AtLeast(1), "does not change the results"]


class Exact(Command, Tracked):
    module, example = "analysis.exact", "'target_probs=[.5,.25,.25]' 'draft_probs=[[.5,.1,.4]]'"
    target_probs: Annotated[list[Annotated[float, Probability]], "p"]
    draft_probs: Annotated[list[list[Annotated[float, Probability]]], "one q after another, over the same tokens"]
    methods: Annotated[list[Annotated[str, Choice("method", "method")]], "of conf/method/, with trees of one draft"]
    overrides: Annotated[list[str], "of every one of them: rule.num_free=8, ..."]
    num_drafts: Annotated[list[Annotated[int, AtLeast(1)]], "K, candidates: all V^K tuples of them are enumerated"]


class Heads(Command, OnPair, Intervals, Tracked):
    module, example = "analysis.heads", "traces=outputs/traces-HASH heads=[outputs/train-HASH,...]"
    traces: Annotated[str, "folder of data_gen.traces: hidden=true for any heads, or recorded with these very heads"]
    heads: Annotated[Folders, "folders of heads, or output folders of toolkit.train"]
    dev: Annotated[
        str | None, "another folder of data_gen.traces to choose thresholds on; null: some of the texts of `traces`"
    ]
    dev_share: Annotated[float, Between(0, 1, "()"), "of those texts; every number is of the others"]
    thresholds: Annotated[list[Annotated[float, Probability]], "h, of the survival rule"]
    min_drafted: Annotated[
        int, AtLeast(1), "shortest round of acceptance heads; published: 2. Of pre-read heads it is 1"
    ]
    corrected: Annotated[
        bool, "undo the class weights' shift of acceptance heads before the threshold; published: false"
    ]
    cost_ratio: CostRatio
    draft: Draft


class Calibration(Command, OnPair):
    module = "analysis.calibration"
    example = "head=outputs/train-HASH fit='{math: outputs/traces-HASH}' traces='{math: ..., code: ...}'"
    head: Annotated[str, "folder of heads, or output folder of toolkit.train"]
    fit: Annotated[Mapping[str, str], "{NAME: FOLDER} of data_gen.traces, of prompts that the head was not trained on"]
    traces: Annotated[Mapping[str, str], "{NAME: FOLDER}, of yet other prompts: what is reported"]
    kind: Annotated[Literal["isotonic", "platt", "temperature"], "of the maps"]
    max_depth: Annotated[int, AtLeast(1), "longest product of a round's chances; recorded with max_drafted above it"]
    draft: Draft


class Drafts(Command, OnPair, Intervals):
    module = "analysis.drafts"
    example = (
        "drafts='{before: toy/draft, after: outputs/distill-HASH/draft}' responses='{math: outputs/responses-HASH}'"
    )
    drafts: Annotated[
        Mapping[str, str], "{NAME: FOLDER}: drafts of the pair's target; the first is what others are compared with"
    ]
    responses: Annotated[
        Mapping[str, str], "{DOMAIN: FOLDER} of data_gen.responses, of prompts that no draft was trained on"
    ]
    limit: Annotated[int, AtLeast(1), "only the first so many texts of each"] | None
    depth: Annotated[int, AtLeast(1), "K of the rounds whose mean accepted length is reported"]
    max_drafted: Annotated[int, AtLeast(1), "largest fixed K that is replayed"]
    cost_ratio: CostRatio
    replicates: Annotated[int, AtLeast(1), "acceptance draws per text: more cut the variance of lengths and throughput"]
    batch_size: Annotated[int, AtLeast(1), "texts at a time; does not change the results, float ties aside"]


class Price(Command, OnPair):
    module, example = "analysis.price", "traces=outputs/traces-HASH head=outputs/train-HASH"
    traces: Annotated[str, "folder of data_gen.traces: hidden=true for any head, or recorded with this very head"]
    head: Annotated[str, "folder of a head, or output folder of toolkit.train"]
    cost_ratios: Annotated[list[Annotated[float, Above(0)]], "c, draft forward / target forward"]
    min_drafted: Annotated[int, AtLeast(1), "shortest round"]
    values: Annotated[bool, "solve the stopping problem, too: value function and threshold by tokens drafted"]
    max_drafted: Annotated[int, AtLeast(2), "of values=true: longest round, as far as the recording goes"]
    draft: Draft


class Report(Command):
    module, example = "analysis.report", "inputs=[FOLDER,...]"
    inputs: Annotated[str | Folders, "output folders of any commands: frontier, train, sweep, ..."]
    title: Annotated[str, "of the page"]
    max_cells: Annotated[int, AtLeast(1), "larger tables, such as the rows of a sweep, are named and not shown"]


class Export(Command):
    module, example = "analysis.export", "folder=outputs/decode-HASH"
    folder: Annotated[str, "output folder of toolkit.decode; its times are written if batch_size was 1"]
    category: Annotated[
        str, "Spec-Bench's: mt_bench's, translation, summarization, qa, math_reasoning, rag; or overall"
    ]
    model_id: Annotated[str | None, "how answers call their model; null: the folder's name"]


class Observed(Command, Intervals):
    module, example = "analysis.observed", "responses=FILE.jsonl cost_ratio=.1"
    responses: Annotated[str, "vLLM's answers, one JSON object per line, with its counts per request"]
    cost_ratio: CostRatio


class Paper(Command, Tracked):
    module, example = "analysis.paper", "table=specdecpp_table1 'runs={alpaca: FOLDER}'"
    table: Annotated[
        Mapping[str, Any], Group("table", built=False), "rows, columns, where the numbers are, what was published"
    ]
    runs: Annotated[Mapping[str, str] | None, "{NAME: FOLDER}: the output folders that the table's cells name"]
    models: Annotated[str, "the pair that ran, as the page calls it"]


class Publish(Command):
    module, example = "analysis.publish", "report=outputs/report-HASH entity=TEAM"
    report: Annotated[str, "output folder of analysis.report"]
    entity: Annotated[str | None, "who the runs belong to; null: the API key's"]
    project: Annotated[str | None, "where the runs are; null: WANDB_PROJECT, or acceptance-toolkit"]
    draft: Annotated[bool, "visible to its author only until published there"]
    dry_run: Annotated[bool, "build the report and write its specification, send nothing"]


class Sync(Command):
    module, example = "toolkit.sync", "folder=outputs"
    folder: Annotated[str, "every offline run below it is uploaded"]
    project: Annotated[str | None, "another project than the runs name"]
    entity: Annotated[str | None, "who they will belong to; null: the API key's"]
    dry_run: Annotated[bool, "say what would be uploaded"]


COMMANDS: dict[str, type[Section]] = {
    **{kind.module.rpartition(".")[2]: kind for kind in Command.__subclasses__()},
    "quickstart_sweep": Sweep,
    "method_only": MethodOnly,
}


def command_of(config_name: str) -> type[Section] | None:
    """The keys of a root config; None for one of the user's own."""
    return COMMANDS.get(config_name)


def keys_of(section: type[Section]) -> sources.Keys:
    """The keys of a declared section, its own first."""
    return _declared(section)  # type: ignore[arg-type]


@cache
def _declared(section: Any) -> sources.Keys:
    keys = {}
    for name, annotation in annotations_of(section).items():
        meaning = next((note for note in notes(annotation)[::-1] if isinstance(note, str)), "")
        keys[name] = sources.Key(name, annotation, meaning, getattr(section, name, sources.REQUIRED))
    return sources.Keys(keys, no_blanks=True)


def group_of(annotation: Any) -> Group | None:
    """The config group that fills a key in."""
    return next((note for note in notes(annotation) if isinstance(note, Group)), None)

"""The configs of the commands of `analysis`: a dataclass each, as `toolkit.config.commands` says."""
# ruff: noqa: RUF012  # every config has its own copy of a list

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from toolkit.config.commands import (
    READ_RESPONSES,
    Amount,
    Command,
    ConfigSection,
    CostRatio,
    Count,
    Folders,
    Grid,
    Inputs,
    OnPrompts,
    Positive,
    ReadsDraft,
    Seed,
    Shared,
    Tracked,
)
from toolkit.config.notes import AtLeast, Between, Choice, ConfigGroup, File, Head, Model, Neutral, Probability

AProbability = Annotated[float, Probability]
Resamples = Annotated[Count, "bootstrap samples"]
Seconds = Positive
Named = Annotated[Mapping[str, str], File()]  # {NAME: FOLDER}
Hidden = Annotated[bool, "keep the draft's states beside the recording: further heads then need no new one"]
SMALL_RATIOS = [0.05, 0.1, 0.2, 0.3, 0.5]
TABLE_COSTS = [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5]
OF_TREES = ["specinfer", "spectr", "importance", "mcsd", "mcsd_naive", "greedy_multi"]
COST_RANGE = [0.05, 5.0]
Hardware = Literal["h100", "h200", "a100", "l40s"]


class SweepGrid(Grid):
    references = ("upper_bound", "oracle")  # they use knowledge that no method has


MethodGrid = Annotated[SweepGrid, ConfigGroup("grid", built=False), "methods, and lists of values for their keys"]


class Labels(OnPrompts):
    dataset: Annotated[str | None, "how tables call the prompt set; null: its name in the config, or the file's"] = None
    split: Annotated[str | None, "how tables call its part; null: prompts.split"] = None


class Intervals(ConfigSection):
    resamples: Resamples = 10000
    confidence: Annotated[float, Between(0, 1, "()"), "level of the intervals"] = 0.95
    seed: Annotated[Seed, "seed of everything random here"] = 0


class Sweep(Command, Labels, Tracked, Shared):
    module, example = "analysis.sweep", "prompts=toy_math prompts.split=dev"
    reads_grammars = True
    grid: Annotated[
        SweepGrid, ConfigGroup("grid", built=False), "methods and values: grid.tail.policy.threshold=[.1,.2]"
    ]
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


QuickstartSweep = Sweep


class UnderLoad(OnPrompts, Tracked):
    grid: MethodGrid
    hardware: Annotated[Hardware | None, "model the costs instead, from a device's peak figures"] = None
    devices: Annotated[Count, "with `hardware`: devices that the target is spread over"] = 1
    overlap: Annotated[
        float,
        Between(0, 1, "(]"),
        "with `hardware`, of mixtures of experts: w tokens of a text reach the experts of w^overlap independent ones; "
        "1: routed independently",
    ] = 0.79
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
    blocks: Annotated[bool, "with `responses`: the draft gives a block per forward pass"] = False


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
    engine: Annotated[
        Inputs | None,
        "price an engine's rounds instead: files of its answers, with counts and seconds; xllamacpp: llama.cpp is started at "
        "every K; http://HOST:PORT: that server's answers are written, for a later call with files",
    ] = None
    requests: Annotated[
        Count, "with engine=xllamacpp or an address: the first so many prompts are asked of every start"
    ] = 3
    engine_python: Annotated[str | None, "interpreter that has xllamacpp; null: this one"] = None
    source: Annotated[
        Literal["none", "draft", "lookup"],
        "with an address: what the server drafts from; draft: num_drafted=[K] says how far",
    ] = "none"


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
    candidates: Annotated[
        Inputs | None,
        "fit the acceptance of a node's j-th candidate instead, to these responses, at T = 0 and above; dev_share is held out",
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
    costs: Annotated[
        Named | None, Neutral(None), "with `tuning`: {NAME: cost table, JSON or CSV}: rows are compared at these, too"
    ] = None
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


class Diagnose(Command, ReadsDraft, Intervals):
    module, example = "analysis.diagnose", "responses=ANSWERS.jsonl pair.target=T pair.draft=D"
    responses: Annotated[
        str | None,
        File(),
        "an engine's answers with its counts by round: vLLM's, generations.jsonl of decode, JSON lines",
    ] = None
    counts: Annotated[Folders, File(), "instead, a watch: /metrics pages of an engine, in order, two or more"] = []
    baseline: Annotated[
        str | None, File(), "with `counts`: answers that the engine should equal, a file or a folder of toolkit.decode"
    ] = None
    sampling: Annotated[Any, ConfigGroup("sampling"), "how the engine drew the texts: temperature, repetition_penalty"]
    resamples: Resamples = 2000
    rounds: Annotated[Count, "the first so many rounds are replayed"] = 600
    others: Annotated[Folders, Model(), "drafts that the engine may have loaded instead: other revisions"] = []
    windows: Annotated[
        list[Count] | None, "contexts that the draft may be cut to; null: 64, 128, 256, ... below the longest text"
    ] = None
    num_drafted: Annotated[Count, "K, with sums alone (llama.cpp): tokens that the engine drafts in a round"] | None = (
        None
    )


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

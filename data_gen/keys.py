"""The configs of the commands of `data_gen`: a dataclass each, as `toolkit.config.commands` says."""
# ruff: noqa: RUF012  # every config has its own copy of a list

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from toolkit.config.commands import (
    Amount,
    Command,
    ConfigSection,
    Count,
    Folders,
    Inputs,
    OnPair,
    OnPrompts,
    Positive,
    Seed,
    Seed32,
    Shared,
)
from toolkit.config.notes import AtLeast, Between, File, Head


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
    reads_grammars = True
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
    reads_grammars = True
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

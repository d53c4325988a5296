"""python -m data_gen.mix responses=FOLDER: mix responses of the target with tokens of the draft, to train heads on.

Output: `dataset/`, a datasets.DatasetDict (train, validation; split by prompt), and summary.json. While it works, parts
of PART_ROWS examples lie in `parts/`: run the command again after an interruption and it goes on with the missing ones.
Processes that share the work (`toolkit.runs.sharding`) make every world_size-th part, and the last one joins them.
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("mix")

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from tqdm.auto import tqdm

from data_gen import keys
from data_gen.texts import TargetResponses, fingerprints, num_tokens, read_responses, sampling_facts, within_context
from toolkit.config import instantiate, plain
from toolkit.errors import NOT_NUMBERS, InputError
from toolkit.files import journal
from toolkit.files.atomic import read_json, write_atomic, write_folder, write_json
from toolkit.files.text import first_line, visible
from toolkit.models.pair import ModelPair
from toolkit.models.teacher import distributions_along, picked
from toolkit.runs.sharding import RANKS, all_there, joining, part_of, share
from toolkit.runs.stage import Stage, check_some_done, open_stage
from toolkit.sampling import Sampling, draw, row_generator, seed_of

SUMMARY, PARTS = "summary.json", "parts"
PART_ROWS = 256
PREVIEW_ROWS = 3
LEGEND = "prompt | target's tokens as they are, [draft's token|probability of acceptance]"
FEATURES = datasets.Features({
    "row": datasets.Value("int64"),  # of the responses; several folders are numbered on
    "prompt_length": datasets.Value("int32"),
    "input_ids": datasets.List(datasets.Value("int32")),  # prompt and mixed tokens
    "labels": datasets.List(datasets.Value("float32")),  # P(accepted) of the drafted token there; 0 in the prompt
    "mask": datasets.List(datasets.Value("bool")),  # whether the token there is the drafted one
})  # fmt: skip
# Added to the seed: with the very stream that drew the response, Y would repeat X instead of being a fresh draw.
STREAM = 0x6D6978


@dataclass(frozen=True)
class MixedExample:
    """One training example.

    prompt_ids   as the models read it
    mixed [N]    Z
    labels [N]   P_i, the probability that the target accepts Y_i; also where Z_i is X_i
    drafted [N]  bool: the acceptance draw chose Y_i, so that Z_i is a drafted token and its label counts
    """

    row: int
    prompt_ids: list[int]
    mixed: Tensor
    labels: Tensor
    drafted: Tensor


def mix_batch(
    pair: ModelPair, rows: Sequence[Mapping[str, Any]], sampling: Sampling, mixing_ratio: float, seed: int
) -> list[MixedExample]:
    """Mix rows {"row", "prompt_ids", "token_ids"} in two forwards; row r draws from a generator seeded with (seed, r).

    Rows for which a model gives what is not a number are left out.
    """
    sequences = [(row["prompt_ids"], row["token_ids"]) for row in rows]
    distributions = distributions_along(pair, sequences, sampling, check=False)
    mixed = []
    for row, (p, q) in zip(rows, distributions, strict=True):  # [N, V] each
        response = torch.tensor(row["token_ids"], device=p.device)
        uniforms = torch.rand(2, len(response), generator=row_generator(seed + STREAM, row["row"])).to(p.device)
        drafted, from_draft = draw(q, uniforms[0]), uniforms[1] >= mixing_ratio
        labels = (picked(p, drafted) / picked(q, drafted)).clamp(max=1).cpu()
        tokens = torch.where(from_draft, drafted, response).cpu()
        if not bool(labels.isnan().any()):
            mixed.append(MixedExample(row["row"], list(row["prompt_ids"]), tokens, labels, from_draft.cpu()))
    return mixed


def run(cfg: keys.Mix) -> Path:
    part = part_of(cfg)
    named = [plain(cfg.responses), plain(cfg.validation) or []]  # those to train on, then those to validate on
    responses = read_responses([path for names in named for path in ([names] if isinstance(names, str) else names)])
    sampling = sampling_facts(responses.sampling)
    stage = open_stage("mix", {**plain(cfg), "sampling": sampling}, inputs=responses.inputs, ignore=RANKS, shared=part)
    if stage.finished:
        print("finished before:")
        _print_summary(read_json(stage.folder / SUMMARY))
        return stage.folder
    pair = instantiate(cfg.pair)
    responses = within_context(pair, responses)
    facts = {"sampling": sampling, "mixing_ratio": cfg.mixing_ratio, **fingerprints(pair, responses)}
    paths = _mix_parts(pair, responses, cfg, stage.folder / PARTS)
    if all_there(stage, paths, cfg):
        with joining(stage) as last:
            if last:
                _join(stage, pair, responses, cfg, paths, facts)
    return stage.folder


def split(table: pa.Table, prompts: Sequence[Hashable], validation_fraction: float, seed: int) -> datasets.DatasetDict:
    """Training and validation examples: a random share of the prompts with all their responses. Raises InputError for one."""
    distinct = list(dict.fromkeys(prompts))
    if len(distinct) < 2:
        raise InputError(f"expected responses to at least 2 prompts, to train and to validate on, got {len(distinct)}")
    count = min(max(round(validation_fraction * len(distinct)), 1), len(distinct) - 1)
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed_of(seed))).tolist()
    held_out = {distinct[i] for i in order[:count]}
    parts = {
        "train": [i for i, prompt in enumerate(prompts) if prompt not in held_out],
        "validation": [i for i, prompt in enumerate(prompts) if prompt in held_out],
    }
    return datasets.DatasetDict({name: datasets.Dataset(table.take(rows)) for name, rows in parts.items()})


def summarize(data: datasets.DatasetDict) -> dict[str, Any]:
    """Counts and label balance of all examples, and a hash of each split's content."""
    columns = [_columns(part.data.table) for part in data.values()]
    labels, mask = (np.concatenate([part[name] for part in columns]) for name in ("labels", "mask"))
    in_prompts = sum(int(part["prompt_length"].sum()) for part in columns)
    positions, hashes = len(labels) - in_prompts, {}
    for split_name, part in zip(data, columns, strict=True):
        digest = hashlib.sha256()
        for name in sorted(part):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(part[name]).tobytes())
        hashes[split_name] = digest.hexdigest()[:16]
    return {
        "num_examples": {name: len(part) for name, part in data.items()},
        "num_positions": positions,
        "num_drafted": int(mask.sum()),
        "mean_label": float(labels[mask].mean()) if mask.any() else float("nan"),
        "mean_label_all": float(labels.sum() / positions),
        "content": hashes,
    }


def check_masks(summary: Mapping[str, Any]) -> None:
    """Raises InputError if the loss would see no position, or every one (nothing was mixed)."""
    if summary["num_drafted"] == 0:
        raise InputError("no position holds a drafted token, so there is nothing to learn from: lower mixing_ratio")
    if summary["num_drafted"] == summary["num_positions"]:
        raise InputError("every position holds a drafted token, so nothing was mixed: raise mixing_ratio")


def _join(
    stage: Stage, pair: Any, responses: TargetResponses, cfg: keys.Mix, paths: Sequence[Path], facts: dict[str, Any]
) -> None:
    table = pa.concat_tables([_read_part(path) for path in paths]).combine_chunks()
    done = table["row"].to_pylist()
    reasons = [
        f"response {number}: {NOT_NUMBERS}" for number in sorted({row["row"] for row in responses.rows} - set(done))
    ]
    first = next(iter(reasons), None)
    check_some_done(len(reasons), len(responses.rows), first, stage.folder)
    facts |= {"num_failed": len(reasons), "first_error": first}
    prompt_of = {row["row"]: tuple(row["prompt_ids"]) for row in responses.rows}
    prompts = [prompt_of[number] for number in done]
    if cfg.validation is None:
        data = split(table, prompts, cfg.validation_fraction, cfg.seed)
    else:
        own = {row["row"] for row in read_responses(plain(cfg.responses)).rows}  # numbered first
        parts = {
            "train": [i for i, number in enumerate(done) if number in own],
            "validation": [i for i, number in enumerate(done) if number not in own],
        }
        data = datasets.DatasetDict({name: datasets.Dataset(table.take(part)) for name, part in parts.items()})
    summary = summarize(data)
    check_masks(summary)
    datasets.disable_progress_bars()
    write_folder(stage.folder / "dataset", lambda path: data.save_to_disk(str(path)))
    write_json(stage.folder / SUMMARY, {**summary, **facts})
    stage.remove(PARTS)
    stage.finish(**summary, **facts)
    _print_summary({**summary, **facts})
    print(LEGEND)
    for row in data["train"].select(range(min(PREVIEW_ROWS, len(data["train"])))):
        print(f"  {as_text(pair.tokenizer, row)}")


def _mix_parts(pair: Any, responses: TargetResponses, cfg: keys.Mix, folder: Path) -> list[Path]:
    """The files of all mixed examples in order; this process's share is written, parts that exist are kept."""
    numbers = range(0, len(responses.rows), PART_ROWS)
    paths = [folder / f"part-{number // PART_ROWS:05d}.parquet" for number in numbers]
    parts = [(path, responses.rows[number : number + PART_ROWS]) for number, path in zip(numbers, paths, strict=True)]
    parts = share(parts, cfg)
    with tqdm(total=sum(num_tokens(rows) for _, rows in parts), desc="mix", unit="token", unit_scale=True) as bar:
        for path, rows in parts:
            if path.exists():
                bar.initial += num_tokens(rows)  # keeps tokens/s honest
                bar.update(num_tokens(rows))
                continue
            by_length = sorted(rows, key=lambda row: len(row["prompt_ids"]) + len(row["token_ids"]))  # little padding
            mixed: dict[int, MixedExample] = {}
            for first in range(0, len(rows), cfg.batch_size):
                batch = by_length[first : first + cfg.batch_size]
                examples = mix_batch(pair, batch, responses.sampling, cfg.mixing_ratio, cfg.seed)
                mixed |= {example.row: example for example in examples}
                bar.update(num_tokens(batch))
            table = _as_table([mixed[row["row"]] for row in rows if row["row"] in mixed])
            write_atomic(path, partial(_write_part, table))
    return paths


def _write_part(table: pa.Table, path: Path) -> None:
    with open(path, "wb") as file:
        pq.write_table(table, file, write_page_checksum=True)


def _read_part(path: Path) -> pa.Table:
    journal.check(path)
    try:
        with open(path, "rb") as file:
            return pq.read_table(file, schema=FEATURES.arrow_schema, page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path} is not a whole part ({first_line(error)}); {journal.HINT}") from None


def _as_table(rows: Sequence[MixedExample]) -> pa.Table:
    columns = {
        "row": [row.row for row in rows],
        "prompt_length": [len(row.prompt_ids) for row in rows],
        "input_ids": [[*row.prompt_ids, *row.mixed.tolist()] for row in rows],
        "labels": [np.pad(row.labels.float().numpy(), (len(row.prompt_ids), 0)) for row in rows],
        "mask": [np.pad(row.drafted.numpy(), (len(row.prompt_ids), 0)) for row in rows],
    }
    return pa.table(columns, schema=FEATURES.arrow_schema)


def _columns(table: pa.Table) -> dict[str, np.ndarray]:
    flat = {}
    for name in FEATURES:
        column = table[name].combine_chunks()
        values = column if pa.types.is_primitive(column.type) else column.flatten()
        flat[name] = values.to_numpy(zero_copy_only=False)
    flat["lengths"] = np.array([len(ids) for ids in table["input_ids"]])
    return flat


def _print_summary(summary: Mapping[str, Any]) -> None:
    examples, positions, drafted = summary["num_examples"], summary["num_positions"], summary["num_drafted"]
    print(
        f"mixed {examples['train']} examples to train and {examples['validation']} to validate on, {positions} positions"
    )
    print(f"  {drafted} hold a drafted token, {drafted / positions:.1%}: the loss sees those")
    if summary.get("num_failed"):
        print(f"  {summary['num_failed']} responses failed, first: {summary['first_error']}")
    print(f"  mean label {summary['mean_label']:.4f} there, {summary['mean_label_all']:.4f} everywhere")


def as_text(tokenizer: Any, row: Mapping[str, Any]) -> str:
    sequences = [f" {token}" if tokenizer is None else tokenizer.decode([token]) for token in row["input_ids"]]
    marked = [
        f"[{text}|{label:.2f}]" if from_draft else text
        for text, from_draft, label in zip(sequences, row["mask"], row["labels"], strict=True)
    ]
    length = row["prompt_length"]
    return visible(f"{''.join(sequences[:length])} | {''.join(marked[length:])}".replace("\n", "⏎"))

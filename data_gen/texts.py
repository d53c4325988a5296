"""Texts of a target, for the stages that work on them: folders of data_gen.responses, or a file of token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from data_gen.responses import read_rows
from data_gen.shards import shard_name
from toolkit.config.notes import Internal
from toolkit.errors import InputError
from toolkit.grammar.text import source_of
from toolkit.models.fingerprint import Weights
from toolkit.models.pair import ModelPair
from toolkit.models.prompts import check_token_ids
from toolkit.runs.stage import read_manifest
from toolkit.sampling import Sampling


@dataclass(frozen=True)
class TargetResponses:
    """Rows (row, prompt_ids, token_ids), their sampling, the target's weights if known, and the files they were read from."""

    rows: list[dict[str, Any]]
    sampling: Sampling
    target: Weights | None
    inputs: list[Path]


def read_sequences(source: Any, sampling: Sampling | None) -> TargetResponses:
    """Texts of folders, or of one .jsonl file, maybe with grammars. Raises InputError for another sampling, or none."""
    if isinstance(source, str | Path) and str(source).endswith(".jsonl"):
        if sampling is None:
            raise InputError(
                f"{source} does not say how its tokens were drawn: expected sampling.temperature=... and so on"
            )
        return read_jsonl(Path(source), sampling)
    responses = read_responses(source, same_ends=True, grammars=True)
    if sampling is not None:
        recorded, configured = asdict(replace(responses.sampling, seed=0)), asdict(replace(sampling, seed=0))
        different = [name for name in recorded if recorded[name] != configured[name]]
        if different:
            name = different[0]
            raise InputError(
                f"the responses' manifest says {name}={recorded[name]}, the config {name}={configured[name]}: "
                "leave sampling out, or give what they were drawn with"
            )
    return responses


def read_jsonl(path: Path, sampling: Sampling) -> TargetResponses:
    """One text per line: {"prompt_ids": [...], "token_ids": [...]}, maybe "text". Raises InputError for another line."""
    if not path.is_file():
        raise InputError(f"expected texts at {path}, found none")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            ids = {key: record[key] for key in ("prompt_ids", "token_ids")}
            for name, value in ids.items():
                check_token_ids(value, where=f"{path}, line {number + 1}, {name}: ")
            if not all(ids.values()):
                raise ValueError
            own = {} if record.get("grammar") is None else {"grammar": record["grammar"]}
            rows.append({"row": number, **ids, **own, **({"text": str(record["text"])} if record.get("text") else {})})
        except InputError:
            raise
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f'{path}, line {number + 1}: expected {{"prompt_ids": [numbers], "token_ids": [numbers]}}, got {line[:60]}'
            ) from None
    if not rows:
        raise InputError(f"expected texts in {path}, found none")
    return TargetResponses(rows, sampling, None, [path])


def read_responses(
    folders: str | Path | Sequence[str | Path],
    same_ends: Annotated[bool, Internal()] = False,
    grammars: Annotated[bool, Internal()] = False,
) -> TargetResponses:
    """The rows of responses folders of one target and warping, with `same_ends` of one limit, too. Raises InputError if not.

    grammars  whether the caller knows them; else texts that have one are refused
    """
    paths = [Path(folder) for folder in ([folders] if isinstance(folders, str | Path) else folders)]
    rows: list[dict[str, Any]] = []
    samplings, targets, first_row = [], [], 0
    inputs: list[Path] = []
    for folder in paths:
        answered = list(read_rows(folder))
        manifest = read_manifest(folder)
        recorded = manifest.get("sampling") or manifest["config"]["sampling"]
        sampling = {key: value for key, value in recorded.items() if key != "_target_"}
        samplings.append(Sampling(**sampling))
        targets.append(Weights.recorded(manifest, "target"))
        inputs += (folder / shard_name(number) for number in range(manifest["num_shards"]))
        for row in answered:
            if not grammars and (row.get("grammar") or samplings[-1].grammar) is not None:
                raise InputError(
                    f"{folder}: expected responses without a grammar here; data_gen.traces records such texts"
                )
            if not row["prompt_ids"] or not row["token_ids"]:
                raise InputError(f"{folder}: response {row['id']} is empty; expected a prompt and at least one token")
            rows.append({**row, "row": first_row + row["row"]})
        first_row += manifest["rows"]["input"]
    if not rows:
        raise InputError(f"expected responses, found none in {', '.join(map(str, paths))}")
    free: dict[str, Any] = {"seed": 0} if same_ends else {"seed": 0, "max_new_tokens": 1, "stop": (), "end_ids": ()}
    distributions = [replace(sampling, **free) for sampling in samplings]
    recorded_target = next((target for target in targets if target is not None), None)  # endpoints name no weights
    for folder, distribution, target in zip(paths, distributions, targets, strict=True):
        other = recorded_target is not None and target is not None and recorded_target.other_than(target) is not None
        if distribution != distributions[0] or other:
            raise InputError(f"{folder} and {paths[0]} differ in target or sampling: work on them apart")
    return TargetResponses(rows, samplings[0], recorded_target, inputs)


def within_context(pair: ModelPair, responses: TargetResponses) -> TargetResponses:
    """The responses whose texts, at their longest, every model of the pair can read; prints how many others there are.

    Raises InputError if there is none, and for tokens that the target has not.
    """
    check_vocabulary(responses, pair.vocab_size)
    lengths = [len(row["prompt_ids"]) for row in responses.rows]
    fit = [length + responses.sampling.room(length) <= pair.max_length for length in lengths]
    if not any(fit):
        raise InputError(f"all {len(fit)} texts exceed {pair.context}: expected shorter prompts or max_new_tokens")
    if not all(fit):
        print(f"{len(fit) - sum(fit)} of {len(fit)} texts exceed {pair.context} and are passed over")
    return replace(responses, rows=[row for row, fits in zip(responses.rows, fit, strict=True) if fits])


def check_vocabulary(responses: TargetResponses, size: int) -> None:
    """Raises InputError if a response holds tokens outside of a vocabulary."""
    for row in responses.rows:
        check_token_ids([*row["prompt_ids"], *row["token_ids"]], size, f"response {row.get('id', row['row'])}: ")


def fingerprints(pair: Any, responses: TargetResponses) -> dict[str, Any]:
    """The models' identities. Raises InputError if target or tokenizer is not the one that made the responses."""
    pair.check_has_draft("this command")
    target = Weights.of(pair.target)
    reason = None if responses.target is None else responses.target.other_than(target)
    if reason is not None:
        raise InputError(
            f"the responses come from another target ({reason}): set pair.target to the model that made them"
        )
    if responses.target is None and pair.tokenizer is not None:  # texts beside the tokens tell the tokenizer
        for row in responses.rows:
            text, decoded = row.get("text", "").strip(), pair.text(row["token_ids"], row["prompt_ids"]).strip()
            if not decoded.startswith(text) and not text.startswith(decoded):  # the end may be missing
                raise InputError(
                    f"{responses.inputs[0]}, line {row['row'] + 1}: the text begins {text[:30]!r}, its tokens mean "
                    f"{decoded[:30]!r} to this pair: they were made with another tokenizer"
                )
    return {**target.facts("target"), **Weights.of(pair.draft).facts("draft")}


def num_tokens(rows: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(row["token_ids"]) for row in rows)


def sampling_facts(sampling: Sampling) -> dict[str, Any]:
    grammar = None if sampling.grammar is None else source_of(sampling.grammar)
    return {**asdict(sampling), "grammar": grammar, "stop": list(sampling.stop), "end_ids": list(sampling.end_ids)}

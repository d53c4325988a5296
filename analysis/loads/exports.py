"""The advised draft lengths in the words of serving engines: files to start them with.

    transformers.json  `num_assistant_tokens` for `generate(assistant_model=...)`; or `prompt_lookup_num_tokens`
    vllm.json          a `--speculative-config`: the draft length by batch size as inclusive triples [from, to, K]
    sglang.txt, llama_cpp.txt  command-line flags
    toolkit.txt        overrides of this package's own decoding (`next_line` is the whole command)

vLLM (unless `draft_sample_method` says otherwise), SGLang and llama.cpp draft greedily: their lengths are of greedy drafts.
Names are those of vLLM 0.33.0, SGLang 0.5.23, transformers 5.23 and llama.cpp of November 2026; only transformers was run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.config import choices, commands, compose, find, override, plain
from toolkit.files.atomic import write_text
from toolkit.models.eagle3 import is_eagle3

LARGEST = 2**31 - 1  # the last triple's end: any larger batch


def triples(lengths: Mapping[int, int]) -> list[list[int]]:
    """Draft length by batch size as inclusive [from, to, K]: a size stands for those up to half-way to the next one."""
    sizes = sorted(lengths)
    ranges: list[list[int]] = []
    start = 1
    for here, after in zip(sizes, [*sizes[1:], None], strict=True):
        end = LARGEST if after is None else (here + after) // 2
        if ranges and ranges[-1][2] == lengths[here]:
            ranges[-1][1] = end
        else:
            ranges.append([start, end, lengths[here]])
        start = end + 1
    return ranges


def write_exports(
    folder: Path, draft: str | None, lengths: Mapping[int, int], greedy: Mapping[int, int] | None, advised: list[str]
) -> list[Path]:
    """Write the files; returns their paths.

    draft    of the advice; None: lengths are those of prompt lookup
    lengths, greedy  best fixed length by batch size, drafts sampled, or taken greedily (None: not simulated)
    advised  overrides of this package's own method
    """
    smallest, greedy_first = min(lengths), lengths if greedy is None else greedy
    length, greedy_length, most = lengths[smallest], greedy_first[smallest], max(greedy_first.values())
    reads_states = draft is not None and is_eagle3(draft)
    if draft is None:
        transformers: dict[str, Any] = (
            {"prompt_lookup_num_tokens": length, "max_matching_ngram_size": 3} if length else {}
        )
    elif not length:  # no assistant is passed
        transformers = {"assistant_model": None}
    else:
        settings = {"num_assistant_tokens": length, "num_assistant_tokens_schedule": "constant"}
        settings |= {"assistant_confidence_threshold": 0.0}
        transformers = {"assistant_model": draft, "assistant_generation_config": settings}
    files = {"toolkit.txt": "\n".join(advised) + "\n"}
    if not reads_states:  # transformers loads no such draft
        files["transformers.json"] = json.dumps(transformers, indent=2) + "\n"
    if draft is not None:
        vllm: dict[str, Any] = {
            "method": "eagle3" if reads_states else "draft_model",
            "model": draft,
            "num_speculative_tokens": most,
        }
        vllm["num_speculative_tokens_per_batch_size"] = triples(greedy_first)
        vllm["draft_sample_method"] = "probabilistic" if greedy is None else "greedy"
        files["vllm.json"] = json.dumps(vllm if most else {}, indent=2) + "\n"
        files["sglang.txt"] = "# do not draft: start without --speculative-algorithm\n"
        files["llama_cpp.txt"] = "# do not draft: start without --spec-type\n"
        if greedy_length:
            files["sglang.txt"] = (
                f"--speculative-algorithm {'EAGLE3' if reads_states else 'STANDALONE'} "
                f"--speculative-draft-model-path {draft} --speculative-num-steps {greedy_length} "
                f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {greedy_length + 1}\n"
            )
            files["llama_cpp.txt"] = (
                f"--spec-type {'draft-eagle3' if reads_states else 'draft-simple'} --spec-draft-model {draft}.gguf "
                f"--spec-draft-n-max {greedy_length} --spec-draft-p-min 0\n"
            )
    return [write_text(folder / name, content) for name, content in files.items()]


def next_line(cfg: commands.Advise, overrides: Sequence[str], draft: str | None, batch: int) -> str:
    """The command that decodes as advised for a batch size: with the pair, the sampling and the prompts of `cfg`."""
    parts = {
        "pair": {**plain(cfg.pair), "draft": draft},
        "sampling": plain(cfg.sampling),
        "prompts": plain(cfg.prompts),
    }
    return f"next: {decode_command(parts, overrides)} {override('batch_size', batch)}"


def decode_command(parts: Mapping[str, Mapping[str, Any]], overrides: Sequence[str]) -> str:
    """`python -m toolkit.decode` with these overrides. parts: the plain pair, sampling and prompts of a config."""
    usual, prompts = plain(compose("decode")), parts["prompts"]
    words, pair = list(overrides), parts["pair"]
    if pair["_target_"] != usual["pair"]["_target_"]:
        named = [name for name in choices("pair") if pair["_target_"] in find("pair", name).read_text("utf-8")]
        words += _chosen("pair", pair, named) or ["pair.target=PATH", "pair.draft=PATH"]
    else:
        words += _differing("pair", pair, usual["pair"])
    words += _differing("sampling", parts["sampling"], usual["sampling"])
    if prompts.get("path") is not None and "shares" not in prompts:  # a file that is read instead of the source
        words += [override(f"prompts.{name}", prompts[name]) for name in ("path", "limit") if prompts.get(name)]
    else:
        words += _chosen("prompts", prompts, choices("prompts")) or ["prompts.path=FILE.jsonl"]
    return f"python -m toolkit.decode {shlex.join(words)}"


def _differing(group: str, values: Mapping[str, Any], usual: Mapping[str, Any]) -> list[str]:
    """Overrides for the values of keys of a choice that differ from its own."""
    return [
        ("++" if isinstance(value, dict) else "") + override(f"{group}.{name}", value)
        for name, value in values.items()
        if name in usual and value != usual[name]
    ]


def _chosen(group: str, values: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The choice of a config group with the fewest differences, and these; empty if none gives these values."""
    described: list[list[str]] = []
    for name in names:
        usual = _composed(group, [f"{group}={name}"])
        if usual.keys() == values.keys():
            described.append([f"{group}={name}", *_differing(group, values, usual)])
    return next((words for words in sorted(described, key=len) if _composed(group, words) == values), [])


def _composed(group: str, words: Sequence[str]) -> dict[str, Any]:
    part: dict[str, Any] = plain(compose("decode", words, checked=False)[group])
    return part

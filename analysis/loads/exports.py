"""The advised draft lengths and the measured acceptance in the words of serving engines: files to start them with.

    transformers.json  `num_assistant_tokens` for `generate(assistant_model=...)`; or `prompt_lookup_num_tokens`
    vllm.json          a `--speculative-config`: the draft length by batch size as inclusive triples [from, to, K]
    sglang.txt, llama_cpp.txt  command-line flags
    sglang_adaptive.json  a `--speculative-adaptive-config`: candidate steps from a batch size on (EAGLE-3 drafts alone)
    tensorrt_llm.yaml  a `--config` with `draft_len_schedule`: the draft length up to a batch size
    vllm_k1.json, tensorrt_llm_k1.yaml  the same with one token instead of none, where some batch size drafts none
    vllm_synthetic.json, llama_cpp_synthetic.txt  benchmarks whose drafts are accepted as often as the recorded ones
    toolkit.txt        overrides of this package's own decoding (`next_line` is the whole command)

All but transformers and vLLM's "probabilistic" draft greedily: their lengths and rates are of greedy drafts. Names are those of
vLLM 0.32.0, SGLang 0.5.23, TensorRT-LLM 1.4.0rc1, transformers 5.23 and llama.cpp b11434; the first and transformers were run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis import keys
from toolkit.config import choices, compose, find, override, plain
from toolkit.files.atomic import write_text
from toolkit.files.shards import is_gguf
from toolkit.models.block_format import is_block
from toolkit.models.draft_formats import kind_of, reads_target

LARGEST = 2**31 - 1  # the last triple's end: any larger batch
OPTIONAL = {"transformers.json", "sglang_adaptive.json", "vllm_k1.json", "tensorrt_llm_k1.yaml", "vllm_synthetic.json",
            "llama_cpp_synthetic.txt"}  # fmt: skip


def triples(lengths: Mapping[int, int]) -> list[list[int]]:
    """Draft length by batch size as inclusive [from, to, K]: a size stands for those up to half-way to the next one."""
    sizes = sorted(lengths)
    ranges: list[list[int]] = []
    start = 1
    for size, after in zip(sizes, [*sizes[1:], None], strict=True):
        end = LARGEST if after is None else (size + after) // 2
        if ranges and ranges[-1][2] == lengths[size]:
            ranges[-1][1] = end
        else:
            ranges.append([start, end, lengths[size]])
        start = end + 1
    return ranges


def write_exports(
    folder: Path,
    draft: str | None,
    lengths: Mapping[int, int],
    greedy: Mapping[int, int] | None,
    advised: list[str],
    alive: Sequence[float] = (),
) -> list[Path]:
    """Write the files; returns their paths.

    draft    of the advice; None: lengths are those of prompt lookup
    lengths, greedy  best fixed length by batch size, drafts sampled, or taken greedily (None: not simulated)
    advised  overrides of this package's own method
    alive    P(the first j drafted tokens are all accepted) for j = 1 .. K, drafts taken as engines do; empty: not known
    """
    length, greedy_first = lengths[min(lengths)], lengths if greedy is None else greedy
    reads_states = draft is not None and reads_target(draft)
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
        sample = {"draft_sample_method": "probabilistic" if greedy is None else "greedy"}
        files |= _schedules(draft, reads_states, greedy_first, sample) | _flags(draft, reads_states, greedy_first)
        if len(alive):
            files |= _synthetic(draft, reads_states, alive, sample)
        if is_block(draft):  # whose flags elsewhere are not known here
            files = {name: content for name, content in files.items() if name.startswith(("toolkit", "vllm"))}
    for name in OPTIONAL - files.keys():  # of an earlier call, with other batch sizes
        (folder / name).unlink(missing_ok=True)
    return [write_text(folder / name, content) for name, content in files.items()]


def _schedules(draft: str, reads_states: bool, lengths: Mapping[int, int], sample: Mapping[str, str]) -> dict[str, str]:
    """Files with a draft length by batch size; where it is 0 somewhere, others with 1 there."""
    at_least_one = {batch: max(length, 1) for batch, length in lengths.items()}
    floored = any(lengths.values()) and not all(lengths.values())
    files = {}
    for end, table in [("", lengths), *([("_k1", at_least_one)] if floored else [])]:
        most = max(table.values())
        vllm = _vllm(draft, reads_states, most)
        vllm |= {"num_speculative_tokens_per_batch_size": triples(table), **sample}
        files[f"vllm{end}.json"] = json.dumps(vllm if most else {}, indent=2) + "\n"
        files[f"tensorrt_llm{end}.yaml"] = _tensorrt(draft, reads_states, triples(table))
    if reads_states and any(lengths.values()):
        steps = {str(first): {"candidate_steps": [length]} for first, _, length in triples(lengths)}
        files["sglang_adaptive.json"] = json.dumps(steps, indent=2) + "\n"
    return files


def _vllm(draft: str, reads_states: bool, most: int) -> dict[str, Any]:
    return {
        "method": str(kind_of(Path(draft))).lower() if reads_states else "draft_model",
        "model": draft,
        "num_speculative_tokens": most,
    }


def _tensorrt(draft: str, reads_states: bool, ranges: Sequence[Sequence[int]]) -> str:
    """The YAML of a schedule: lengths hold up to their batch size, 0 beyond. Its first length has to be the largest."""
    most = ranges[0][2]
    if not most:
        return "# do not draft: start without speculative_config\n"
    upto = {last: min(length, most) for _, last, length in ranges}
    if ranges[-1][2] == 0:
        del upto[ranges[-1][1]]
    return (
        f"speculative_config:\n  decoding_type: {'Eagle3' if reads_states else 'DraftTarget'}\n  max_draft_len: {most}\n"
        f"  speculative_model: {json.dumps(draft)}\n"
        f"  draft_len_schedule: {{{', '.join(f'{last}: {length}' for last, length in upto.items())}}}\n"
    )


def _flags(draft: str, reads_states: bool, lengths: Mapping[int, int]) -> dict[str, str]:
    """Flags for the smallest batch size."""
    length = lengths[min(lengths)]
    if not length:
        return {
            "sglang.txt": "# do not draft: start without --speculative-algorithm\n",
            "llama_cpp.txt": "# do not draft: start without --spec-type\n",
        }
    return {
        "sglang.txt": (
            f"--speculative-algorithm {'EAGLE3' if reads_states else 'STANDALONE'} "
            f"--speculative-draft-model-path {shlex.quote(draft)} --speculative-num-steps {length} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {length + 1}\n"
        ),
        "llama_cpp.txt": f"{_llama_cpp(draft, reads_states, length)}\n",
    }


def _llama_cpp(draft: str, reads_states: bool, length: int) -> str:
    file = shlex.quote(draft if is_gguf(draft) else f"{draft}.gguf")
    return (
        f"--spec-type {'draft-eagle3' if reads_states else 'draft-simple'} --spec-draft-model {file} "
        f"--spec-draft-n-max {length} --spec-draft-p-min 0"
    )


def _synthetic(draft: str, reads_states: bool, alive: Sequence[float], sample: Mapping[str, str]) -> dict[str, str]:
    """Files that make engines accept drafts at random, as often as recorded: for benchmarks, their texts mean nothing."""
    rates = [round(float(rate), 4) for rate in alive]
    vllm = {**_vllm(draft, reads_states, len(rates)), **sample, "rejection_sample_method": "synthetic"}
    vllm["synthetic_acceptance_rates"] = rates
    flag = f"--spec-synth-rates {','.join(f'{rate:g}' for rate in rates)}"
    return {
        "vllm_synthetic.json": json.dumps(vllm, indent=2) + "\n",
        "llama_cpp_synthetic.txt": f"{_llama_cpp(draft, reads_states, len(rates))} {flag}\n",
    }


def zero_note(lengths: Mapping[int, int]) -> str | None:
    """What engines do today where a schedule says K = 0, and the files that say 1 instead; None: it nowhere does."""
    zeros = [str(batch) for batch, length in sorted(lengths.items()) if not length]
    if not zeros or len(zeros) == len(lengths):
        return None
    return (
        f"K = 0 at batch size {', '.join(zeros)}: vLLM slows down near it (vllm#49548) or drafts all the same (vllm#51510), "
        "TensorRT-LLM accepts little after it (TensorRT-LLM#16888); vllm_k1.json and tensorrt_llm_k1.yaml draft one token there"
    )


def next_line(cfg: keys.Advise, overrides: Sequence[str], draft: str | None, batch: int) -> str:
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

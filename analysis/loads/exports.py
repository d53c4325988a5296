"""The advised draft lengths and the measured acceptance in the words of serving engines: files to start them with.

    transformers.json  `num_assistant_tokens` for `generate(assistant_model=...)`; or `prompt_lookup_num_tokens`
    vllm.json          a `--speculative-config`: the draft length by batch size as inclusive triples [from, to, K]
    sglang.txt, llama_cpp.txt  command-line flags
    sglang_adaptive.json  a `--speculative-adaptive-config`: candidate steps from a batch size on (EAGLE drafts)
    tensorrt_llm.yaml  a `--config` with `draft_len_schedule`: the draft length up to a batch size
    vllm_k1.json, tensorrt_llm_k1.yaml  the same with one token instead of none, where some batch size drafts none
    vllm_synthetic.json, llama_cpp_synthetic.txt  benchmarks whose drafts are accepted as often as the recorded ones
    toolkit.txt        overrides of this package's own decoding (`next_line` is the whole command)

All but transformers and vLLM's "probabilistic" draft greedily: their lengths and rates are of greedy drafts. Names are those of
vLLM 0.32.0, SGLang 0.5.23, TensorRT-LLM 1.4.0rc1, transformers 5.23 and llama.cpp b11434; the first and transformers were run.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis import keys
from toolkit.config import choices, compose, find, override, plain
from toolkit.drafts.folders import kind_in
from toolkit.drafts.kinds import DraftKind
from toolkit.files.atomic import write_text
from toolkit.files.shards import is_gguf

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
    p_min: tuple[int, float] | None = None,
) -> list[Path]:
    """Write the files; returns their paths.

    draft    of the advice; None: lengths are those of prompt lookup
    lengths, greedy  best fixed length by batch size, drafts sampled, or taken greedily (None: not simulated)
    advised  overrides of this package's own method
    alive    P(the first j drafted tokens are all accepted) for j = 1 .. K, drafts taken as engines do; empty: not known
    p_min    llama.cpp's longest draft and threshold, where these are better than a fixed length; None: they are not
    """
    length, greedy_first = lengths[min(lengths)], lengths if greedy is None else greedy
    kind = kind_in(draft)
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
    if "transformers" in kind.engines:
        files["transformers.json"] = json.dumps(transformers, indent=2) + "\n"
    if draft is not None:
        sample = {"draft_sample_method": "probabilistic" if greedy is None else "greedy"}
        if "vllm" in kind.engines:
            files |= _vllm_files(draft, kind, greedy_first, alive, sample)
        others = _other_engines(draft, kind, greedy_first, alive, p_min)
        files |= {name: others[name] for name in others if re.split(r"_k1|_synthetic|\.", name)[0] in kind.engines}
    for name in OPTIONAL - files.keys():  # of an earlier call, with other batch sizes
        (folder / name).unlink(missing_ok=True)
    return [write_text(folder / name, content) for name, content in files.items()]


def _schedules(lengths: Mapping[int, int]) -> dict[str, Mapping[int, int]]:
    """The draft lengths by batch size; where one of them is 0, also those with 1 there. By the end of a file's name."""
    at_least_one = {batch: max(length, 1) for batch, length in lengths.items()}
    floored = any(lengths.values()) and not all(lengths.values())
    return {"": lengths, "_k1": at_least_one} if floored else {"": lengths}


def _vllm_files(
    draft: str, kind: DraftKind, lengths: Mapping[int, int], alive: Sequence[float], sample: Mapping[str, str]
) -> dict[str, str]:
    """vLLM's files. The synthetic one accepts drafts at random, as often as recorded: its texts mean nothing."""
    configs: dict[str, dict[str, Any]] = {}
    for end, table in _schedules(lengths).items():
        most = max(table.values())
        config = _vllm(draft, kind, most)
        config |= {"num_speculative_tokens_per_batch_size": triples(table), **sample}
        configs[f"vllm{end}.json"] = config if most else {}
    if len(alive):
        config = {**_vllm(draft, kind, len(alive)), **sample, "rejection_sample_method": "synthetic"}
        config["synthetic_acceptance_rates"] = [round(float(rate), 4) for rate in alive]
        configs["vllm_synthetic.json"] = config
    return {name: json.dumps(config, indent=2) + "\n" for name, config in configs.items()}


def _vllm(draft: str, kind: DraftKind, most: int) -> dict[str, Any]:
    return {
        "method": kind.engines["vllm"],
        "model": draft,
        "num_speculative_tokens": most,
    }


def _tensorrt(draft: str, kind: DraftKind, ranges: Sequence[Sequence[int]]) -> str:
    """The YAML of a schedule: lengths hold up to their batch size, 0 beyond. Its first length has to be the largest."""
    most = ranges[0][2]
    if not most:
        return "# do not draft: start without speculative_config\n"
    upto = {last: min(length, most) for _, last, length in ranges}
    if ranges[-1][2] == 0:
        del upto[ranges[-1][1]]
    return (
        f"speculative_config:\n  decoding_type: {kind.engines.get('tensorrt_llm')}\n  max_draft_len: {most}\n"
        f"  speculative_model: {json.dumps(draft)}\n"
        f"  draft_len_schedule: {{{', '.join(f'{last}: {length}' for last, length in upto.items())}}}\n"
    )


def _other_engines(
    draft: str, kind: DraftKind, lengths: Mapping[int, int], alive: Sequence[float], p_min: tuple[int, float] | None
) -> dict[str, str]:
    """Files of TensorRT-LLM, SGLang and llama.cpp. Flags are those of the smallest batch size."""
    length = lengths[min(lengths)]
    files = {}
    for end, table in _schedules(lengths).items():
        files[f"tensorrt_llm{end}.yaml"] = _tensorrt(draft, kind, triples(table))
    if any(lengths.values()):
        steps = {str(first): {"candidate_steps": [length]} for first, _, length in triples(lengths)}
        files["sglang_adaptive.json"] = json.dumps(steps, indent=2) + "\n"
    if length:
        files["sglang.txt"] = (
            f"--speculative-algorithm {kind.engines.get('sglang')} "
            f"--speculative-draft-model-path {shlex.quote(draft)} --speculative-num-steps {length} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {length + 1}\n"
        )
    else:
        files["sglang.txt"] = "# do not draft: start without --speculative-algorithm\n"
    llama_cpp = "# do not draft: start without --spec-type"
    if p_min is not None:
        llama_cpp = _llama_cpp(draft, kind, *p_min)
    elif length:
        llama_cpp = _llama_cpp(draft, kind, length)
    files["llama_cpp.txt"] = f"{llama_cpp}\n"
    if len(alive):  # accepts drafts at random, as often as recorded: texts mean nothing
        rates = ",".join(f"{round(float(rate), 4):g}" for rate in alive)
        files["llama_cpp_synthetic.txt"] = f"{_llama_cpp(draft, kind, len(alive))} --spec-synth-rates {rates}\n"
    return files


def _llama_cpp(draft: str, kind: DraftKind, length: int, p_min: float = 0) -> str:
    file = shlex.quote(draft if is_gguf(draft) else f"{draft}.gguf")
    return (
        f"--spec-type {kind.engines.get('llama_cpp')} --spec-draft-model {file} "
        f"--spec-draft-n-max {length} --spec-draft-p-min {p_min:g}"
    )


def zero_note(lengths: Mapping[int, int]) -> str | None:
    """What engines do today where a schedule says K = 0, and the files that say 1 instead; None: it nowhere does."""
    zeros = [str(batch) for batch, length in sorted(lengths.items()) if not length]
    if not zeros or len(zeros) == len(lengths):
        return None
    return (
        f"K = 0 at batch size {', '.join(zeros)}: vLLM slows down near it (vllm#49548) or drafts all the same (vllm#51510), "
        "TensorRT-LLM accepts little after it (TensorRT-LLM#16888); vllm_k1.json and tensorrt_llm_k1.yaml draft one token there"
    )


def engine_notes(draft: str | None, lengths: Mapping[int, int]) -> list[str]:
    """What serving engines do otherwise than the files say: lengths of 0, and what is known of this draft in them."""
    kind, zeros = kind_in(draft), zero_note(lengths)
    lines = [zeros] if zeros else []
    if draft is not None and kind.cautions:
        lines += kind.part("cautions")(Path(draft), lengths.values())
    return lines


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

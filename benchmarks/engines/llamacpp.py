"""llama.cpp through xllamacpp: one mode in a process of its own, one prompt at a time. Needs neither torch nor this package.

    PYTHONPATH=SITE python benchmarks/engines/llamacpp.py MODEL.gguf PROMPTS.json MODE TOKENS OUT.csv [DRAFTED [TEMPERATURE]]

MODE: none, NGRAM_SIMPLE (its own prompt lookup), or a draft's GGUF file. A model of 4-bit weights computes much in few bits,
too: its texts and speeds are no other engine's. Beside OUT.csv OUT.jsonl has the answers, as `timings` counts them: tokens
drafted and accepted, in all.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path
from time import perf_counter


def main(model: str, prompts: str, mode: str, tokens: str, out: str, drafted: str = "", temperature: str = "0") -> None:
    """Decode, and write a line per prompt: tokens and seconds, its prompt included. drafted: at most, of a draft model."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 4096, 1, int(os.environ.get("OMP_NUM_THREADS", 2))
    kinds = xllamacpp.common_speculative_type
    if mode.endswith(".gguf"):
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        params.speculative.draft.mparams.path = mode
        if drafted:
            params.speculative.draft.n_max, params.speculative.draft.p_min = int(drafted), 0.0
    elif mode != "none":
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{mode}")]
    server = xllamacpp.Server(params)
    lines, answers = [], []
    for number, ids in enumerate([[1, 2, 3, 4], *json.loads(Path(prompts).read_text("utf-8"))]):
        started = perf_counter()
        request = {"prompt": ids, "max_tokens": int(tokens), "temperature": float(temperature), "cache_prompt": False}
        request |= {"return_tokens": True, "seed": number, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        answer = server.handle_completions(request)
        seconds = perf_counter() - started
        if number:  # the first one warms up
            lines.append([number - 1, answer["usage"]["completion_tokens"], seconds])
            answers.append(json.dumps(answer) + "\n")
    with Path(out).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["group", "tokens", "seconds"], *lines])
    Path(out).with_suffix(".jsonl").write_text("".join(answers), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

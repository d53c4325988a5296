"""llama.cpp on the questions of `make real`, through xllamacpp: one mode in a process of its own, one prompt at a time.

    PYTHONPATH=SITE python benchmarks/llamacpp.py MODEL.gguf PROMPTS.json MODE TOKENS OUT.csv

MODE: none, NGRAM_SIMPLE (its own prompt lookup), or a draft's GGUF file. Needs neither torch nor this package. Its weights are
of 4 bits, and so is much of its arithmetic: its texts and speeds are no other engine's.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from time import perf_counter


def main(model: str, prompts: str, mode: str, tokens: str, out: str) -> None:
    """Decode greedily, and write a line per prompt: tokens and seconds, its prompt included."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 4096, 1, 2
    kinds = xllamacpp.common_speculative_type
    if mode.endswith(".gguf"):
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        params.speculative.draft.mparams.path = mode
    elif mode != "none":
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{mode}")]
    server = xllamacpp.Server(params)
    lines = []
    for number, ids in enumerate([[1, 2, 3, 4], *json.loads(Path(prompts).read_text("utf-8"))]):
        started = perf_counter()
        request = {"prompt": ids, "max_tokens": int(tokens), "temperature": 0.0, "cache_prompt": False}
        answer = server.handle_completions(request)
        seconds = perf_counter() - started
        if number:  # the first one warms up
            lines.append([number - 1, answer["usage"]["completion_tokens"], seconds])
    with Path(out).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["group", "tokens", "seconds"], *lines])


if __name__ == "__main__":
    main(*sys.argv[1:])

"""llama.cpp through xllamacpp, one prompt at a time: python ask_xllamacpp.py SETTINGS < PROMPTS > ANSWERS.

Runs in the engine's environment, without torch or this package. SETTINGS is JSON: `model`, `max_tokens`, `temperature`, `first`
(the number of the first prompt), `source` (none, draft or lookup); of a draft `draft`, `num_drafted` and `p_min`; of its own
lookup `ngram`, [N, M]: tokens that agree, and tokens copied after them, where they are not its defaults; `stream`, if true: the
answers keep their prompts, and all chunks with the counts so far. PROMPTS is a JSON list of texts, token ids, messages or
requests with messages. Each answer is a line of JSON, as the server counts it, with `seconds` and `cpu_seconds` of the whole
answer. A model of 4-bit weights computes much in few bits, too: its texts and speeds are no other engine's.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter, process_time
from typing import Any

WARM_UP = 8  # tokens of an answer that is not counted
THREADS = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def main(settings: str) -> None:
    chosen, prompts = json.loads(settings), json.load(sys.stdin)
    server = started(chosen)
    for number, prompt in enumerate([[1, 2, 3, 4], *prompts], start=-1):  # the first one is not counted
        request = {"max_tokens": chosen["max_tokens"], "temperature": chosen["temperature"], "cache_prompt": False}
        request |= {"return_tokens": True, "seed": chosen["first"] + number, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        request |= {"max_tokens": WARM_UP} if number < 0 else {}
        begun, cpu = perf_counter(), process_time()
        if isinstance(prompt, dict) or isinstance(prompt[0], dict):
            handle, asked = server.handle_chat_completions, prompt if isinstance(prompt, dict) else {"messages": prompt}
        else:
            handle, asked = server.handle_completions, {"prompt": prompt}
        request = {**asked, **request}
        answer = streamed(handle, request) if chosen.get("stream") else handle(request)
        answer |= {"seconds": perf_counter() - begun, "cpu_seconds": process_time() - cpu, "threads": THREADS}
        if number >= 0:
            print(json.dumps(answer), flush=True)


def streamed(handle: Any, request: dict[str, Any]) -> dict[str, Any]:
    """An answer with its prompt and all its chunks, each with the sums of drafted and accepted tokens so far."""
    chunks: list[dict[str, Any]] = []
    handle({**request, "stream": True, "timings_per_token": True}, chunks.append)
    name = "prompt" if "prompt" in request else "messages"
    key = "prompt_token_ids" if name == "prompt" and isinstance(request[name], list) else name
    return {"timings": chunks[-1]["timings"], key: request[name], "stream": chunks}


def started(chosen: dict[str, Any]) -> Any:
    """A server with the model, and with what it drafts from."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = chosen["model"]
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 4096, 1, THREADS
    kinds, speculative = xllamacpp.common_speculative_type, params.speculative
    if chosen["source"] == "draft":
        speculative.types, draft = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE], speculative.draft
        draft.mparams.path, draft.n_max, draft.p_min = chosen["draft"], chosen["num_drafted"], chosen["p_min"]
    elif chosen["source"] == "lookup":
        speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        if "ngram" in chosen:
            speculative.ngram_simple.size_n, speculative.ngram_simple.size_m = chosen["ngram"]
    return xllamacpp.Server(params)


if __name__ == "__main__":
    main(*sys.argv[1:])

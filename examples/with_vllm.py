"""vLLM with a draft of yours and the draft lengths that `analysis.advise` writes: its counts beside the forecast.

python examples/with_vllm.py VLLM TARGET DRAFT PROMPTS.jsonl [KEY=VALUE...]

VLLM is the Python of an environment with vLLM 0.32.0 (`make engines ARGS="install vllm"` makes one for CPUs). Further words are
those of `analysis.advise`: costs=FILE.csv, prompts.limit=100. By hand one starts the server with --model TARGET
--speculative-config "$(cat ADVICE/exports/vllm.json)".
"""

import json
import sys
from pathlib import Path

from analysis import advise
from analysis.loads.engine_counts import read_counts
from benchmarks.engines.vllm_server import ask, started
from toolkit import config
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.models.pair import resolve
from toolkit.models.remote import remote_pair

TOKENS = 48


def main(vllm: str, target: str, draft: str, prompts: str, *words: str) -> None:
    target = str(resolve(target))  # vLLM reads folders, not GGUF files
    # How far to draft for one request at a time, and for eight.
    pair = [f"pair.target={target}", f"pair.draft={Path(draft).resolve()}", "prompts=jsonl", f"prompts.path={prompts}"]
    usual = ["prompts.limit=16", "batch_sizes=[1,8]", f"sampling.max_new_tokens={TOKENS}", "sampling.temperature=0"]
    settings = config.compose("advise", [*pair, *usual, *words])
    exports = advise.run(settings) / "exports"
    speculative, recorded = (read_json(exports / f"{name}.json") for name in ("vllm", "vllm_synthetic"))
    if not speculative:
        print("The advice is not to draft with this model. vLLM drafts one token all the same: its counts show why.")
        speculative = {**{key: recorded[key] for key in ("method", "model")}, "num_speculative_tokens": 1}

    print(f"vLLM: starting with {json.dumps(speculative)}; minutes on a CPU", flush=True)
    named = remote_pair(config.plain(settings.pair))  # without weights: vLLM has them
    sequences = [named.encode(prompt.content) for prompt in config.instantiate(settings.prompts).load()]
    answers = exports.parent / "answers.jsonl"
    options = ["--speculative-config", json.dumps(speculative)]
    with started(Path(vllm), target, options, exports.parent / "vllm.log") as server:
        ask(server, sequences, 0.0, TOKENS, answers)

    # What one sees: how often the first j drafted tokens were all accepted, in the recording and in vLLM.
    counts = read_counts(answers)
    counted = counts.accepted.sum(0) / counts.rounds  # one request at a time: every round drafted K
    print(f"{len(sequences)} questions, {counts.rounds} rounds in vLLM; the first j tokens all accepted:")
    for j, (forecast, share) in enumerate(zip(recorded["synthetic_acceptance_rates"], counted, strict=False), start=1):
        print(f"  j = {j}: forecast {forecast:.3f}, counted {share:.3f}")
    print(f"the same counts as advice: python -m analysis.advise responses={answers} cost_ratio=.1")


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except InputError as error:
        sys.exit(f"error: {error}")

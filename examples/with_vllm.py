"""vLLM with a draft of yours and the draft lengths that `analysis.advise` writes: its counts beside the forecast.

python examples/with_vllm.py VLLM TARGET DRAFT PROMPTS.jsonl [KEY=VALUE...]

VLLM is the Python of an environment with vLLM 0.32.0 (`make engines ARGS="install vllm"` makes one for CPUs). Further words are
those of `analysis.advise`: costs=FILE.csv, prompts.limit=100. The server is started as one starts it by hand:

    python -m vllm.entrypoints.openai.api_server --model TARGET --speculative-config "$(cat ADVICE/exports/vllm.json)"
"""

import json
import sys
from pathlib import Path

from analysis import advise
from analysis.loads.engine_counts import read_counts
from benchmarks.engines.vllm_server import ask, started
from toolkit import ModelPair, config
from toolkit.errors import InputError
from toolkit.models.pair import resolve

TOKENS = 48


def main(vllm: str, target: str, draft: str, prompts: str, *words: str) -> None:
    folder = Path("outputs/examples/vllm").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    target = str(resolve(target))  # vLLM reads folders, not GGUF files

    # How far to draft for one request at a time, and for eight.
    pair = [f"pair.target={target}", f"pair.draft={Path(draft).resolve()}"]
    usual = ["prompts=jsonl", f"prompts.path={prompts}", "prompts.limit=16", "batch_sizes=[1,8]"]
    greedy = [f"sampling.max_new_tokens={TOKENS}", "sampling.temperature=0"]
    settings = config.compose("advise", [*pair, *usual, *greedy, *words])
    exports = advise.run(settings) / "exports"
    speculative = (exports / "vllm.json").read_text("utf-8")
    if not json.loads(speculative):
        sys.exit("vLLM was not started: the advice is not to draft")

    print(f"vLLM: starting with {exports / 'vllm.json'}; minutes on a CPU", flush=True)
    questions = [prompt.content for prompt in config.instantiate(settings.prompts).load()]
    sequences = [ModelPair.from_pretrained(target).encode(question) for question in questions]
    answers = folder / f"{exports.parent.name}.jsonl"
    with started(Path(vllm), target, ["--speculative-config", speculative], folder / "vllm.log") as server:
        ask(server, sequences, 0.0, TOKENS, answers)

    # What one sees: how often the first j drafted tokens were all accepted, in the recording and in vLLM.
    counts = read_counts(answers)
    counted = counts.accepted.sum(0) / counts.rounds  # one request at a time: every round drafted K
    forecast = json.loads((exports / "vllm_synthetic.json").read_text("utf-8"))["synthetic_acceptance_rates"]
    print(f"{len(sequences)} questions, {counts.rounds} rounds in vLLM; the first j tokens all accepted:")
    for position in range(counts.longest):
        print(f"  j = {position + 1}: forecast {forecast[position]:.3f}, counted {counted[position]:.3f}")
    print(f"the same counts as advice: python -m analysis.advise responses={answers} cost_ratio=.1")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except InputError as error:
        sys.exit(f"error: {error}")

"""Replay against live decoding: do they agree, and how much faster is it?

python -m benchmarks.replaying speed       1,000 policies on 150 texts of 300 tokens
python -m benchmarks.replaying agreement   free-running live decoding against replay, per domain and policy
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from analysis.replay.policies import replay, sweep_levels
from analysis.replay.tally import Replayed
from benchmarks.recorded import reading, record
from data_gen.frozen import load_frozen
from data_gen.recording import Recorder
from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.sampling import draw, row_generator
from toolkit.session import TabularModel
from toolkit.stopping import Confidence, Tail
from toolkit.types import Generation

DOMAINS = ("instruct", "math", "code")
SAMPLINGS = {
    "T = 1": Sampling(max_new_tokens=96, seed=1),
    "T = .5, top-k 50, top-p .95": Sampling(temperature=0.5, top_k=50, top_p=0.95, max_new_tokens=96, seed=1),
}
POLICIES = {
    "fixed 4": ("speculative", ["policy.num_drafted=4"]),
    "fixed 8": ("speculative", ["policy.num_drafted=8"]),
    "SpecDec++ h=.3": ("specdec_pp", ["policy.threshold=0.3", "max_drafted=14"]),
    "SpecDec++ h=.7": ("specdec_pp", ["policy.threshold=0.7", "max_drafted=14"]),
    "confidence .4": ("confidence", ["policy.threshold=0.4", "max_drafted=14"]),
    "heuristic": ("heuristic", ["max_drafted=14"]),
    "rate": ("rate", ["max_drafted=14"]),
}
MAX_DRAFTED, LEVEL = 14, 0.01
COUNTS = ("num_draft_calls", "num_target_calls", "num_discarded")


def speed(texts: int = 150, length: int = 300, policies: int = 1000, seed: int = 0) -> str:
    """1,000 threshold policies on 150 texts of 300 tokens, and what recording them took; one thread."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    target = TabularModel.random(16, 1, generator, sharpness=2.0)
    noise = torch.randn(16, 16, generator=generator, dtype=torch.float64)
    pair = ModelPair(target=target, draft=TabularModel((target.probs.log() + noise).softmax(-1)), end_ids=())
    written = [_walk(target, length, row) for row in range(texts)]
    recorder = Recorder(pair, Sampling(max_new_tokens=length), 20)
    trace = recorder.record_all([([1], text) for text in written], range(texts))
    levels = np.linspace(0.01, 0.99, policies // 2).tolist()
    seconds = []
    for _ in range(5):
        began = perf_counter()
        found = sweep_levels(trace, Confidence(), levels) + sweep_levels(trace, Tail(), levels)
        seconds.append(perf_counter() - began)
    assert len(found) == policies // 2 * 2
    began = perf_counter()
    for level in (0.1, 0.2, 0.3):
        replay(trace, config.method("svip", [f"policy.threshold={level}"]).bind(pair).policy)
    single = (perf_counter() - began) / 3
    began = perf_counter()
    live = config.method("confidence", ["policy.threshold=0.5"])
    decode(pair, [[1]] * texts, live, Sampling(max_new_tokens=length), batch_size=32)
    decoded = perf_counter() - began
    rolled = (trace.num_steps - trace.num_positions) / trace.num_positions
    return " ".join([
        f"{len(found)} policies on {texts} texts x {length} tokens: {np.median(seconds):.1f} s (median of 5,",
        f"{min(seconds):.1f} to {max(seconds):.1f}), one thread. One policy replayed round by round, as those with a",
        f"memory are: {single:.2f} s. One policy decoded live on as many texts, batches of 32: {decoded:.0f} s, so",
        f"{len(found)} of them take about {decoded * len(found) / 3600:.1f} hours. The model is a table here and costs",
        f"nothing. Recording: one target position and {1 + rolled:.1f} draft positions per token",
        f"(mean acceptance {trace.chance.mean():.2f}, roll-outs of up to {trace.max_drafted - 1}).",
    ])  # fmt: skip


def _walk(model: TabularModel, length: int, row: int) -> list[int]:
    text, generator = [1], row_generator(7, row)
    for _ in range(length):
        text.append(int(torch.multinomial(model.probs[text[-1]], 1, generator=generator)))
    return text[1:]


def agreement(num_prompts: int = 400) -> str:
    """Free-running live decoding against replay: mean counts per prompt, and whether they differ at 1 % (Holm)."""
    pair = ModelPair.toy()
    lines: list[str] = []
    right: list[np.ndarray] = []
    wrong: list[np.ndarray] = []
    for domain in DOMAINS:
        prompts = [example.prompt for example in load_frozen(domain, "test")[:num_prompts]]
        for label, sampling in SAMPLINGS.items():
            plain = decode(pair, prompts, config.method("autoregressive"), replace(sampling, seed=2), batch_size=32)
            trace, control = (record(pair, plain, sampling, MAX_DRAFTED, kind=kind) for kind in (Recorder, Uncoupled))
            for name, (method_name, overrides) in POLICIES.items():
                method = config.method(method_name, overrides)
                live = decode(pair, prompts, method, sampling, batch_size=32)
                policy = reading(pair, method.bind(pair).policy)
                replayed = replay(trace, policy)
                right.append(differ(live, replayed))
                wrong.append(differ(live, replay(control, policy)))
                means = [f"{_live(live, c).mean():.2f} / {replayed.counts[c].mean():.2f}" for c in COUNTS]
                lines.append(f"| {domain} | {label} | {name} | {' | '.join(means)} | {right[-1].min():.3f} |")
    p_values = np.concatenate(right)
    found, control_found = rejected(p_values), rejected(np.concatenate(wrong))
    head = ["| domain | sampling | policy | draft forwards, live / replay | target forwards | discarded | smallest p |",
            "|---|---|---|---:|---:|---:|---:|"]  # fmt: skip
    return "\n".join([
        *head, *lines, "",
        f"{found} of {len(p_values)} comparisons differ at {LEVEL:.0%} after Holm's correction. With acceptance draws "
        f"that do not know the text (negative control): {control_found} of {len(p_values)}.",
    ])  # fmt: skip


class Uncoupled(Recorder):
    """Acceptance draws that do not know the text: made at the text's mean rate, roll-outs behind their rejections. Wrong."""

    def _decide(self, text: Any, p: Tensor, q: Tensor) -> None:
        super()._decide(text, p, q)
        emitted = torch.tensor(text.produced, device=p.device)
        text.accepted = text.uniforms[:, 0].to(p.device) < text.chance.mean()
        text.drafted = torch.where(text.accepted, emitted, draw(q, text.uniforms[:, 1].to(p.device)))


def differ(live: list[Generation], replayed: Replayed) -> np.ndarray:
    """p-values [counts] that the mean counts per prompt are the same; two samples of texts for the same prompts, paired."""
    gaps = [_live(live, name) - replayed.counts[name] for name in COUNTS]
    return np.array([stats.ttest_1samp(gap, 0).pvalue if gap.any() else 1.0 for gap in gaps])


def rejected(p_values: np.ndarray, level: float = LEVEL) -> int:
    """How many hypotheses Holm's procedure rejects."""
    ordered = np.sort(p_values)
    passed = ordered > level / np.arange(len(ordered), 0, -1)
    return int(passed.argmax()) if passed.any() else len(ordered)


def _live(live: list[Generation], name: str) -> np.ndarray:
    return np.array([getattr(generation.counts, name) for generation in live], dtype=float)


def main() -> None:
    """Print one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "agreement"])
    parser.add_argument("--prompts", type=int, default=400)
    arguments = parser.parse_args()
    print(speed() if arguments.what == "speed" else agreement(arguments.prompts))


if __name__ == "__main__":
    main()

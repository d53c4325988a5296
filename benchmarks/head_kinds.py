"""What heads gain from earlier layers, from whole rounds under block verification, and from earlier positions.

    python -m benchmarks.head_kinds --part 0.2      a small version: a fifth of the texts and prompts, ten minutes

The evidence page `head_kinds` uses half of the texts and prompts. Heads of one table learn from the same texts, with the
training of `benchmarks.head_inputs`, and are judged on frozen test prompts.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.replay.head_scores import drawn_samples
from analysis.replay.policies import sweep_levels
from analysis.replay.recorded_heads import scorer_of, threshold_policy, with_logits
from analysis.tables.standing import gain_over
from benchmarks.head_inputs import BOOTSTRAP, EPOCHS, learned, scores_of
from benchmarks.head_recordings import FOLDER, SLICED_SPLITS, SLICED_TEXTS, judging, training, training_texts
from benchmarks.standing import DOMAINS, MAX_DRAFTED, SAMPLING, Array
from data_gen import mix
from data_gen.frozen import load_frozen
from toolkit import ModelPair, metrics
from toolkit.acceptance import AcceptanceHead, PrereadEstimator, PrereadHead
from toolkit.acceptance.inputs import Inputs
from toolkit.acceptance.preread import embedding_table
from toolkit.config import compose
from toolkit.decoding import Method, decode
from toolkit.stopping import Rate
from toolkit.teacher import hidden_size
from toolkit.trace import Trace
from toolkit.trace.rounds import Geometry, step_at
from toolkit.training import MixedData
from toolkit.training.recorded_blocks import BlockStates
from toolkit.training.recorded_positions import TracedStates
from toolkit.training.states import States
from toolkit.types import Counts
from toolkit.verification.rules.block import Block
from toolkit.verification.rules.rejection import Rejection

PART = 0.5  # of the texts and prompts, on the evidence page
CHAIN, COST = 8, 0.2  # most tokens of a chain to learn from; c
LAYERS = (0,)  # the toy draft has one layer: its embedding is the only earlier state
LEVELS = [0.05 * i for i in range(1, 20)]
SURVIVAL = {
    "the state that has read it (as published)": Inputs(),
    "+ its own position": Inputs(1),
    "+ its own and one more": Inputs(2),
    "+ depth in the round": Inputs(round_depth=8),
    "+ its own position, depth": Inputs(1, round_depth=8),
}


@dataclass(frozen=True)
class Scale:
    """How many training texts there are per domain, and how many prompts heads are judged on."""

    texts: Mapping[str, int] = field(default_factory=lambda: dict(SLICED_TEXTS))
    splits: Mapping[str, int] = field(default_factory=lambda: dict(SLICED_SPLITS))

    def part(self, share: float) -> Scale:
        """A smaller one."""
        return Scale(*({k: max(round(v * share), 4) for k, v in one.items()} for one in (self.texts, self.splits)))

    def recorded(self, *more: str) -> Trace:
        """Training texts of all domains with states."""
        return training("toy/draft", self.texts, more, self.texts)

    def judging(self, pair: ModelPair, split: str = "test") -> dict[str, Trace]:
        """Recordings of frozen prompts, by domain."""
        return {d: judging(pair, d, split, self.splits) for d in DOMAINS}


def whole(states: States) -> tuple[Tensor, Tensor]:
    """Features in half precision, and labels, of all examples."""
    parts = [states.batch(part.tolist()) for part in torch.arange(states.num_examples).split(64)]
    return torch.cat([one.hidden.half() for one in parts]), torch.cat([one.labels for one in parts])


def fitted(head: Any, states: States, epochs: int) -> Any:
    """A head trained on all examples of some states."""
    features, labels = whole(states)
    return learned(head, lambda part: features[part].float(), labels, epochs)


@torch.inference_mode()
def judged(head: PrereadHead, states: TracedStates | BlockStates) -> str:
    """Share and AUROC of a head's first output on all positions of a trace, given as states."""
    features, labels = whole(states)
    logits = torch.cat([head(part.float())[:, 0] for part in features.split(16384)])
    return scores_of(logits, labels[:, 0], _texts(states.trace))


def layers_table(scale: Scale, epochs: int) -> list[str]:
    """Pre-read heads with and without the earlier layer."""
    lines = table_head("inputs")
    for layers in ((), LAYERS):
        pair = ModelPair.from_pretrained("toy/target", "toy/draft", draft_layers=layers)
        table, size = embedding_table(pair.draft), hidden_size(pair.draft)
        trace = scale.recorded(*([f"+pair.draft_layers={list(layers)}"] if layers else []))
        test = scale.judging(pair)
        for earlier in (0, 2):
            torch.manual_seed(0)
            head = PrereadHead(size, table.shape[1], earlier=earlier, layers=layers)
            fitted(head, TracedStates(trace, range(trace.num_texts), table, head.inputs), epochs)
            texts = [judged(head, TracedStates(one, range(one.num_texts), table, head.inputs)) for one in test.values()]
            lines.append(f"| {earlier} earlier positions, layers {[*layers, -1]} | {' | '.join(texts)} |")
            print(lines[-1], flush=True)
    return lines


def blocks_table(scale: Scale, epochs: int) -> list[str]:
    """Heads of whole rounds against products of single tokens' chances as P_k; then tokens per target-forward time, live."""
    pair = ModelPair.toy()
    table, size, test = embedding_table(pair.draft), hidden_size(pair.draft), scale.judging(pair)
    trace = scale.recorded("upper_bound=true", f"max_drafted={CHAIN}")
    lines, heads = table_head("P_k by"), {}
    for name, reads, output in (
        ("product of single tokens' chances", Inputs(2), "token"),
        ("head of whole rounds", Inputs(2), "block"),
        ("head of whole rounds, depth", Inputs(2, round_depth=CHAIN), "block"),
    ):
        torch.manual_seed(0)
        heads[name] = head = PrereadHead(size, table.shape[1], **reads.read(), output=output)
        kind = BlockStates if output == "block" else TracedStates
        fitted(head, kind(trace, range(trace.num_texts), table, reads), epochs)
        texts = []
        for one in test.values():
            states = BlockStates(one, range(one.num_texts), table, reads)
            texts.append(judged(head, states) if output == "block" else _judged_product(head, one, states, pair))
        lines.append(f"| {name} | {' | '.join(texts)} |")
        print(lines[-1], flush=True)
    return [*lines, "", *_live(heads, pair, scale)]


def products_at(logits: Tensor, trace: Trace, depths: Tensor) -> Tensor:
    """Products [P] of a head's chances, from logits [S], over the first tokens of every start; depths [P]: how many."""
    said, geometry, starts = torch.sigmoid(logits.double()), Geometry.of(trace), torch.arange(trace.num_positions)
    product, chosen = torch.ones(len(starts), dtype=torch.float64), torch.zeros(len(starts), dtype=torch.float64)
    for depth in range(1, trace.max_drafted + 1):
        product = product * said[step_at(trace, geometry, starts, depth)[0]]
        chosen = torch.where(depths == depth, product, chosen)
    return chosen


def _judged_product(head: PrereadHead, trace: Trace, states: BlockStates, pair: ModelPair) -> str:
    """The running product of a head's chances at the steps that `states` chose, judged as P_k."""
    logits = with_logits(trace, "x", scorer_of(head, pair.draft)).estimates["x"][:, 0]
    chosen = products_at(logits, trace, states.depths)
    return scores_of(torch.logit(chosen, eps=1e-6), states.labels[:, 0], _texts(trace))


def _live(heads: Mapping[str, PrereadHead], pair: ModelPair, scale: Scale) -> list[str]:
    """The rate rule with each head, lambda tracked: tokens per target-forward time, and over the first line's."""
    lines = ["| rate rule, c = 0.2 | " + " | ".join(f"{d} | over the first" for d in DOMAINS) + " |"]
    lines.append("|---|" + "---:|" * (2 * len(DOMAINS)))
    first: dict[str, Array] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, head) in enumerate([(next(iter(heads)), heads[next(iter(heads))]), *heads.items()]):
            folder = head.save(Path(scratch) / str(number))
            rule = Block() if number else Rejection()
            method = Method("m", Rate(PrereadEstimator(str(folder)), COST), rule, max_drafted=MAX_DRAFTED)
            texts = []
            for domain in DOMAINS:
                prompts = [one.prompt for one in load_frozen(domain, "test")[: scale.splits["test"]]]
                found = decode(pair, prompts, method, SAMPLING, batch_size=64)
                counts = np.array(
                    [[getattr(g.counts, n) for n in Counts.__dataclass_fields__] for g in found], dtype=float
                )
                first.setdefault(domain, counts)
                rate = metrics.throughput(Counts.of([one for g in found for one in g.rounds]), COST)
                gain, low, high = gain_over(counts, first[domain], COST, BOOTSTRAP).values()
                texts.append(f"{rate:.3f} | {gain:+.1%} [{low:+.1%}, {high:+.1%}]" if number else f"{rate:.3f} | ")
            lines.append(f"| {'block' if number else 'token'} verification, {name} | {' | '.join(texts)} |")
            print(lines[-1], flush=True)
    return lines


def survival_table(scale: Scale, epochs: int) -> list[str]:
    """Acceptance heads, learned from mixed texts: share and AUROC, and throughput at the level that is best on dev."""
    pair = ModelPair.toy()
    folders = [str(training_texts(domain, count)) for domain, count in scale.texts.items()]
    folder = mix.run(compose("mix", [f"responses=[{','.join(folders)}]", f"paths.root_dir={FOLDER}", "batch_size=32"]))
    size, test, dev = hidden_size(pair.draft), scale.judging(pair), scale.judging(pair, "dev")
    lines = table_head("acceptance head reads", "speed")
    for name, reads in SURVIVAL.items():
        torch.manual_seed(0)
        head = AcceptanceHead(size, depth=3, embedding_size=embedding_table(pair.draft).shape[1], **reads.read())
        data = MixedData(folder, pair.draft, features="online")
        data.read_by(head)
        data.setup()
        fitted(head, data.states["train"], epochs)
        texts = []
        for domain in DOMAINS:
            scored = [with_logits(one[domain], "x", scorer_of(head, pair.draft)) for one in (dev, test)]
            texts.append(scores_of(*drawn_samples(scored[1], scored[1].estimates["x"], preread=False)))
            policy = threshold_policy(head, "x", corrected=True)
            rates = [metrics.throughput(one.total, COST) for one in sweep_levels(scored[0], policy, LEVELS)]
            (best,) = sweep_levels(scored[1], policy, [LEVELS[int(np.argmax(rates))]])
            texts.append(f"{metrics.throughput(best.total, COST):.3f}")
        lines.append(f"| {name} | {' | '.join(texts)} |")
        print(lines[-1], flush=True)
    return lines


def table_head(first: str, *more: str) -> list[str]:
    """The first two lines of a table with share and AUROC per domain."""
    names = [f"{d}: share | AUROC" + "".join(f" | {one}" for one in more) for d in DOMAINS]
    return [f"| {first} | {' | '.join(names)} |", "|---|" + "---:|" * ((2 + len(more)) * len(DOMAINS))]


def head_kinds() -> str:
    """What heads gain by earlier layers, by whole rounds under block verification, and acceptance heads by more inputs."""
    torch.set_num_threads(1)
    return "\n".join(kinds(Scale().part(PART)))


def kinds(scale: Scale | None = None, epochs: int = EPOCHS) -> Sequence[str]:
    """All three tables."""
    scale = scale or Scale()
    texts = ", ".join(f"{domain} {count}" for domain, count in scale.texts.items())
    about = f"""\
Training texts: {texts}; {scale.splits["test"]} test and {scale.splits["dev"]} dev prompts per domain; {epochs} epochs. The toy
draft has one layer, so the only earlier state is its embedding of the token read last."""
    parts = ["## Earlier layers", "", about, "", *layers_table(scale, epochs)]
    parts += ["", "## Whole rounds under block verification", "", _about_blocks(), "", *blocks_table(scale, epochs)]
    return [*parts, "", "## Acceptance heads", "", _about_survival(), "", *survival_table(scale, epochs)]


def _about_blocks() -> str:
    return f"""\
Labels are P_k of recorded chains, k <= {CHAIN} in training and {MAX_DRAFTED} in the test. All heads read two earlier positions.
Below, decoded: lambda is tracked, c = {COST:g}, rounds have 1 to {MAX_DRAFTED} tokens."""


def _about_survival() -> str:
    return f"""\
SpecDec++ heads of depth 3, w_rej = 1, on mixed texts (r = .15); judged on drawn tokens behind accepted text, as a round's first
token. Speed: tokens per target-forward time at c = {COST:g}, replayed with the level that is best on dev."""


def _texts(trace: Trace) -> Tensor:
    return torch.repeat_interleave(torch.arange(trace.num_texts), trace.lengths())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What further inputs and outputs of heads buy.")
    parser.add_argument("--part", type=float, default=1.0, help="share of the texts and prompts, above 0 and at most 1")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of every training")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("\n".join(kinds(Scale().part(given.part), given.epochs)))

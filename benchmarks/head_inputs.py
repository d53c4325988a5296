"""What each input of a pre-read head adds: log loss and AUROC by input, then the rate rule's throughput with the best inputs.

Heads of one kind learn from the same training texts, in the same order. They differ in their inputs. The widest `Inputs`
hold those of all other heads as columns, so features are computed once.

Shapes: P positions, F features of the widest inputs, T texts, R bins of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from analysis.figures.plots import label
from analysis.replay import dynamic_program, upper_bound
from analysis.replay.policies import replay_starts
from analysis.replay.recorded_heads import RecordedScorer, with_logits
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.grid import UPPER_BOUND
from analysis.tables.standing import gain_over, standing
from benchmarks.head_recordings import (
    SLICED_SPLITS,
    SLICED_TEXTS,
    SPLITS,
    judging,
    sliced_draft,
    training,
)
from benchmarks.standing import COSTS, DOMAINS, FIXED, MAX_DRAFTED, Array, Counted
from toolkit import ModelPair
from toolkit.acceptance import PrereadEstimator, PrereadHead
from toolkit.acceptance.calibration.scores import auroc, label_entropies, log_losses
from toolkit.acceptance.folder import load_for
from toolkit.acceptance.inputs import NUM_EARLIER_STATISTICS, NUM_LIKELIHOOD, Inputs
from toolkit.acceptance.preread import PrereadScorer, embedding_table
from toolkit.acceptance.saved import SavedHead
from toolkit.stopping import Bounded, Rate
from toolkit.trace import Trace, join
from toolkit.trace.rounds import Geometry
from toolkit.trace.step import RecordedStep
from toolkit.training import WeightedBCE
from toolkit.training.recorded_positions import TracedStates
from toolkit.training.schedule import cosine
from toolkit.types import DraftStep

WIDEST = Inputs(4, likelihood=True, round_depth=8)
TODAY = "the newest position (today's inputs)"
VARIANTS = {
    TODAY: Inputs(),
    "+ 1 earlier position": Inputs(1),
    "+ 2": Inputs(2),
    "+ 4": Inputs(4),
    "+ 2, tokens alone": Inputs(2, earlier_states=False, earlier_statistics=False),
    "+ 2, states alone": Inputs(2, earlier_tokens=False, earlier_statistics=False),
    "+ 2, statistics alone": Inputs(2, earlier_states=False, earlier_tokens=False),
    "+ likelihood of the text so far": Inputs(likelihood=True),
    "+ depth in the round": Inputs(round_depth=8),
    "+ 2, depth in the round": Inputs(2, round_depth=8),
}
BATCH, RATE, DECAY = 2048, 2.5e-3, 0.01
EPOCHS = 3  # of the table of inputs; BEST_EPOCHS of the head that is decoded with
BEST, BEST_INPUTS, BEST_EPOCHS = "rate, best new head", Inputs(2), 6
SHIPPED, RETRAINED = "rate, shipped head", "rate, today's inputs, same training"
PROGRAM = "DP value of the best new head (cross-fitted)"
SIZES = {"width": 512, "depth": 2, "dropout": 0.2}
BINS, BOOTSTRAP = 1024, Bootstrap(1000)
WANTED = (0.75, 0.75, 0.6)  # of the way to the upper bound, by domain
Head = TypeVar("Head", bound=SavedHead)
Shares = dict[tuple[float, str], list[float]]  # by cost ratio and policy, in the order of the domains


@dataclass(frozen=True)
class Examples:
    """Features [P, F] of the widest inputs in half precision, labels [P, 2], and the text of each position [P]."""

    features: Tensor
    labels: Tensor
    text: Tensor

    @classmethod
    def of(cls, trace: Trace, table: Tensor) -> Examples:
        """All positions of a trace."""
        states = TracedStates(trace, range(trace.num_texts), table, WIDEST)
        parts = [states.batch(part.tolist()) for part in torch.arange(trace.num_texts).split(64)]
        text = torch.repeat_interleave(torch.arange(trace.num_texts), trace.lengths())
        return cls(torch.cat([p.hidden.half() for p in parts]), torch.cat([p.labels for p in parts]), text)


def columns(inputs: Inputs, hidden_size: int, embedding_size: int) -> Tensor:
    """Where the features of some inputs are among those of the widest."""
    newest = Inputs().size(hidden_size, embedding_size)
    parts = {"present": 1, "states": hidden_size, "tokens": embedding_size, "statistics": NUM_EARLIER_STATISTICS}
    kept = {
        "present": True,
        "states": inputs.earlier_states,
        "tokens": inputs.earlier_tokens,
        "statistics": inputs.earlier_statistics,
    }
    found, at = list(range(newest)), newest
    for back in range(WIDEST.earlier, 0, -1):
        for name, size in parts.items():
            found += range(at, at + size) if back <= inputs.earlier and kept[name] else ()
            at += size
    found += range(at, at + NUM_LIKELIHOOD) if inputs.likelihood else ()
    found += range(at + NUM_LIKELIHOOD, at + NUM_LIKELIHOOD + WIDEST.round_depth) if inputs.round_depth else ()
    return torch.tensor(found)


def fitted(
    inputs: Inputs, examples: Examples, table: Tensor, hidden_size: int, epochs: int, **sizes: float
) -> PrereadHead:
    """A pre-read head trained on all examples."""
    torch.manual_seed(0)
    head = PrereadHead(hidden_size, table.shape[1], **{**vars(inputs), **sizes})  # type: ignore[arg-type]
    chosen = columns(inputs, hidden_size, table.shape[1])
    return learned(head, lambda part: examples.features[part][:, chosen].float(), examples.labels, epochs)


def learned(head: Head, features_of: Callable[[Tensor], Tensor], labels: Tensor, epochs: int) -> Head:
    """The head's last state: AdamW with a cosine, weighted BCE with weights of 1. Labels [P] or [P, O]."""
    count, every = len(labels), labels
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, weight_decay=DECAY)
    batches = [part for _ in range(epochs) for part in torch.randperm(count).split(BATCH)]
    schedule, loss = cosine(optimizer, len(batches)), WeightedBCE()
    for part in batches:
        labels = every[part]
        known = ~labels.isnan()
        total, weight = loss(head(features_of(part))[known], labels[known])
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        schedule.step()
    return head.eval().requires_grad_(False)


@torch.inference_mode()
def scores(head: PrereadHead, examples: Examples, table: Tensor) -> str:
    """For drawn tokens: share of the way from the prior's log loss to perfect knowledge, and AUROC, with intervals."""
    chosen = columns(head.inputs, head.hidden_size, table.shape[1])
    parts = [head(part[:, chosen].float())[:, 0] for part in examples.features.split(16384)]
    return scores_of(torch.cat(parts), examples.labels[:, 0], examples.text)


def scores_of(logits: Tensor, labels: Tensor, text: Tensor) -> str:
    """The same of logits, labels and texts [n] each."""
    logits, labels = logits.double(), labels.double()
    sums = [torch.ones_like(labels), labels, log_losses(logits, labels), label_entropies(labels)]
    size = int(text.max()) + 1
    totals = torch.stack([torch.bincount(text, values, size) for values in sums], 1)
    edges = torch.quantile(
        logits[torch.linspace(0, len(logits) - 1, 20_000).long()], torch.linspace(0, 1, BINS).double()
    )
    place = text * (BINS + 1) + torch.searchsorted(edges, logits)
    ranks = [torch.bincount(place, w, size * (BINS + 1)).view(size, -1) for w in (labels, 1 - labels)]
    values = torch.cat([totals, *ranks], 1).numpy()
    drawn, whole = BOOTSTRAP.totals(values), values.sum(0, keepdims=True)
    texts = []
    for measure, form in ((_share, "{:.1%}"), (_auroc, "{:.3f}")):
        low, high = BOOTSTRAP.interval(measure(drawn))
        texts.append(f"{form.format(measure(whole)[0])} [{form.format(low)}, {form.format(high)}]")
    return " | ".join(texts)


def _share(totals: Array) -> Array:
    """The share of the way from the prior's log loss to the entropy of the labels, from sums [n, ...]."""
    count, accepted, loss, least = totals[:, :4].T
    rate = accepted / count
    prior = -count * (rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    found: Array = (prior - loss) / (prior - least)
    return found


def _auroc(totals: Array) -> Array:
    parts = torch.from_numpy(totals[:, 4:]).split(BINS + 1, 1)
    return np.array([float(auroc(accepted, rejected)) for accepted, rejected in zip(*parts, strict=True)])


def inputs_table(examples: Examples, judged: Mapping[str, Examples], table: Tensor) -> list[str]:
    """One line per set of inputs."""
    lines = ["| inputs | features | " + " | ".join(f"{d}: share | AUROC" for d in judged) + " |"]
    lines.append("|---|---:|" + "---:|" * (2 * len(judged)))
    hidden_size = table.shape[1]
    for name, inputs in VARIANTS.items():
        head = fitted(inputs, examples, table, hidden_size, EPOCHS)
        texts = [scores(head, one, table) for one in judged.values()]
        lines.append(f"| {name} | {inputs.size(hidden_size, hidden_size)} | {' | '.join(texts)} |")
        print(lines[-1], flush=True)
    return lines


def counted(heads: Mapping[str, PrereadHead], dev: Trace, test: Trace, table: Tensor, cost_ratio: float) -> Counted:
    """What the rate rule counts on the test texts with each head, at the price solved on dev; fixed K and upper bound."""
    k, _ = upper_bound.best_fixed(dev, cost_ratio, 14)
    found = {FIXED: upper_bound.fixed(test, 14)[k].per_text}
    for name, head in heads.items():
        scorer, recorded = PrereadScorer(head, table), RecordedScorer(name)
        scored = [with_logits(trace, name, scorer) for trace in (dev, test)]
        policy = Rate(PrereadEstimator(name, scorer=recorded, log_w_rej=head.log_w_rej), cost_ratio)
        solved = upper_bound.solve_policy(scored[0], policy, cost_ratio)
        found[name] = replay_starts(scored[1], Bounded(replace(policy, rate=solved.price), 1, MAX_DRAFTED)).per_text
        if name == BEST:
            both = join([replace(trace, hidden=None) for trace in scored])
            seen = dynamic_program.head_inputs(both, Geometry.of(both), policy.estimator, MAX_DRAFTED)
            best = dynamic_program.best_policy(both, seen, cost_ratio)
            found[PROGRAM] = best.replayed.per_text[dev.num_texts :]
    found[UPPER_BOUND] = upper_bound.true_probability(test, cost_ratio, min_drafted=1).replayed.per_text
    return found


def throughput_table(
    heads: Mapping[str, PrereadHead], dev: Mapping[str, Trace], test: Mapping[str, Trace], table: Tensor
) -> tuple[list[str], Shares]:
    """One line per cost ratio and policy: throughput, and share of the way from the best fixed K to the upper bound.

    Beside it the shares of every policy, per cost ratio and domain.
    """
    shares: Shares = {}
    lines = ["| c | policy | " + " | ".join(f"{d} | share" for d in dev) + " |", "|---|---|" + "---:|" * (2 * len(dev))]
    for cost_ratio in COSTS:
        every = {d: counted(heads, dev[d], test[d], table, cost_ratio) for d in dev}
        names = list(every[next(iter(dev))])
        stood = {
            d: standing(np.stack([one[n] for n in names], 1), names, FIXED, cost_ratio, BOOTSTRAP).set_index("method")
            for d, one in every.items()
        }
        for name in names:
            texts = []
            for one in stood.values():
                row = one.loc[name]
                low, high = row.upper_bound_share_low, row.upper_bound_share_high
                shares.setdefault((cost_ratio, name), []).append(row.upper_bound_share)
                share = f"{row.upper_bound_share:.0%}" + (f" [{low:.0%}, {high:.0%}]" if low < high else "")
                texts.append(f"{row.throughput:.3f} | {share}")
            lines.append(f"| {cost_ratio:g} | {label(name)} | {' | '.join(texts)} |")
            print(lines[-1], flush=True)
        for other in (SHIPPED, RETRAINED):
            if other in heads:
                gains = [_over(one[BEST], one[other], cost_ratio) for one in every.values()]
                lines.append(
                    f"| {cost_ratio:g} | *{BEST}, over {other.removeprefix('rate, ')}* | {' | | '.join(gains)} | |"
                )
    return lines, shares


def _over(mine: Array, theirs: Array, cost_ratio: float) -> str:
    ratio, low, high = gain_over(mine, theirs, cost_ratio, BOOTSTRAP).values()
    return f"{ratio:+.1%} [{low:+.1%}, {high:+.1%}]"


@torch.inference_mode()
def milliseconds(head: PrereadHead, table: Tensor, hidden_size: int, rounds: int = 500) -> float:
    """The time of one score of one row on one thread, features included; earlier positions are given."""
    before = None
    if head.inputs.num_earlier:
        trace = judging(ModelPair.toy(), DOMAINS[0], "dev")
        before = RecordedStep(trace, 1, torch.tensor([6])).earlier(head.inputs.num_earlier)
        before = replace(before, hidden=before.hidden[..., :hidden_size])
    logits = torch.randn(1, len(table))
    step = DraftStep(1, logits, logits.softmax(-1), torch.randn(1, hidden_size), torch.tensor([3]), before=before)
    scorer = PrereadScorer(head, table)
    scorer(step)
    times = []
    for _ in range(rounds):
        started = perf_counter()
        scorer(step)
        times.append(perf_counter() - started)
    return 1000 * sorted(times)[rounds // 2]


def inputs() -> str:
    """What a pre-read head reads, what each input buys, and how far the best head brings the rate rule."""
    torch.set_num_threads(1)
    pair = ModelPair.toy()
    table = embedding_table(pair.draft)
    dev, test = ({d: judging(pair, d, split) for d in DOMAINS} for split in SPLITS)
    examples = Examples.of(training(), table)
    judged = {d: Examples.of(trace, table) for d, trace in test.items()}
    lines = inputs_table(examples, judged, table)
    hidden_size = table.shape[1]
    heads = {
        SHIPPED: load_for(pair, str(pair.head), PrereadHead),
        RETRAINED: fitted(Inputs(), examples, table, hidden_size, BEST_EPOCHS, **SIZES),
        BEST: fitted(BEST_INPUTS, examples, table, hidden_size, BEST_EPOCHS, **SIZES),
    }
    best = " | ".join(scores(heads[BEST], one, table) for one in judged.values())
    lines.append(f"| **best new head** | {BEST_INPUTS.size(hidden_size, hidden_size)} | {best} |")
    shipped = " | ".join(scores(heads[SHIPPED], one, table) for one in judged.values())
    lines.insert(2, f"| shipped head, its own training | {Inputs().size(hidden_size, hidden_size)} | {shipped} |")
    rates, shares = throughput_table(heads, dev, test, table)
    costs = ", ".join(
        f"{name.removeprefix('rate, ')} {milliseconds(h, table, hidden_size):.2f}" for name, h in heads.items()
    )
    return "\n".join(
        [
            _conclusion(shares),
            "",
            _about(examples, test),
            "",
            *lines,
            "",
            "## Throughput",
            "",
            *rates,
            "",
            _cost(costs),
            "",
            *_second(),
        ]
    )


def _conclusion(shares: Shares) -> str:
    """What the table of throughputs says of the best new head, against the shipped one and against what was wanted."""
    parts = []
    for cost_ratio in COSTS:
        was, now = (" / ".join(f"{share:.0%}" for share in shares[cost_ratio, name]) for name in (SHIPPED, BEST))
        parts.append(f"{now} at c = {cost_ratio:g} (shipped head: {was})")
    reached = sum(share >= least for c in COSTS for share, least in zip(shares[c, BEST], WANTED, strict=False))
    wanted, domains = " / ".join(f"{share:.0%}" for share in WANTED), ", ".join(DOMAINS)
    return (
        f"The best new head goes this share of the way from the best fixed K to the upper bound ({domains}):\n"
        f"{'; '.join(parts)}.\nWanted were {wanted}; {reached} of {len(COSTS) * len(DOMAINS)} shares reach that."
    )


def _about(examples: Examples, test: Mapping[str, Trace]) -> str:
    texts = ", ".join(f"{d} {trace.num_positions}" for d, trace in test.items())
    sizes = ", ".join(f"{name} {value}" for name, value in SIZES.items())
    return f"""\
{len(examples.labels):,} training positions of all three domains; {SPLITS["test"]} test prompts per domain (tokens: {texts}).
Prices are solved on {SPLITS["dev"]} dev prompts, settings of the training are chosen on the dev prompts of `code`. T = 1.
Share: of the way from the log loss of the acceptance rate alone to that of perfect knowledge, for drawn tokens behind
accepted text.
Heads of the table of inputs have the default size and {EPOCHS} epochs. The best new head reads {BEST_INPUTS.earlier} earlier
positions and has {sizes}, {BEST_EPOCHS} epochs. In brackets 95 % intervals, bootstrap over prompts. Rounds have 1 to
{MAX_DRAFTED} tokens. In the throughput's table, the share is of the way from the best fixed K to the upper bound. DP: the
best policy on the best new head's outputs."""


def _cost(costs: str) -> str:
    return (
        f"Milliseconds per score of one row, one thread: {costs}. Scores depend on the text alone, so a replay computes "
        "one per recorded step. A head that reads the depth is evaluated per start and depth."
    )


def _second() -> Sequence[str]:
    """The same comparison on a pair with another, weaker draft."""
    folder = sliced_draft()
    pair = ModelPair.from_pretrained(target="toy/target", draft=str(folder))
    table = embedding_table(pair.draft)
    dev, test = ({d: judging(pair, d, split, SLICED_SPLITS) for d in DOMAINS} for split in SLICED_SPLITS)
    examples = Examples.of(training(str(folder), SLICED_TEXTS), table)
    hidden_size = table.shape[1]
    heads = {
        RETRAINED: fitted(Inputs(), examples, table, hidden_size, BEST_EPOCHS, **SIZES),
        BEST: fitted(BEST_INPUTS, examples, table, hidden_size, BEST_EPOCHS, **SIZES),
    }
    about = f"""\
The toy draft cut to {hidden_size} dimensions. {len(examples.labels):,} training positions, {SLICED_SPLITS["test"]} test and
{SLICED_SPLITS["dev"]} dev prompts per domain; the same training, nothing chosen on this pair."""
    return ["## A second pair", "", about, "", *throughput_table(heads, dev, test, table)[0]]
